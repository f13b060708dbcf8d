"""The kernels' PTX, for three architectures, run on layouts as engines have them: bit-exact with the CPU."""

import re

import numpy as np
import pytest
from number_cases import NUMPY, bits_of, every_pattern, expected, flat_plan
from ptx_launch import ARCHS, Device, module_of, ptx_of, random_bytes
from ptx_program import PtxError, kernels_of

from kvlink.layout import STANDARD_LAYOUTS, DType, Identity, Place, share_of, standard_spec
from kvlink.plan import CopyPlan, Dim, Segment, assign_legs, plan_leg
from kvlink.relayout import Side, digest_leaves, move_local, native_plan

BF16, E4M3 = DType.BFLOAT16, DType.FLOAT8_E4M3
NARROWING, WIDENING = (BF16, E4M3), (E4M3, BF16)
LAYOUTS = 66


def layout_case(seed):
    """Two engines' caches of one model, a token range, and shuffled blocks: the plan, and both sides' bytes."""
    rng = np.random.default_rng(seed)
    types = [(BF16, BF16), NARROWING, WIDENING, (E4M3, E4M3)][seed % 4]
    layers, heads, channels = int(rng.integers(1, 3)), int(rng.choice([1, 2, 3])), int(rng.choice([4, 8, 24]))
    identity = Identity(model="m", num_layers=layers, num_kv_heads=heads, head_dim=channels)
    tokens = int(rng.integers(1, 30))
    specs = []
    for name, dtype in zip(("prefill", "decode"), types, strict=True):
        scales = rng.uniform(0.2, 3, (2 * layers if dtype.quantised else 0, heads)).astype(np.float32)
        specs.append(
            standard_spec(
                str(rng.choice(STANDARD_LAYOUTS)), identity=identity, place=Place(engine=name, incarnation="1"),
                layers=range(layers), heads=range(heads), block_size=int(rng.choice([1, 4, 5, 16])), num_blocks=31,
                dtype=dtype, scales=tuple(map(tuple, scales.tolist())),
            )
        )  # fmt: skip
    (leg,) = assign_legs(*[[share_of(spec)] for spec in specs])
    blocks = [[rng.permutation(31)[: -(-tokens // spec.groups[0].block_size)].tolist()] for spec in specs]
    first = int(rng.integers(0, tokens))
    plan = plan_leg(*specs, leg.groups, source_blocks=blocks[0], target_blocks=blocks[1], first_token=first,
                    tokens=tokens)  # fmt: skip
    return plan, *[[random_bytes(rng, nbytes) for nbytes in spec.region_bytes] for spec in specs]


def regions(arrays):
    return [(array.ctypes.data, array.nbytes) for array in arrays]


def moved_by_the_cpu(plan, sources, targets):
    targets = [target.copy() for target in targets]
    move_local(native_plan(plan), regions(sources), regions(targets))
    return targets


def same(results, want):
    return all(np.array_equal(one, other) for one, other in zip(results, want, strict=True))


@pytest.mark.parametrize("arch", ARCHS)
def test_layouts_move_bit_exactly_over_whole_pools(arch):
    widths = set()
    for seed in range(LAYOUTS):
        plan, sources, targets = layout_case(seed)
        device = Device(sources, targets)
        widths.update(device.move(plan, lambda conversion: module_of(arch, conversion)))
        assert same(device.results(), moved_by_the_cpu(plan, sources, targets)), f"{arch}, seed {seed}"
    assert len(widths) > 1


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_each_width_is_what_the_alignment_allows(width):
    """Rows that are multiples of the width and of no more, in a pool that begins at one."""
    run = width * 3
    segment = Segment(
        np.array([[0, width, 0, 0]]), np.array([[0, 0]]), (Dim(5, run + width * 2, run + width * 4),), run
    )
    plan = CopyPlan((segment,), segment.total_bytes)
    rng = np.random.default_rng(width)
    sources, targets = [random_bytes(rng, width * 40)], [random_bytes(rng, width * 40)]
    device = Device(sources, targets)
    assert device.move(plan, lambda conversion: module_of("sm_90", conversion)) == [width]
    assert same(device.results(), moved_by_the_cpu(plan, sources, targets))


def test_a_segment_too_large_for_one_launch_is_cut():
    plan, sources, targets = layout_case(5)
    device = Device(sources, targets)
    device.move(plan, lambda conversion: module_of("sm_80", conversion), blocks=1, threads=32, max_items=7)
    assert same(device.results(), moved_by_the_cpu(plan, sources, targets))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("moves", [False, True], ids=["digest", "move-and-digest"])
def test_leaves_are_digested_as_their_bytes_pass(arch, moves):
    """Two whole leaves and a short one, over two segments that meet inside a leaf."""
    segments = (
        Segment(np.array([[0, 0, 0, 64]]), np.array([[0, 16 * 1024], [24 * 1024, 0]]), (), 8 * 1024),
        Segment(np.array([[0, 33 * 1024, 0, 40 * 1024]]), np.array([[0, 0]]), (Dim(70, 256, 272),), 256),
    )
    plan = CopyPlan(segments, sum(segment.total_bytes for segment in segments))
    rng = np.random.default_rng(3)
    sources, targets = [random_bytes(rng, 60 * 1024)], [random_bytes(rng, 60 * 1024)]
    device = Device(sources, targets)
    got = device.digest(plan, lambda conversion: module_of(arch, conversion), moves, threads=128)
    assert got == digest_leaves(native_plan(plan), Side.SOURCE, regions(sources))
    assert same(device.results(), moved_by_the_cpu(plan, sources, targets) if moves else targets)


@pytest.mark.parametrize("nbytes", [1, 3, 5, 8, 9, 16, 17, 100, 128, 129, 240, 241, 1024, 1025, 5000])
def test_a_short_leaf_has_its_digest(nbytes):
    segment = Segment(np.array([[0, 0, 0, 0]]), np.array([[0, 0]]), (), nbytes)
    plan = CopyPlan((segment,), nbytes)
    sources = [random_bytes(np.random.default_rng(nbytes), nbytes)]
    device = Device(sources, [bytes(nbytes)])
    got = device.digest(plan, lambda conversion: module_of("sm_80", conversion), moves=False, blocks=1)
    assert got == digest_leaves(native_plan(plan), Side.SOURCE, regions(sources))


def test_a_conversion_digests_what_the_wire_carries():
    plan, sources, targets = layout_case(1)
    assert plan.converts
    device = Device(sources, targets)
    got = device.digest(plan, lambda conversion: module_of("sm_90", conversion), moves=True)
    assert got == digest_leaves(native_plan(plan), Side.SOURCE, regions(sources))
    assert same(device.results(), moved_by_the_cpu(plan, sources, targets))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("types", [NARROWING, WIDENING], ids=["narrowing", "widening"])
def test_every_pattern_converts_as_ml_dtypes_says(arch, types):
    source, target = types
    stored = every_pattern(source, None)
    device = Device([stored.view(np.uint8)], [bytes(len(stored) * target.itemsize)])
    device.move(flat_plan(len(stored), source, target, 0.4, 1.3), lambda conversion: module_of(arch, conversion),
                blocks=16, threads=256)  # fmt: skip
    got = device.results()[0].view(bits_of(np.zeros(0, NUMPY[target])).dtype)
    np.testing.assert_array_equal(got, expected(stored, target, 0.4, 1.3))


OTHERS = [
    (DType.FLOAT32, DType.FLOAT16), (DType.FLOAT16, DType.INT8), (DType.INT8, DType.FLOAT32),
    (DType.FLOAT16, DType.FLOAT8_E5M2), (DType.FLOAT8_E5M2, BF16), (DType.FLOAT32, BF16),
]  # fmt: skip


@pytest.mark.parametrize("types", OTHERS, ids=[f"{source}-{target}" for source, target in OTHERS])
def test_the_other_types_convert_as_ml_dtypes_says(types):
    source, target = types
    rng = np.random.default_rng(7)
    stored = rng.choice(every_pattern(source, rng), 4096)
    device = Device([stored.view(np.uint8)], [bytes(len(stored) * target.itemsize)])
    device.move(flat_plan(len(stored), source, target, 0.4, 1.3), lambda conversion: module_of("sm_90", conversion),
                blocks=4, threads=256)  # fmt: skip
    got = device.results()[0].view(bits_of(np.zeros(0, NUMPY[target])).dtype)
    np.testing.assert_array_equal(got, expected(stored, target, 0.4, 1.3))


# --- faults planted in the PTX: what the emulator and the comparison are worth ---------------------------------------


def swap_operands(ptx):
    """The second of a pair of elements encoded in the place of the first."""
    return re.sub(r"(cvt\.rn\.satfinite\.e4m3x2\.f32 %rs\d+), (%f\d+), (%f\d+)", r"\1, \3, \2", ptx)


def drop_tail_guard(ptx):
    """No item is past the last: the comparison with the job's items, in the loop, is never true."""
    return re.sub(r"setp\.ge\.u64 \t(%p\d+), (%rd\d+), (%rd\d+)", r"setp.lt.u64 \t\1, \2, 0", ptx)


def lose_scale(ptx):
    """Elements are not multiplied by the factor of their head."""
    return re.sub(r"mul\.rn\.f32 \t(%f\d+), (%f\d+), (%f\d+)", r"mov.f32 \t\1, \2", ptx)


def misplace_store(ptx):
    """One byte too far."""
    return re.sub(r"(st(?:\.global)?(?:\.cs)?\.(?:v\d\.)?[ub]\d+\s+\[%rd\d+)\]", r"\1+1]", ptx)


def drop_barriers(ptx):
    return ptx.replace("bar.sync \t0;", "")


FAULTS = {
    "swapped operands": (swap_operands, False),
    "dropped tail guard": (drop_tail_guard, False),
    "lost scale": (lose_scale, False),
    "misplaced store": (misplace_store, False),
    "dropped barriers": (drop_barriers, True),
}


@pytest.mark.parametrize(("fault", "digests"), FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_caught(fault, digests):
    plan, sources, targets = layout_case(1)
    text = ptx_of("sm_90", (BF16.value, E4M3.value))
    planted = fault(text)
    assert planted != text
    module = kernels_of(planted)
    device = Device(sources, targets)
    try:
        if digests:
            device.digest(plan, lambda _: module, moves=True)
        else:
            device.move(plan, lambda _: module)
    except PtxError:
        return
    assert not same(device.results(), moved_by_the_cpu(plan, sources, targets))
