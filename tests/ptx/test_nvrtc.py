"""Compiling kernels at run time: what is wanted, what there is not, and what each refusal says."""

import pytest
from ptx_launch import ARCHS, ptx_of

from kvlink.errors import UnavailableError, UnsupportedError
from kvlink.relayout import nvrtc


@pytest.mark.parametrize("arch", ARCHS)
def test_ptx_is_for_the_architecture_asked_for(arch):
    ptx = ptx_of(arch, None)
    assert f".target {arch}" in ptx
    for name in ("kvlink_move_1", "kvlink_move_16", "kvlink_digest", "kvlink_move_and_digest"):
        assert f".visible .entry {name}(" in ptx


def test_fp8_is_encoded_by_the_hardware_where_it_can():
    encoder = "cvt.rn.satfinite.e4m3x2.f32"
    conversion = ("bfloat16", "float8_e4m3")
    assert [encoder in ptx_of(arch, conversion) for arch in ARCHS] == [False, True, True]


def test_no_product_is_fused_with_a_sum():
    for arch in ARCHS:
        assert "fma." not in ptx_of(arch, ("bfloat16", "float8_e4m3"))
        assert "mul.rn.f32" in ptx_of(arch, ("bfloat16", "float8_e4m3"))


def test_an_unknown_architecture_is_named_with_what_nvrtc_says():
    with pytest.raises(UnavailableError, match=r"compute_7.*gpu-architecture"):
        nvrtc.compile_kernels("sm_7")


def test_types_without_values_are_not_converted():
    with pytest.raises(UnsupportedError, match="opaque cannot be converted"):
        nvrtc.compile_kernels("sm_90", "opaque", "float16")


def test_a_machine_without_nvrtc_is_told_what_brings_it(monkeypatch):
    monkeypatch.setattr(nvrtc, "_MAJORS", (99,))
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(UnavailableError, match=r"pip install kvlink\[cuda\]"):
            nvrtc.compile_kernels("sm_90")
    finally:
        nvrtc._library.cache_clear()
