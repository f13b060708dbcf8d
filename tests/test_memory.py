"""Caches say where bytes truly lie; the ledger gives every block back exactly once."""

from __future__ import annotations

import gc
import mmap
import os
from collections import Counter

import msgspec
import numpy as np
import pytest
from geometries import identity_of, rank_spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvlink import limits
from kvlink.errors import ClosedError, ConflictError, LayoutError, UnknownRequestError
from kvlink.layout import STANDARD_LAYOUTS, DType, Group, IndexedBy, Place, PlaneKind, Row, share_of
from kvlink.memory import BlockLedger, Caches, LedgerError, MemoryStats, PlaneKey, Region, Span, allocate_pool
from kvlink.plan import plan_leg

PLACE = Place(engine="p", incarnation="1")
LAYERS, BLOCKS, SLOTS, HEADS, CHANNELS = 2, 5, 4, 3, 6
IDENTITY = identity_of(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=CHANNELS)
K, V = PlaneKind.K, PlaneKind.V


def group_of(**changes):
    base = Group(
        name="full", heads=(0, 1, 2), channels=CHANNELS, dtype=DType.BFLOAT16, block_size=SLOTS, num_blocks=BLOCKS,
        planes=(),
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def from_tensors(tensors, axes, **changes):
    return Caches.from_tensors(tensors, [group_of(**changes)], IDENTITY, PLACE, axes=axes)


def element(caches, layer, kind, block, slot, head, channel):
    """The element as the spec says where it is."""
    group = caches.spec.groups[0]
    (plane,) = (p for p in group.planes if (p.layer, p.kind) == (layer, kind))
    at = plane.offset_bytes + block * plane.block_stride + slot * plane.slot_stride + head * plane.head_stride
    return int(caches.regions[plane.region].array[at : at + group.row_bytes].view(np.uint16)[channel])


def logical_values():
    """A distinct value for each (layer, kv, block, slot, head, channel)."""
    shape = (LAYERS, 2, BLOCKS, SLOTS, HEADS, CHANNELS)
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def check_every_element(caches):
    values = logical_values()
    for layer, which, block, slot, head, channel in np.ndindex(values.shape):
        found = element(caches, layer, (K, V)[which], block, slot, head, channel)
        assert found == values[layer, which, block, slot, head, channel]


def filled(order):
    """All layers in one storage whose axes lie in ``order`` (of "layer kv block slot head channel")."""
    names = ("layer", "kv", "block", "slot", "head", "channel")
    return np.ascontiguousarray(logical_values().transpose([names.index(name) for name in order.split()]))


@pytest.mark.parametrize(
    ("order", "axes"),
    [
        ("layer kv block slot head channel", "kv block slot head channel"),
        ("layer block kv head slot channel", "block kv head slot channel"),
        ("layer block head slot kv channel", "block head slot kv channel"),
        ("block layer kv slot head channel", "block kv slot head channel"),
    ],
)
def test_tensors_are_described_by_their_true_strides_d5_i2(order, axes):
    """D5: strides come from the views. I2: views of one storage are one region."""
    storage = filled(order)
    at = order.split().index("layer")
    tensors = {PlaneKey("full", layer): storage.take(layer, axis=at) for layer in range(LAYERS)}
    views = {key: storage[(slice(None),) * at + (key.layer,)] for key in tensors}
    caches = from_tensors(views, axes)
    assert [region.length for region in caches.regions] == [storage.nbytes]
    check_every_element(caches)


def test_a_permuted_view_means_what_it_says_not_what_lies_there_d5():
    """D5: logical NHD over physical HND, as engines present it."""
    storage = filled("layer kv block head slot channel")
    caches = from_tensors(
        {PlaneKey("full", layer): storage[layer].transpose(0, 1, 3, 2, 4) for layer in range(LAYERS)},
        "kv block slot head channel",
    )
    check_every_element(caches)


def test_k_and_v_fused_in_the_channel_axis():
    storage = filled("layer block head slot kv channel").reshape(LAYERS, BLOCKS, HEADS, SLOTS, 2 * CHANNELS)
    caches = from_tensors(
        {PlaneKey("full", layer): storage[layer] for layer in range(LAYERS)}, {"full": "block head slot (kv channel)"}
    )
    check_every_element(caches)
    one, other = caches.spec.groups[0].planes[:2]
    assert (one.kind, other.kind, other.offset_bytes - one.offset_bytes) == (K, V, 2 * CHANNELS)


def test_separate_allocations_with_padded_pages_are_regions_of_their_own_d5():
    """D5: K and V apart, each block padded by 7 elements."""
    values = logical_values()
    tensors = {}
    for layer in range(LAYERS):
        for which, kind in enumerate((K, V)):
            padded = np.zeros((BLOCKS, SLOTS * HEADS * CHANNELS + 7), dtype=np.uint16)
            strides = (padded.strides[0], HEADS * CHANNELS * 2, CHANNELS * 2, 2)
            view = np.lib.stride_tricks.as_strided(padded, (BLOCKS, SLOTS, HEADS, CHANNELS), strides)
            view[:] = values[layer, which]
            tensors[PlaneKey("full", layer, kind)] = view
    caches = from_tensors(tensors, "block slot head channel")
    assert len(caches.regions) == 2 * LAYERS
    check_every_element(caches)


class FakeStorage:
    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.__array_interface__["data"][0]

    def nbytes(self):
        return self.array.nbytes


class FakeTensor:
    """What is read of a torch tensor: strides in elements, an address, a storage."""

    def __init__(self, storage, view, dtype="torch.bfloat16"):
        self._storage, self._view, self.dtype, self.shape = storage, view, dtype, view.shape

    def data_ptr(self):
        return self._view.__array_interface__["data"][0]

    def stride(self):
        return tuple(stride // self._view.itemsize for stride in self._view.strides)

    def element_size(self):
        return self._view.itemsize

    def untyped_storage(self):
        return FakeStorage(self._storage)


def test_torch_tensors_are_read_without_torch():
    storage = filled("layer block head slot kv channel").reshape(LAYERS, BLOCKS, HEADS, SLOTS, 2 * CHANNELS)
    tensors = {PlaneKey("full", layer): FakeTensor(storage, storage[layer]) for layer in range(LAYERS)}
    caches = from_tensors(tensors, "block head slot (kv channel)")
    assert [region.length for region in caches.regions] == [storage.nbytes]
    check_every_element(caches)
    tensors[PlaneKey("full", 0)] = FakeTensor(storage, storage[0], "torch.float16")
    with pytest.raises(LayoutError, match=r"holds float16 \(2 bytes\).*states bfloat16"):
        from_tensors(tensors, "block head slot (kv channel)")


def test_pointers_of_one_allocation_are_one_region():
    storage = filled("layer kv block slot head channel")
    base = storage.__array_interface__["data"][0]
    row = CHANNELS * 2
    block = SLOTS * HEADS * row
    plane = BLOCKS * block
    spans = {
        PlaneKey("full", layer, kind): Span(
            base + (2 * layer + which) * plane, storage.nbytes - (2 * layer + which) * plane, block, HEADS * row, row
        )
        for layer in range(LAYERS)
        for which, kind in enumerate((K, V))
    }
    caches = Caches.from_pointers(spans, [group_of()], IDENTITY, PLACE, keepalive=[storage])
    assert [region.length for region in caches.regions] == [storage.nbytes]
    check_every_element(caches)


def test_spans_that_only_touch_stay_apart():
    """Two allocations may happen to be neighbours; one registration need not reach over both."""
    storage = filled("layer kv block slot head channel")
    base, row = storage.__array_interface__["data"][0], CHANNELS * 2
    half = storage[0, 0].nbytes
    spans = {
        PlaneKey("full", 0, kind): Span(base + which * half, half, SLOTS * HEADS * row, HEADS * row, row)
        for which, kind in enumerate((K, V))
    }
    caches = Caches.from_pointers(spans, [group_of()], IDENTITY, PLACE)
    assert [(region.address, region.length) for region in caches.regions] == [(base, half), (base + half, half)]


def test_groups_that_alias_memory_share_a_region_i2():
    """I2: a hybrid model's groups are views of the same bytes, registered once."""
    storage = filled("layer kv block slot head channel")
    groups = [group_of(), group_of(name="swa")]
    tensors = {PlaneKey("full", 0): storage[0], PlaneKey("swa", 1): storage[0]}
    caches = Caches.from_tensors(tensors, groups, IDENTITY, PLACE, axes="kv block slot head channel")
    assert len(caches.regions) == 1
    full, swa = caches.spec.groups
    assert [plane.offset_bytes for plane in full.planes] == [plane.offset_bytes for plane in swa.planes]


@pytest.mark.parametrize(
    ("tensor", "axes", "changes", "message"),
    [
        ("kv block slot head channel", "kv block head slot channel", {}, r"axis slot has 3 entries.*states 4"),
        ("kv block slot head channel", "kv block slot head", {}, "name block and channel"),
        ("kv block slot head channel", "kv block slot slot channel", {}, "once"),
        ("kv block slot head channel", "kv page slot head channel", {}, "name block and channel"),
        ("kv block slot head channel", "block slot head channel", {}, r"name 4 dimensions"),
        ("kv block slot head channel", "kv block slot head channel", {"num_blocks": 6}, "axis block has 5.*states 6"),
        ("kv block slot head channel", "kv block slot head channel", {"dtype": DType.FLOAT32}, "float32"),
        ("kv block slot head channel", "kv block slot head channel", {"channels": 8}, r"lacks channels \[6"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_what_was_said_is_refused(tensor, axes, changes, message):
    storage = filled("layer " + tensor)
    with pytest.raises(LayoutError, match=message):
        from_tensors({PlaneKey("full", layer): storage[layer] for layer in range(LAYERS)}, axes, **changes)


def test_wrong_keys_and_things_that_are_no_tensors_are_refused():
    storage = filled("layer kv block slot head channel")
    axes = "kv block slot head channel"
    for tensors, message in (
        ({PlaneKey("swa", 0): storage[0]}, "of no group given"),
        ({PlaneKey("full", 0, K): storage[0]}, "leave its kind out"),
        ({PlaneKey("full", 0): [1, 2]}, "is a list; pass a NumPy array"),
        ({PlaneKey("full", 0): storage[0][::-1]}, "negative strides"),
        ({PlaneKey("full", 7): storage[0]}, r"layer is 7"),
        ({}, r"groups\.full has no tensors"),
    ):
        with pytest.raises(LayoutError, match=message):
            from_tensors(tensors, axes)
    with pytest.raises(LayoutError, match="no kind and its axes no kv"):
        from_tensors({PlaneKey("full", 0): storage[0][0]}, "block slot head channel")
    with pytest.raises(LayoutError, match="no axes are given for group 'full'"):
        from_tensors({PlaneKey("full", 0): storage[0]}, {"swa": axes})
    with pytest.raises(LayoutError, match="has no kind"):
        Caches.from_pointers({PlaneKey("full", 0): Span(1, 1, 1, 1)}, [group_of()], IDENTITY, PLACE)
    with pytest.raises(LayoutError, match="must be positive"):
        Caches.from_pointers({PlaneKey("full", 0, K): Span(0, 1, 1, 1)}, [group_of()], IDENTITY, PLACE)


def test_channels_need_not_be_contiguous_d5():
    """D5: a transposed tensor is described by its strides like any other."""
    storage = filled("layer kv block slot channel head")
    caches = from_tensors(
        {PlaneKey("full", layer): storage[layer] for layer in range(LAYERS)}, "kv block slot channel head"
    )
    assert all(plane.channel_stride == 2 * HEADS for plane in caches.spec.groups[0].planes)
    group, plane = caches.spec.groups[0], caches.spec.groups[0].planes[1]
    at = (
        plane.offset_bytes
        + 3 * plane.block_stride
        + 2 * plane.slot_stride
        + plane.head_stride
        + 5 * plane.channel_stride
    )
    assert caches.regions[0].array[at : at + 2].view(np.uint16)[0] == logical_values()[0, 1, 3, 2, 1, 5]
    assert group.row_bytes == 2 * CHANNELS


def test_channels_that_kinds_share_must_be_contiguous():
    storage = np.zeros((2 * CHANNELS, BLOCKS, HEADS, SLOTS), dtype=np.uint16).transpose(1, 2, 3, 0)
    with pytest.raises(LayoutError, match="kinds that share an axis must be contiguous"):
        from_tensors({PlaneKey("full", 0): storage}, "block head slot (kv channel)")


def test_blocks_of_several_tensor_blocks_are_described_by_their_tensors():
    storage = filled("layer kv block slot head channel")
    tensors = {PlaneKey("full", layer): storage[layer, :, :4] for layer in range(LAYERS)}
    caches = from_tensors(tensors, "kv block slot head channel", block_size=2 * SLOTS, num_blocks=2, ratio=2)
    group = caches.spec.groups[0]
    assert (group.tensor_slots, group.tensor_blocks) == (SLOTS, 4)
    with pytest.raises(LayoutError, match=r"axis block has 4 entries.*states 2"):
        from_tensors(tensors, "kv block slot head channel", block_size=SLOTS, num_blocks=2)


def test_a_latent_row_of_several_dtypes_is_kinds_side_by_side():
    """512 fp8, 4 float32 scales, 64 bfloat16 in one row of bytes, as sparse-attention caches store it."""
    rows = (Row(PlaneKind.LATENT_SCALE, 4, DType.FLOAT32), Row(PlaneKind.ROPE, 64, DType.BFLOAT16))
    group = group_of(name="mla", heads=(0,), channels=512, dtype=DType.FLOAT8_E4M3, rows=rows)
    group = msgspec.structs.replace(group, num_heads=1)
    storage = np.zeros((LAYERS, BLOCKS, SLOTS, 512 + 16 + 128), dtype=np.uint8)
    tensors = {PlaneKey("mla", layer): storage[layer] for layer in range(LAYERS)}
    axes = "block slot (latent latent_scale rope channel)"
    caches = Caches.from_tensors(tensors, [group], IDENTITY, PLACE, axes=axes)
    planes = caches.spec.groups[0].planes[:3]
    assert [plane.offset_bytes for plane in planes] == [0, 512, 528]
    assert {plane.slot_stride for plane in planes} == {656}
    with pytest.raises(LayoutError, match=r"has 656 bytes, the rows of latent and rope in groups.mla take 640"):
        Caches.from_tensors(tensors, [group], IDENTITY, PLACE, axes="block slot (latent rope channel)")
    with pytest.raises(LayoutError, match=r"name kinds \['latent', 'roop'\]"):
        Caches.from_tensors(tensors, [group], IDENTITY, PLACE, axes="block slot (latent roop channel)")


def test_a_latent_in_two_tensors_is_one_kind_in_two_parts():
    group = msgspec.structs.replace(group_of(name="mla", heads=(0,), channels=6), num_heads=1)
    parts = [np.zeros((BLOCKS, SLOTS, width), dtype=np.uint16) for width in (4, 2)]
    tensors = {PlaneKey("mla", 0, PlaneKind.LATENT, first): part for first, part in zip((0, 4), parts, strict=True)}
    caches = Caches.from_tensors(tensors, [group], IDENTITY, PLACE, axes="block slot channel")
    assert [(p.first_channel, p.channels) for p in caches.spec.groups[0].planes] == [(0, 4), (4, 2)]
    with pytest.raises(LayoutError, match=r"layer 0 latent lacks channels \[4"):
        Caches.from_tensors(dict(list(tensors.items())[:1]), [group], IDENTITY, PLACE, axes="block slot channel")


def test_states_and_rows_have_entries_not_tokens():
    """A conv state of chunks times width, and a row of an engine's own int32 buffer."""
    conv = msgspec.structs.replace(
        group_of(name="conv", channels=4, block_size=3), num_heads=3, indexed_by=IndexedBy.ENTRY
    )
    row = group_of(name="row", heads=(0,), channels=64, dtype=DType.OPAQUE, block_size=1)
    row = msgspec.structs.replace(row, num_heads=1, indexed_by=IndexedBy.ENTRY)
    tensors = {
        PlaneKey("conv", 0, PlaneKind.CONV): np.zeros((BLOCKS, 3, 4, 3), dtype=np.uint16),
        PlaneKey("row", 0, PlaneKind.ROW): np.zeros((BLOCKS, 16), dtype=np.int32),
    }
    axes = {"conv": "block head channel slot", "row": "block channel"}
    caches = Caches.from_tensors(tensors, [conv, row], IDENTITY, PLACE, axes=axes)
    (one,), (other,) = (group.planes for group in caches.spec.groups)
    assert (one.slot_stride, one.channel_stride, one.head_stride) == (2, 6, 24)
    assert (other.block_stride, other.channel_stride) == (64, 0)


def test_aux_buffers_of_any_size_are_parts_of_one_row():
    """SGLang's: ten buffers of 64 to 512 bytes a request slot, one group, one block list."""
    widths = (16, 128, 4, 33, 64)
    row = msgspec.structs.replace(
        group_of(name="aux", heads=(0,), channels=4 * sum(widths), dtype=DType.OPAQUE, block_size=1),
        num_heads=1, indexed_by=IndexedBy.ENTRY,
    )  # fmt: skip
    buffers, at = {}, 0
    for width in widths:
        buffers[PlaneKey("aux", 0, PlaneKind.ROW, at)] = np.zeros((BLOCKS, width), dtype=np.int32)
        at += 4 * width
    caches = Caches.from_tensors(buffers, [row], IDENTITY, PLACE, axes="block channel")
    assert [plane.channels for plane in caches.spec.groups[0].planes] == [4 * width for width in widths]
    plan = plan_leg(
        caches.spec, caches.spec, share_of(caches.spec).groups, source_blocks=((3,),), target_blocks=((1,),),
        first_token=0, tokens=99,
    )  # fmt: skip
    assert sorted(segment.run_bytes for segment in plan.segments) == sorted(4 * width for width in widths)


def test_every_group_has_tensors_or_is_refused_e1():
    """E1: a group whose tensors were forgotten is named."""
    storage = filled("layer kv block slot head channel")
    tensors, groups = {PlaneKey("full", 0): storage[0]}, [group_of(), group_of(name="swa")]
    axes = "kv block slot head channel"
    with pytest.raises(LayoutError, match=r"groups\.swa has no tensors or pointers"):
        Caches.from_tensors(tensors, groups, IDENTITY, PLACE, axes=axes)
    with pytest.raises(LayoutError, match=r"groups\.full is said to be absent, but has tensors"):
        Caches.from_tensors(tensors, groups, IDENTITY, PLACE, axes=axes, absent=("full", "swa"))
    with pytest.raises(LayoutError, match=r"groups\.swa\.planes is 0 planes"):
        Caches.from_tensors(tensors, groups, IDENTITY, PLACE, axes=axes, absent=("swa",))
    stage = msgspec.structs.replace(PLACE, pp_size=2)
    caches = Caches.from_tensors(tensors, groups, IDENTITY, stage, axes=axes, absent=("swa",))
    assert caches.spec.groups[1].planes == ()


def test_groups_that_share_memory_do_not_both_write_a_block():
    ledger = BlockLedger(classes=(0, 0, 2))
    with pytest.raises(LayoutError, match=r"block 4 of group 0 is listed twice.*shares its memory"):
        ledger.reserve("r", [[3, 4], [4], []])
    ledger.reserve("r", [[3], [4], [3]])
    with pytest.raises(ConflictError, match="block 4 of group 0 belongs to request r"):
        ledger.reserve("s", [[4], [], []])
    ledger.drain("r")
    assert ledger.drained("r") == ((3,), (4,), (3,))
    ledger.reserve("s", [[4], [3], []])


@pytest.mark.parametrize("layout", STANDARD_LAYOUTS)
def test_standard_caches_have_memory_for_every_region(layout):
    caches = Caches.standard(rank_spec(layout))
    assert tuple(region.length for region in caches.regions) == caches.spec.region_bytes
    starts = [region.address for region in caches.regions]
    assert all(start % limits.HUGE_PAGE_BYTES == 0 for start in starts)
    for index, region in enumerate(caches.regions):
        assert not region.array.any()
        region.array[:] = index + 1
    assert all((region.array == index + 1).all() for index, region in enumerate(caches.regions))


def test_caches_refuse_regions_that_do_not_fit_the_spec():
    caches = Caches.standard(rank_spec("nhd"))
    with pytest.raises(LayoutError, match="region_bytes"):
        Caches(caches.spec, caches.regions[:1])


def test_a_region_keeps_its_memory_alive():
    array = Caches.standard(rank_spec("nhd")).regions[0].array
    gc.collect()
    array[:] = 7
    assert (array == 7).all()


def test_a_pool_is_zeroed_writable_and_outlived_by_its_arrays():
    pool = allocate_pool(5000)
    assert (pool.nbytes, pool.address % limits.HUGE_PAGE_BYTES) == (5000, 0)
    array = pool.array
    assert not array.any()
    pool.close()
    pool.close()
    array[:] = 1
    assert array.all()
    with pytest.raises(ClosedError):
        _ = pool.array
    with allocate_pool(1) as other:
        other.array[0] = 1


@pytest.mark.parametrize("nbytes", [0, -1, limits.MAX_OFFSET_BYTES + 1])
def test_impossible_pools_are_refused(nbytes):
    with pytest.raises(LayoutError, match="impossible"):
        allocate_pool(nbytes)


# --- the ledger -----------------------------------------------------------------------------------------------------


def stats_of(**counts):
    return MemoryStats(**{**dict.fromkeys(MemoryStats.__slots__, 0), **counts})


def test_source_blocks_come_back_when_hold_and_leases_have_ended_a3():
    """A3: ending the hold frees nothing that an attempt may still read."""
    ledger = BlockLedger()
    ledger.hold("r", [[4, 5], [6]])
    assert ledger.stats() == stats_of(held=3)
    assert ledger.lease(("d", 1), "r") == ((4, 5), (6,))
    ledger.lease(("d", 2), "r")
    assert ledger.stats() == stats_of(leased=3)
    assert ledger.leased_blocks == 3
    assert ledger.end_lease(("d", 1)) is None
    assert ledger.end_hold("r") is None
    assert ledger.stats() == stats_of(leased=3)
    with pytest.raises(UnknownRequestError):
        ledger.lease(("d", 3), "r")
    assert ledger.end_lease(("d", 2)) == ((4, 5), (6,))
    assert ledger.stats() == stats_of()


def test_an_unread_hold_comes_back_at_once():
    ledger = BlockLedger()
    ledger.hold("r", [[1]])
    assert ledger.end_hold("r") == ((1,),)
    ledger.hold("r", [[2]])
    assert ledger.end_hold("r") == ((2,),)


def test_requests_may_hold_the_same_source_blocks():
    ledger = BlockLedger()
    ledger.hold("one", [[1, 2]])
    ledger.hold("two", [[1, 3]])
    assert ledger.end_hold("one") == ((1, 2),)
    assert ledger.stats() == stats_of(held=2)


def test_a_key_is_held_once():
    ledger = BlockLedger()
    ledger.hold("r", [[1]])
    ledger.lease(1, "r")
    with pytest.raises(ConflictError, match="held already"):
        ledger.hold("r", [[2]])
    ledger.end_hold("r")
    with pytest.raises(ConflictError):
        ledger.hold("r", [[2]])


def test_ending_twice_is_a_bug_of_ours():
    ledger = BlockLedger()
    ledger.hold("r", [[1]])
    ledger.lease(1, "r")
    with pytest.raises(LedgerError, match="already"):
        ledger.lease(1, "r")
    ledger.end_lease(1)
    for again in (lambda: ledger.end_lease(1), lambda: ledger.end_hold("other")):
        with pytest.raises(LedgerError):
            again()
    ledger.end_hold("r")
    with pytest.raises(RuntimeError):
        ledger.end_hold("r")
    assert ledger.stats() == stats_of()


def test_target_blocks_pass_through_their_states_and_come_back_once():
    ledger = BlockLedger()
    ledger.reserve("r", [[1, 2]])
    assert ledger.stats() == stats_of(reserved=2)
    ledger.land("r")
    assert ledger.stats() == stats_of(landed=2)
    ledger.install("r")
    assert (ledger.stats(), ledger.state_of("r")) == (stats_of(installed=2), "installed")
    assert ledger.release("r") == ((1, 2),)
    assert (ledger.stats(), ledger.state_of("r")) == (stats_of(), None)
    with pytest.raises(LedgerError, match="no target blocks are out"):
        ledger.release("r")


@pytest.mark.parametrize("landed", [False, True])
def test_failed_blocks_drain_until_their_cut_off_a2(landed):
    """A2, A3: only the cut-off's end gives them back, and until then nobody else gets them."""
    ledger = BlockLedger()
    ledger.reserve("r", [[1, 2]])
    if landed:
        ledger.land("r")
    ledger.drain("r")
    assert ledger.stats() == stats_of(draining=2)
    with pytest.raises(ConflictError, match=r"block 2 of group 0 belongs to request r \(draining\)"):
        ledger.reserve("next", [[2, 3]])
    for wrong in (ledger.release, ledger.install, ledger.land, ledger.drain):
        with pytest.raises(LedgerError, match="the blocks are draining"):
            wrong("r")
    assert ledger.drained("r") == ((1, 2),)
    ledger.reserve("next", [[2, 3]])


def test_two_live_requests_never_own_one_block_a1_g5():
    """A1: refused before a byte moves, and a refusal changes nothing. G5: after release the block is free again."""
    ledger = BlockLedger()
    ledger.reserve("one", [[1, 2], [7]])
    ledger.land("one")
    ledger.install("one")
    before = ledger.stats()
    for blocks in ([[3, 2], []], [[], [8, 7]]):
        with pytest.raises(ConflictError, match="belongs to request one"):
            ledger.reserve("two", blocks)
    with pytest.raises(ConflictError, match=r"has blocks already \(installed\)"):
        ledger.reserve("one", [[9], []])
    with pytest.raises(LayoutError, match="block 4 of group 1 is listed twice"):
        ledger.reserve("two", [[4], [4, 4]])
    assert ledger.stats() == before
    ledger.reserve("two", [[7], [1, 2]])
    ledger.release("one")
    ledger.reserve("one", [[1], [7]])


class LedgerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, blocks out and blocks back add up (B8)."""

    reservations = Bundle("reservations")

    def __init__(self):
        super().__init__()
        self.ledger = BlockLedger()
        self.free = set(range(12))
        self.out = {}
        self.serial = 0

    @rule(target=reservations, wanted=st.sets(st.integers(0, 11), max_size=4))
    def reserve(self, wanted):
        self.serial += 1
        key = f"r{self.serial}"
        if wanted <= self.free:
            self.ledger.reserve(key, [sorted(wanted)])
            self.free -= wanted
            self.out[key] = wanted
        else:
            with pytest.raises(ConflictError):
                self.ledger.reserve(key, [sorted(wanted)])
        return key

    @rule(key=reservations, event=st.sampled_from(["land", "install", "drain"]))
    def step(self, key, event):
        allowed = {"land": ["reserved"], "install": ["landed"], "drain": ["reserved", "landed"]}[event]
        if self.ledger.state_of(key) in allowed:
            getattr(self.ledger, event)(key)
        else:
            with pytest.raises(LedgerError):
                getattr(self.ledger, event)(key)

    @rule(key=reservations, event=st.sampled_from(["release", "drained"]))
    def give_back(self, key, event):
        if self.ledger.state_of(key) == {"release": "installed", "drained": "draining"}[event]:
            (ids,) = getattr(self.ledger, event)(key)
            assert set(ids) == self.out.pop(key)
            assert not self.free & set(ids)
            self.free |= set(ids)
        else:
            with pytest.raises(LedgerError):
                getattr(self.ledger, event)(key)

    @invariant()
    def nothing_is_lost(self):
        stats = self.ledger.stats()
        out = stats.reserved + stats.landed + stats.draining + stats.installed
        assert out + len(self.free) == 12
        assert Counter(self.out.keys()) == Counter(key for key in self.out if self.ledger.state_of(key))


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


# --- shareable pools ------------------------------------------------------------------------------------------------


def test_a_shareable_pool_lies_in_a_file_that_others_only_read() -> None:
    """K2: whoever gets the descriptor can neither write, nor map it writable, nor cut it short under us."""
    with allocate_pool(3 * limits.HUGE_PAGE_BYTES + 5, shareable=True) as pool:
        assert pool.address % limits.HUGE_PAGE_BYTES == 0
        assert pool.pages in {"huge", "transparent huge", "ordinary"}
        pool.array[:] = 7
        backing = pool.backing(pool.address + 100, 50)
        assert backing is not None
        assert os.pread(backing.descriptor, 50, backing.offset) == bytes([7]) * 50
        for spoil in (
            lambda: os.pwrite(backing.descriptor, b"x", 0),
            lambda: os.ftruncate(backing.descriptor, 1),
            lambda: mmap.mmap(backing.descriptor, 4096),
        ):
            with pytest.raises(OSError, match="permitted"):
                spoil()
        assert pool.backing(pool.address + pool.nbytes - 10, 11) is None
        assert pool.backing(pool.address - 1, 5) is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(backing.descriptor)


def test_a_private_pool_has_no_file() -> None:
    with allocate_pool(4096) as pool:
        assert pool.backing(pool.address, 1) is None


def test_what_lies_in_a_shareable_pool_is_backed() -> None:
    """A cache of an engine's own tensors, made inside a pool, can be mapped like one that KVLink allocated."""
    spec = rank_spec("nhd")
    own = Caches.standard(spec, shareable=True)
    assert all(region.backing is not None for region in own.regions)
    assert all(region.backing is None for region in Caches.standard(spec).regions)
    with allocate_pool(sum(spec.region_bytes), shareable=True) as pool:
        starts = np.cumsum([0, *spec.region_bytes])
        regions = [Region(pool.address + int(at), n) for at, n in zip(starts, spec.region_bytes, strict=False)]
        outside = Caches.standard(spec)
        backed = Caches(spec, tuple(regions)).within(pool)
        offsets = [region.backing.offset for region in backed.regions if region.backing]
        assert [offset - offsets[0] for offset in offsets] == starts[:-1].tolist()
        assert outside.within(pool).regions == outside.regions
