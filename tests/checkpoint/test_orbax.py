"""Orbax directories: what `save` writes, `restore` gives back, and what is not one is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from north_jax.checkpoint import CheckpointError, load, restore, save
from north_jax.config import ConfigError

SameBits = Callable[[Any, Any], bool]


@pytest.fixture(scope="module")
def saved(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = load(pristine)
    path = tmp_path_factory.mktemp("orbax") / "saved"
    save(path, model.config, model.params)
    return path


def test_round_trip(saved: Path, pristine: Path, same_bits: SameBits) -> None:
    original = load(pristine)
    config, params = restore(saved)
    assert config == original.config
    assert list(params["layers"]) == [0, 1, 2]
    assert same_bits(params, original.params)


def test_dtype_is_converted(saved: Path, pristine: Path, same_bits: SameBits) -> None:
    config, params = restore(saved, dtype="float32")
    assert config.dtype == "float32"
    assert same_bits(params, load(pristine, dtype="float32").params)


def test_load_recognises_it(saved: Path) -> None:
    model = load(saved)
    assert model.params.keys() == {"embed", "layers", "final_norm"}
    assert model.path == saved


def test_other_directories_are_named(pristine: Path, tmp_path: Path) -> None:
    for path in (pristine, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"{path.name}: no Orbax checkpoint"):
            restore(path)


def test_parameters_that_do_not_fit_the_configuration_are_named(saved: Path, tmp_path: Path) -> None:
    config, params = restore(saved)
    save(tmp_path / "copy", config, params)
    file = tmp_path / "copy/config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"vocab_size": 54, "num_experts": 4}))
    with pytest.raises(
        CheckpointError, match=r"copy: 7 mis-shaped parameters: embed is \[53, 24\], expected \[54, 24\]"
    ):
        load(tmp_path / "copy")
    file.unlink()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load(tmp_path / "copy")


@pytest.mark.parametrize("text", ["{", "{}"], ids=["cut off", "empty"])
def test_damaged_metadata_is_named(saved: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "copy"
    shutil.copytree(saved, path)
    (path / "params/_METADATA").write_text(text)
    with pytest.raises(CheckpointError, match="copy/params: Orbax cannot read"):
        restore(path)


def test_damaged_values_are_named(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(saved, path)
    largest = max((path / "params").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="copy/params: Orbax cannot read"):
        restore(path)
