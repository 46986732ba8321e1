"""The safetensors reader and writer against the safetensors package, and against damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from north_jax.checkpoint import CheckpointError
from north_jax.checkpoint.safetensors_file import DTYPES, read_bytes, read_header, weight_dtype, write_file


def random_array(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits, NaNs and infinities among them."""
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (7,), (2, 3, 5)]
    return {f"{name}.{len(s)}": random_array(rng, dtype, s) for name, dtype in DTYPES.items() for s in shapes}


def types(arrays: dict[str, np.ndarray]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def test_reads_what_the_package_writes(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(arrays, tmp_path / "file", metadata={"made": "here"})
    header = read_header(tmp_path / "file")
    assert header.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = header[name]
        assert (DTYPES[tensor.dtype], tensor.shape, tensor.nbytes) == (array.dtype, array.shape, array.nbytes)
        value = np.empty_like(array)
        read_bytes(tensor, 0, value)
        assert value.tobytes() == array.tobytes()
        last = np.empty(array.shape[-1:], array.dtype)
        read_bytes(tensor, array.nbytes - last.nbytes, last)
        assert array.tobytes().endswith(last.tobytes())


def test_the_package_reads_what_is_written(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    write_file(tmp_path / "file", types(arrays), iter(arrays.values()))
    read = safetensors.numpy.load_file(tmp_path / "file")
    assert types(read) == types(arrays)
    assert all(read[name].tobytes() == array.tobytes() for name, array in arrays.items())
    assert (tmp_path / "file").stat().st_size == 8 + header_length(tmp_path / "file") + sum(
        array.nbytes for array in arrays.values()
    )
    assert header_length(tmp_path / "file") % 8 == 0


def test_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    announced = {"a": (np.dtype(np.float32), (2, 3))}
    with pytest.raises(CheckpointError, match=r"a: float32 \(3, 2\) where float32 \(2, 3\)"):
        write_file(tmp_path / "file", announced, iter([np.zeros((3, 2), np.float32)]))
    with pytest.raises(CheckpointError, match="cannot write b: int32"):
        write_file(tmp_path / "file", {"b": (np.dtype(np.int32), (1,))}, iter([]))


def header_length(file: Path) -> int:
    return int.from_bytes(file.read_bytes()[:8], "little")


def container(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(begin: int, end: int, shape: Any = (4,), dtype: Any = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a safetensors file"),
    "a few bytes": (b"\x01\x02", "not a safetensors file"),
    "cut off in the header": (container({"a": entry(0, 8)})[:30], "cut off within its header"),
    "absurd header length": (b"\xff" * 8 + b"{}", "not a safetensors file"),
    "header is not JSON": (container(b"{'a': 1}"), "not valid JSON"),
    "header is not UTF-8": (container(b'{"\xff": 1}'), "not valid JSON"),
    "header is nested without end": (container(b"[" * 200_000), "not valid JSON"),
    "a number of many digits": (container(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "header is a list": (container([1]), "not a JSON object"),
    "tensor named twice": (
        container(b'{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"a":{}}', bytes(8)),
        "names a twice",
    ),
    "entry without a shape": (
        container({"a": {"dtype": "BF16", "data_offsets": [0, 8]}}, bytes(8)),
        "entry of a lacks",
    ),
    "entry is a number": (container({"a": 1}), "entry of a lacks"),
    "three offsets": (container({"a": entry(0, 8) | {"data_offsets": [0, 4, 8]}}, bytes(8)), "entry of a lacks"),
    "negative size": (container({"a": entry(0, 8, [-4])}, bytes(8)), "a has an impossible shape"),
    "fractional size": (container({"a": entry(0, 8, [4.0])}, bytes(8)), "a has an impossible shape"),
    "unknown type": (container({"a": entry(0, 8, dtype="BF17")}, bytes(8)), "a has the unknown type 'BF17'"),
    "type is a list": (container({"a": entry(0, 8, dtype=["BF16"])}, bytes(8)), "a has the unknown type"),
    "size and shape disagree": (container({"a": entry(0, 6)}, bytes(6)), r"a takes 6 bytes, but BF16 \[4\] needs 8"),
    "gap": (container({"a": entry(0, 8), "b": entry(10, 18)}, bytes(18)), "b begins at byte .*gap or overlap"),
    "overlap": (container({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "b begins at byte .*gap or overlap"),
    "cut off in the data": (container({"a": entry(0, 8)}, bytes(7)), "cut off"),
    "bytes left over": (container({"a": entry(0, 8)}, bytes(9)), "longer than its header says"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(file)
    assert str(file) in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.safetensors: No such file"):
        read_header(tmp_path / "absent.safetensors")


def test_file_that_shrinks_under_the_reader_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    safetensors.numpy.save_file({"a": np.zeros(1000, np.float32)}, file)
    tensor = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ended while a was being read"):
        read_bytes(tensor, 0, np.empty(1000, np.float32))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_to_the_header_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped byte never reaches the caller as another exception, nor as a tensor outside the file."""
    good = container({"a": entry(0, 8), "b": entry(8, 16)}, bytes(16))
    at = data.draw(st.integers(0, len(good) - 17))
    bad = good[:at] + data.draw(st.binary(min_size=1, max_size=1)) + good[at + 1 :]
    file = tmp_path_factory.mktemp("fuzz") / "file"
    file.write_bytes(bad)
    try:
        tensors = read_header(file)
    except CheckpointError:
        return
    assert all(tensor.offset + tensor.nbytes <= len(bad) for tensor in tensors.values())


@pytest.mark.parametrize("given", ["bfloat16", ml_dtypes.bfloat16, np.dtype("bfloat16")])
def test_weight_dtype_takes_names_and_types(given: Any) -> None:
    assert weight_dtype(given) == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("given", ["int8", "float64", "float8_e4m3fn", "brainfloat"])
def test_weight_dtype_refuses_others(given: Any) -> None:
    with pytest.raises(CheckpointError, match=str(given)):
        weight_dtype(given)
