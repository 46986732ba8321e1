"""The public face: `load` and what it returns."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import north_jax
from north_jax.checkpoint import Checkpoint, CheckpointError, assemble, load, write_random_checkpoint
from north_jax.checkpoint.loader import resolve
from north_jax.checkpoint.progress import ProgressBar
from north_jax.config import Config
from north_jax.text import ChatTemplate, TokenizerError

SameBits = Callable[[Any, Any], bool]


def test_load_is_public() -> None:
    assert north_jax.load is load


def test_module_shares_the_arrays(pristine: Path) -> None:
    model = load(str(pristine))
    assert isinstance(model, Checkpoint)
    assert model.path == pristine
    module = model.module()
    assert module.config == model.config
    assert jax.tree.structure(module.params()) == jax.tree.structure(model.params)
    pairs = zip(jax.tree.leaves(module.params()), jax.tree.leaves(model.params), strict=True)
    assert all(a is b for a, b in pairs)


def test_random_weights_depend_on_the_seed_alone(
    config: Config, pristine: Path, same_bits: SameBits, tmp_path: Path
) -> None:
    write_random_checkpoint(tmp_path / "same", config, max_shard_bytes=10_000)
    write_random_checkpoint(tmp_path / "other", config, seed=1)
    first, same, other = (load(path).params for path in (pristine, tmp_path / "same", tmp_path / "other"))
    assert same_bits(first, same)
    assert not any(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first, other)), strict=True))
    experts = np.asarray(first["layers"][1]["mlp"]["down"])
    assert len({expert.tobytes() for expert in experts}) == config.num_experts
    assert abs(float(np.std(np.asarray(first["layers"][1]["qkv"], np.float32))) * config.hidden_size**0.5 - 1) < 0.1


@pytest.mark.parametrize(
    "path", ["nowhere", "CohereLabs/North-Mini-Code-1.0", "~nobody-of-this-name/model", "x" * 5000]
)
def test_unknown_paths_are_named(path: str) -> None:
    with pytest.raises(CheckpointError, match=f"{path}: no such directory .*'north-nano'"):
        load(path)


def test_embedded_model_has_an_id() -> None:
    assert resolve("north-nano") == Path(north_jax.__file__).parent / "nano"


def test_text_side_comes_from_the_same_directory(pristine: Path) -> None:
    model = dataclasses.replace(load(pristine), path=resolve("north-nano"))
    tokenizer = model.tokenizer()
    assert tokenizer.decode(tokenizer.encode_text("def f():\n    return 1\n")) == "def f():\n    return 1\n"
    assert isinstance(model.chat_template(), ChatTemplate)
    with pytest.raises(TokenizerError, match=f"{pristine} has no tokenizer"):
        load(pristine).tokenizer()


def test_progress_counts_every_byte_once(pristine: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    model = load(pristine, progress=lambda done, total, name: calls.append((done, total, name)))
    done, totals, names = zip(*calls, strict=True)
    assert set(totals) == {sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))}
    assert list(done) == sorted(set(done))
    assert done[-1] == totals[-1]
    assert list(dict.fromkeys(names))[:3] == ["embed", "layers.0.norm", "layers.0.qkv"]
    assert names[-1] == "final_norm"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "drawn"), [(Terminal(), True), (io.StringIO(), False)], ids=["terminal", "file"])
def test_bar_is_drawn_on_a_terminal_only(
    pristine: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, drawn: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    load(pristine)
    assert ("loading [" in stream.getvalue()) == drawn
    assert stream.getvalue().endswith("final_norm\x1b[K\n" if drawn else "")


def test_bar_shows_share_and_size() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream, width=10)
    bar(0, 4_000_000_000, "embed")
    bar(1_000_000_000, 4_000_000_000, "embed")  # too soon after the first to be drawn
    bar(4_000_000_000, 4_000_000_000, "final_norm")
    first, second = stream.getvalue().split("\r")[1:]
    assert "[..........]   0%  0.00/4.00 GB" in first
    assert "[##########] 100%  4.00/4.00 GB" in second


def test_shardings_are_a_function_a_tree_or_one(pristine: Path, same_bits: SameBits) -> None:
    place = SingleDeviceSharding(jax.devices()[0])
    asked = []

    def function(path: tuple[str | int, ...], shape: tuple[int, ...]) -> SingleDeviceSharding | None:
        asked.append((path, shape))
        return place if path[0] == "embed" else None

    plain = load(pristine).params
    tree = jax.tree.map(lambda _: place, plain)
    for shardings, committed in ((None, False), (place, True), (tree, True), (function, False)):
        params = load(pristine, shardings=shardings).params
        assert params["final_norm"].committed == committed
        assert same_bits(params, plain)
    assert (("layers", 1, "mlp", "gate_up"), (5, 28, 24)) in asked
    del tree["layers"][1]["mlp"]["down"]
    with pytest.raises(CheckpointError, match=r"shardings has no entry for layers\.1\.mlp\.down"):
        load(pristine, shardings=tree)


@pytest.mark.parametrize("chunk", [1, 100, 700, 1 << 20])
def test_chunks_as_accelerators_get_them(
    pristine: Path, same_bits: SameBits, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    whole = load(pristine).params
    monkeypatch.setattr(assemble, "_in_host_memory", lambda placement: False)
    monkeypatch.setattr(assemble, "_CHUNK_BYTES", chunk)
    params = load(pristine).params
    assert same_bits(params, whole)
    assert not params["embed"].committed


def test_arrays_on_the_cpu_are_the_buffers_that_were_read(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = []
    allocate = assemble._aligned_empty

    def remember(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        buffers.append(allocate(shape, dtype))
        return buffers[-1]

    monkeypatch.setattr(assemble, "_aligned_empty", remember)
    with jax.default_device(jax.devices("cpu")[0]):
        params = load(pristine).params
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert addresses == {buffer.ctypes.data for buffer in buffers}
