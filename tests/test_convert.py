"""`kvlink.convert`: whole target pools against plain loops, and what is refused before a byte is written."""

import numpy as np
import pytest
from geometries import engine_specs, identity_of, rank_spec, scattered
from number_cases import NUMPY, bits_of, expected

import kvlink
from kvlink.errors import ConfigError, LayoutError, MismatchError, UnsupportedError
from kvlink.layout import STANDARD_LAYOUTS, DType, standard_spec
from kvlink.memory import PlaneKey

TOKENS = 21


def filled(spec, seed):
    caches = kvlink.Caches.standard(spec)
    rng = np.random.default_rng(seed)
    for region in caches.regions:
        region.array[:] = rng.integers(0, 256, region.length, np.uint8)
    return caches


def of_dtype(spec, dtype, layout, scales=None):
    """The same rank in another element type and layout."""
    group = spec.groups[0]
    return standard_spec(
        layout, identity=spec.identity, place=spec.place, layers=sorted({plane.layer for plane in group.planes}),
        heads=group.heads, block_size=group.block_size, num_blocks=group.num_blocks, dtype=dtype, scales=scales,
    )  # fmt: skip


def row(caches, plane, head, token, blocks):
    """A view of one token's row of one head, in its element type."""
    group = caches.spec.groups[0]
    start = (
        plane.offset_bytes
        + blocks[token // group.block_size] * plane.block_stride
        + token % group.block_size * plane.slot_stride
        + group.heads.index(head) * plane.head_stride
    )
    return caches.regions[plane.region].array[start : start + group.row_bytes].view(NUMPY[group.dtype])


def scale_of(group, plane, head):
    if not group.scales:
        return None
    scales = group.scales[group.planes.index(plane) if len(group.scales) > 1 else 0]
    return scales[group.heads.index(head) if len(scales) > 1 else 0]


def expect(sources, target, source_blocks, target_blocks, first, tokens):
    """The target's regions after a conversion, by one row at a time."""
    want = kvlink.Caches.standard(target.spec)
    for mine, theirs in zip(want.regions, target.regions, strict=True):
        mine.array[:] = theirs.array
    group = target.spec.groups[0]
    for plane in group.planes:
        for head in group.heads:
            source, other = next(
                (cache, candidate)
                for cache in sources
                for candidate in cache.spec.groups[0].planes
                if (candidate.layer, candidate.kind) == (plane.layer, plane.kind) and head in cache.spec.groups[0].heads
            )
            scales = scale_of(source.spec.groups[0], other, head), scale_of(group, plane, head)
            for token in range(first, tokens):
                stored = row(source, other, head, token, source_blocks)
                out = row(want, plane, head, token, target_blocks)
                same = source.spec.groups[0].dtype is group.dtype and scales[0] == scales[1]
                out.view(bits_of(out).dtype)[:] = bits_of(stored) if same else expected(stored, group.dtype, *scales)
    return want


def check(sources, targets, first=0, tokens=TOKENS, **options):
    one, other = sources[0].spec, targets[0].spec
    source_blocks, target_blocks = scattered(one, tokens, 3), scattered(other, tokens, 4)
    want = [expect(sources, target, source_blocks, target_blocks, first, tokens) for target in targets]
    moved = kvlink.convert(
        sources if len(sources) > 1 else sources[0], targets if len(targets) > 1 else targets[0],
        source_blocks=[source_blocks], target_blocks=[target_blocks], first_token=first, tokens=tokens, **options,
    )  # fmt: skip
    for target, wanted in zip(targets, want, strict=True):
        for got, region in zip(target.regions, wanted.regions, strict=True):
            np.testing.assert_array_equal(got.array, region.array)
    return moved


@pytest.mark.parametrize("source_layout", STANDARD_LAYOUTS)
@pytest.mark.parametrize("target_layout", STANDARD_LAYOUTS)
def test_any_layout_becomes_any_other(source_layout, target_layout):
    source = filled(rank_spec(source_layout, block_size=4), 1)
    target = filled(rank_spec(target_layout, block_size=5, engine="d"), 2)
    rows = TOKENS * 2 * 2 * 4
    assert check([source], [target]) == rows * source.spec.groups[0].row_bytes


@pytest.mark.parametrize("source_dtype", NUMPY, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("target_dtype", NUMPY, ids=lambda dtype: dtype.value)
def test_any_type_becomes_any_other_with_a_scale_a_plane_and_head(source_dtype, target_dtype):
    rng = np.random.default_rng(5)
    table = [tuple(map(tuple, rng.uniform(0.1, 9, (4, 4)).astype(np.float32).tolist())) for _ in range(2)]
    base = rank_spec()
    source = filled(of_dtype(base, source_dtype, "nhd", table[0] if source_dtype.quantised else ()), 1)
    target = filled(of_dtype(base, target_dtype, "hnd", table[1] if target_dtype.quantised else ()), 2)
    check([source], [target], first=3, threads=2)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 4), (4, 1), (1, 2), (4, 4)])
