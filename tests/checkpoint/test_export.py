"""Export: bit for bit what was loaded, in the published layout, and never half a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from north_jax.checkpoint import CheckpointError, export, load, restore, save, write_random_checkpoint
from north_jax.config import Config

SameBits = Callable[[Any, Any], bool]
GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_CHECKPOINTS = sorted(path.parent for path in GOLDEN.glob("*/model*.safetensors"))


def tensors_of(path: Path) -> dict[str, tuple[np.dtype, tuple[int, ...], bytes]]:
    """Every tensor of a Hugging Face directory, as the safetensors package reads it."""
    found: dict[str, tuple[np.dtype, tuple[int, ...], bytes]] = {}
    for file in path.glob("*.safetensors"):
        for name, array in safetensors.numpy.load_file(file).items():
            assert name not in found
            found[name] = array.dtype, array.shape, array.tobytes()
    return found


def test_there_are_golden_checkpoints() -> None:
    assert len(GOLDEN_CHECKPOINTS) >= 5


@pytest.mark.parametrize("golden", GOLDEN_CHECKPOINTS, ids=lambda path: path.name)
def test_checkpoints_of_transformers_survive_every_format_bit_for_bit(golden: Path, tmp_path: Path) -> None:
    """Hugging Face → params → Orbax → params → Hugging Face."""
    model = load(golden)
    save(tmp_path / "orbax", model.config, model.params)
    config, params = restore(tmp_path / "orbax")
    export(tmp_path / "exported", config, params)
    assert tensors_of(tmp_path / "exported") == tensors_of(golden)
    assert load(tmp_path / "exported").config == config == model.config
    assert config == Config.from_json(golden)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shards_and_index(config: Config, tmp_path: Path, dtype: str) -> None:
    write_random_checkpoint(tmp_path / "one", config, dtype=dtype)
    model = load(tmp_path / "one")
    export(tmp_path / "many", model.config, model.params, max_shard_bytes=10_000)
    assert tensors_of(tmp_path / "many") == tensors_of(tmp_path / "one")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors_of(tmp_path / "one").values())
    assert all((tmp_path / "many" / file).stat().st_size < 10_000 + 4_000 for file in files)  # and a header


def test_mixed_types_are_kept_and_aligned(config: Config, same_bits: SameBits, tmp_path: Path) -> None:
    odd = dataclasses.replace(config, hidden_size=25)  # a norm of 25 bfloat16 would leave what follows unaligned
    write_random_checkpoint(tmp_path / "plain", odd)
    model = load(tmp_path / "plain")
    model.params["layers"][1]["mlp"]["router"] = model.params["layers"][1]["mlp"]["router"].astype("float32")
    export(tmp_path / "mixed", model.config, model.params)
    assert same_bits(load(tmp_path / "mixed").params, model.params)
    raw = (tmp_path / "mixed/model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0, name


def test_text_files_come_along(pristine: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(pristine, source)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "README.md"):
        (source / name).write_text(f"contents of {name}")
    model = load(source)
    export(tmp_path / "hf", model.config, model.params, source=source)
    save(tmp_path / "orbax", model.config, model.params, source=tmp_path / "hf")
    for path in (tmp_path / "hf", tmp_path / "orbax"):
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (path / name).read_text() == f"contents of {name}"
        assert not (path / "README.md").exists()


@pytest.mark.parametrize("write", [export, save])
def test_nothing_is_overwritten_unasked(write: Callable[..., None], pristine: Path, tmp_path: Path) -> None:
    model = load(pristine)
    target = tmp_path / "target"
    write(target, model.config, model.params)
    before = {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    with pytest.raises(CheckpointError, match="target exists; overwrite=True replaces it"):
        write(target, model.config, model.params)
    assert {file: file.read_bytes() for file in target.rglob("*") if file.is_file()} == before

    (target / "stale.safetensors").touch()
    doubled = jax.tree.map(lambda x: np.asarray(x) * np.asarray(2, x.dtype), model.params)
    write(target, model.config, doubled, overwrite=True)
    np.testing.assert_array_equal(load(target).params["embed"], doubled["embed"])
    assert not (target / "stale.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("write", [export, save])
def test_other_directories_are_never_replaced(write: Callable[..., None], pristine: Path, tmp_path: Path) -> None:
    model = load(pristine)
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        write(tmp_path, model.config, model.params, overwrite=True)
    assert (tmp_path / "thesis.txt").exists()
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", model.config, model.params)


def test_failure_leaves_nothing_behind(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(pristine)
    calls = []

    def fail_later(array: jax.Array) -> np.ndarray:
        calls.append(array)
        if len(calls) > 5:
            raise OSError("disk full")
        return np.asarray(array)

    monkeypatch.setattr("north_jax.checkpoint.huggingface_writer.host_copy", fail_later)
    with pytest.raises(OSError, match="disk full"):
        export(tmp_path / "target", model.config, model.params)
    assert list(tmp_path.iterdir()) == []


def test_failure_to_replace_keeps_what_was_there(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(pristine)
    export(tmp_path / "target", model.config, model.params)
    rename = os.rename

    def fail(source: Path, destination: Path) -> None:
        if source.name == destination.name == "target" and ".partial" in str(source):
            monkeypatch.undo()
            raise OSError("directory is busy")
        rename(source, destination)

    monkeypatch.setattr("os.rename", fail)
    with pytest.raises(OSError, match="busy"):
        export(tmp_path / "target", model.config, model.params, overwrite=True)
    assert tensors_of(tmp_path / "target") == tensors_of(pristine)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_existing_target_is_found_before_anything_is_fetched(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(pristine)
    export(tmp_path / "target", model.config, model.params)

    def fail(_: jax.Array) -> np.ndarray:
        raise AssertionError("weights were fetched")

    monkeypatch.setattr("north_jax.checkpoint.huggingface_writer.host_copy", fail)
    with pytest.raises(CheckpointError, match="exists"):
        export(tmp_path / "target", model.config, model.params)


@pytest.mark.parametrize("write", [export, save])
def test_wrong_params_are_named(write: Callable[..., None], pristine: Path, tmp_path: Path) -> None:
    model = load(pristine)
    wrong = jax.tree.map(lambda x: x, model.params)
    del wrong["final_norm"]
    wrong["layers"][1]["o"] = wrong["layers"][1]["o"].T
    wrong["layers"][2]["bias"] = wrong["layers"][2]["norm"]
    for message in (
        r"1 missing parameters: final_norm \[24\]",
        r"1 unexpected parameters: layers\.2\.bias \[24\]",
        r"1 mis-shaped parameters: layers\.1\.o is \[40, 24\], expected \[24, 40\]",
    ):
        with pytest.raises(CheckpointError, match=message):
            write(tmp_path / "target", model.config, wrong)
    integers = jax.tree.map(lambda x: np.asarray(x).astype(np.int32), model.params)
    with pytest.raises(CheckpointError, match="int32"):
        write(tmp_path / "target", model.config, integers)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing_behind(pristine: Path, tmp_path: Path) -> None:
    """A limit on the size of files, in a process of its own, stands for the disk."""
    program = """
import resource, signal, sys
from north_jax.checkpoint import CheckpointError, export, load
model = load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
    export(sys.argv[2], model.config, model.params)
except CheckpointError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(pristine), str(tmp_path / "new")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"new/model\.safetensors: File too large", printed)
    assert not list(tmp_path.iterdir())


def test_absent_source_is_named(pristine: Path, tmp_path: Path) -> None:
    model = load(pristine)
    with pytest.raises(CheckpointError, match=r"source .*absent: no such directory"):
        export(tmp_path / "new", model.config, model.params, source=tmp_path / "absent")
    assert not list(tmp_path.iterdir())
