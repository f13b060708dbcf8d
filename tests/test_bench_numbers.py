"""The bench's own idea of a conversion, held to ml_dtypes; and benches that convert, over links of every transport."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from kvlink.cli import main
from kvlink.cli.bench.numbers import decode, encode, lane_of
from kvlink.layout import DType

TYPES = {
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: ml_dtypes.bfloat16,
    DType.FLOAT32: np.float32,
    DType.FLOAT8_E4M3: ml_dtypes.float8_e4m3fn,
    DType.FLOAT8_E5M2: ml_dtypes.float8_e5m2,
}
LARGEST = {DType.FLOAT8_E4M3: 448.0, DType.FLOAT8_E5M2: 57344.0}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_and_their_nearest_are_those_of_ml_dtypes(dtype: DType) -> None:
    random = np.random.default_rng(0)
    width = min(16, 8 * dtype.itemsize)
    stored = (np.arange(1 << width) << 8 * dtype.itemsize - width).astype(lane_of(dtype))
    assert np.array_equal(decode(stored, dtype), stored.view(TYPES[dtype]).astype(np.float32), equal_nan=True)
    values = random.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    usual = random.normal(size=1 << 16) * random.choice([0.01, 1, 300], 1 << 16)
    values = np.concatenate([values, usual.astype(np.float32)])
    values = values[~np.isnan(values)]
    bound = LARGEST.get(dtype, np.inf)
    nearest = np.clip(values, -bound, bound).astype(TYPES[dtype]).view(lane_of(dtype))
    assert np.array_equal(encode(values, dtype), nearest)


def test_integers_saturate_and_not_a_number_is_one_pattern() -> None:
    values = np.array([0.5, 1.5, -0.5, 200.0, -200.0, np.inf, np.nan], np.float32)
    assert encode(values, DType.INT8).view(np.int8).tolist() == [0, 2, 0, 127, -128, 127, 0]
    assert {int(encode(values[-1:], dtype)[0]) for dtype in LARGEST} == {0x7F}


CASES = {
    "ucx, narrowing, TP 2 to 4": "--transport ucx --source-dtype bfloat16 --target-dtype float8_e4m3 --target-tp 4",
    "ucx, widening": "--transport ucx --source-dtype float8_e5m2 --target-dtype float16 --target-layout hnd",
    "stream, widening, no digests": "--transport stream --source-dtype int8 --target-dtype bfloat16 --integrity off",
    "stream, mla, narrowing": "--transport stream --model deepseek-v3 --source-dtype float32 --target-dtype int8",
    "loopback, between fp8 types": "--transport loopback --source-dtype float8_e4m3 --target-dtype float8_e5m2",
    "stream, narrowing while it is computed": "--transport stream --target-dtype float8_e4m3 --flow push --layer-ms 2",
    "ucx, widening while it is computed": (
        "--transport ucx --source-dtype float8_e4m3 --target-dtype bfloat16 --target-tp 4 --flow push --layer-ms 2"
    ),
    "loopback, mla": "--transport loopback --model deepseek-v3 --target-tp 4 --target-layout blockmajor",
}


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_a_bench_that_converts_is_verified_e2(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    """E2: a scale a head on the quantised side, blocks of 16 into 64, a part-filled last one; each bit is judged."""
    workload = "bench --layers 3 --tokens 333 --requests 1 --warmup 0 --source-block-size 16 --quiet --json -"
    assert main([*workload.split(), *flags.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"]
    assert report["case"]["path"] == {"ucx": "packed", "stream": "stream", "loopback": "local"}[flags.split()[1]]
    if report["case"]["source"]["dtype"] != report["case"]["target"]["dtype"] and "deepseek" not in flags:
        assert report["limit"] is None  # raw bytes are no limit of it


def test_a_converting_case_that_cannot_be_is_refused_by_its_flags() -> None:
    for flags in ("--path direct", "--transport stream --path packed"):
        assert main(["bench", "--target-dtype", "float8_e4m3", *flags.split()]) == 2