def test_engines_of_several_ranks_are_sharded_anew(source_tp, target_tp):
    sources = [filled(spec, 1) for spec in engine_specs("nhd", identity=identity_of(), tp=source_tp)]
    targets = [filled(spec, 2) for spec in engine_specs("hnd", identity=identity_of(), tp=target_tp, engine="d")]
    check(sources, targets)


class Interface:
    """Has nothing but NumPy's array interface."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


def described(make, spec, seed, layout="block slot head channel"):
    """A cache from tensors of an engine's own, K and V of each layer apart."""
    group = spec.groups[0]
    rng = np.random.default_rng(seed)
    shape = group.num_blocks, group.block_size, len(group.heads), group.channels
    tensors = {
        PlaneKey(group.name, plane.layer, plane.kind): make(rng.integers(0, 1 << 16, shape, np.uint16).view(np.float16))
        for plane in group.planes
    }
    return kvlink.Caches.from_tensors(tensors, spec.groups, spec.identity, spec.place, axes=layout)


def test_whatever_has_an_array_interface_is_a_tensor():
    spec = rank_spec("apart", dtype=DType.FLOAT16)
    source = described(Interface, spec, 1)
    check([source], [filled(rank_spec("hnd", dtype=DType.BFLOAT16, engine="d"), 2)])


def blocks_for(caches):
    return [scattered(caches.spec, TOKENS, 1)]


def refusals():
    plain, quantised = rank_spec(), of_dtype(rank_spec(), DType.INT8, "nhd", ())
    other_model = rank_spec(identity=identity_of(num_kv_heads=8))
    some_heads = rank_spec(heads=(0, 1))
    everything = rank_spec(engine="d")
    return [
        ("another model", plain, other_model, MismatchError, "identity.num_kv_heads"),
        ("heads that no source has", some_heads, everything, UnsupportedError, "head 2"),
        ("int8 without scales", plain, quantised, UnsupportedError, "states no scales"),
    ]


@pytest.mark.parametrize(
    ("one", "other", "error", "says"), [case[1:] for case in refusals()], ids=[case[0] for case in refusals()]
)
def test_what_would_lose_meaning_is_refused_before_a_byte_is_written(one, other, error, says):
    """E2: without its scales a quantised cache is not converted."""
    source, target = filled(one, 1), filled(other, 2)
    before = [region.array.copy() for region in target.regions]
    with pytest.raises(error, match=says):
        kvlink.convert(source, target, source_blocks=blocks_for(source), target_blocks=blocks_for(target),
                       tokens=TOKENS)  # fmt: skip
    for region, untouched in zip(target.regions, before, strict=True):
        np.testing.assert_array_equal(region.array, untouched)


def test_a_cache_is_not_converted_onto_itself():
    caches = filled(rank_spec(), 1)
    with pytest.raises(LayoutError, match="share memory"):
        kvlink.convert(caches, caches, source_blocks=blocks_for(caches), target_blocks=blocks_for(caches), tokens=9)


def test_impossible_arguments_are_refused():
    source, target = filled(rank_spec(), 1), filled(rank_spec(engine="d"), 2)
    sides = {"source_blocks": blocks_for(source), "target_blocks": blocks_for(target)}
    with pytest.raises(ConfigError, match="threads is 0"):
        kvlink.convert(source, target, **sides, tokens=TOKENS, threads=0)
    with pytest.raises(LayoutError, match="no target cache"):
        kvlink.convert(source, [], **sides, tokens=TOKENS)
    with pytest.raises(LayoutError, match="hold fewer than"):
        kvlink.convert(source, target, **sides, tokens=TOKENS + 40)
