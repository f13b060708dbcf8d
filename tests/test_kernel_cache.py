"""Compiled kernels on disk: used again, never from a folder that others may write to, and never needed."""

import pytest

from kvlink.relayout import kernel_cache, nvrtc

ELF = b"\x7fELF kernels"


@pytest.fixture
def compiled(monkeypatch):
    """Compilations, without a compiler."""
    calls = []
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *types: calls.append(types) or ELF)
    monkeypatch.setattr(nvrtc, "recipe", lambda *types: "-".join(map(str, types)))
    return calls


def test_kernels_are_compiled_once_for_each_gpu_and_conversion(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "new"))
    for _ in range(3):
        assert kernel_cache.cubin("sm_90") == ELF
        assert kernel_cache.cubin("sm_90", "float16", "int8") == ELF
    assert compiled == [("sm_90", None, None), ("sm_90", "float16", "int8")]


def test_a_damaged_file_is_compiled_anew(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    (tmp_path / "sm_90-None-None.cubin").write_bytes(b"half")
    assert kernel_cache.cubin("sm_90") == ELF
    assert (tmp_path / "sm_90-None-None.cubin").read_bytes() == ELF
    assert [path.name for path in tmp_path.iterdir()] == ["sm_90-None-None.cubin"]


def test_what_cannot_be_kept_leaves_nothing_behind(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    (tmp_path / "sm_90-None-None.cubin").mkdir()
    assert kernel_cache.cubin("sm_90") == ELF
    assert [path.name for path in tmp_path.iterdir()] == ["sm_90-None-None.cubin"]


def test_a_folder_that_others_may_write_to_is_not_used(compiled, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    tmp_path.chmod(0o777)
    (tmp_path / "sm_90-None-None.cubin").write_bytes(ELF + b" of somebody else")
    assert kernel_cache.cubin("sm_90") == ELF
    assert len(compiled) == 1
    assert "others own it or may write to it" in caplog.text


@pytest.mark.parametrize("named", ["off", "/proc/nowhere"])
def test_a_cache_that_is_off_or_cannot_be_made_costs_time_only(compiled, monkeypatch, named):
    monkeypatch.setenv(kernel_cache.VARIABLE, named)
    assert [kernel_cache.cubin("sm_90") for _ in range(2)] == [ELF, ELF]
    assert len(compiled) == 2


def test_by_default_it_is_the_users_own_cache(compiled, monkeypatch, tmp_path):
    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_cache.cubin("sm_90")
    assert (tmp_path / "kvlink" / "sm_90-None-None.cubin").exists()


def test_what_a_recipe_names_is_all_that_decides(monkeypatch):
    recipes = {nvrtc.recipe("sm_90"), nvrtc.recipe("sm_80"), nvrtc.recipe("sm_90", "float16", "int8")}
    assert len(recipes) == 3
    assert nvrtc.compile_cubin("sm_90").startswith(b"\x7fELF")
