"""ffi.build_info and ffi.available: what an installation says of itself."""

import subprocess
import sys

import pytest

import ffi


def test_available_agrees_with_the_build():
    info = ffi.build_info()
    assert ffi.available("cpu") == info.cpu
    assert info.cpu or not info.cuda_architectures
    if not info.cuda_architectures:
        assert not ffi.available("cuda")
    assert not ffi.available("tpu")


def test_what_was_left_out_is_said():
    info = ffi.build_info()
    assert bool(info.left_out) == (not info.cpu or not info.cuda_architectures)
    assert info.left_out in str(info)


def test_module_prints_one_line():
    done = subprocess.run([sys.executable, "-m", "ffi"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{ffi.build_info()}\n"


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (ffi.BuildInfo(True, ("sm_90a",), ""), "compiled operations: C++, CUDA sm_90a"),
        (
            ffi.BuildInfo(True, (), "the CUDA kernels: nvcc was not found"),
            "compiled operations: C++ (without the CUDA kernels: nvcc was not found)",
        ),
        (
            ffi.BuildInfo(False, (), "the C++ and CUDA operations: no C++ compiler was found"),
            "compiled operations: none, all run as pure JAX "
            "(without the C++ and CUDA operations: no C++ compiler was found)",
        ),
    ],
)
def test_the_line_reads_well(info, text):
    assert str(info) == text


def test_a_module_that_was_built_but_does_not_load_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import a_library_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        ffi._import_optional("broken_module")
    assert ffi._import_optional("ffi.never_built") is None
