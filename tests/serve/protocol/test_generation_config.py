"""generation_config.json: defaults of the requests, and what is wrong in it is named before anything is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve.protocol.generation_config import GenerationConfig, GenerationConfigError
from serve.protocol.sampling import SamplingDefaults


def read(folder: Path, content: Any) -> GenerationConfig:
    file = folder / "generation_config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return GenerationConfig.read(file)


@pytest.mark.parametrize(
    ("content", "defaults", "ends"),
    [
        ({}, SamplingDefaults(1.0, 0.95), ()),
        ({"temperature": 0.5, "top_k": 7, "eos_token_id": 3}, SamplingDefaults(0.5, 0.95, 7), (3,)),
        ({"top_p": None, "min_p": 0.1, "eos_token_id": [3, 4]}, SamplingDefaults(min_p=0.1), (3, 4)),
        ({"do_sample": False, "temperature": 0.7}, SamplingDefaults(temperature=0.0), ()),
        ({"do_sample": True, "transformers_version": "5.0"}, SamplingDefaults(), ()),
    ],
)
def test_what_it_says(tmp_path: Path, content: Any, defaults: SamplingDefaults, ends: tuple[int, ...]) -> None:
    config = read(tmp_path, content)
    assert (config.sampling_defaults(), config.eos_token_ids) == (defaults, ends)


def test_an_absent_file_says_nothing(tmp_path: Path) -> None:
    assert GenerationConfig.read(tmp_path / "generation_config.json") == GenerationConfig()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "generation_config.json"),
        ("[]", "generation_config.json"),
        ({"temperature": "0.4"}, "temperature"),
        ({"eos_token_id": "3"}, "eos_token_id"),
        ({"top_p": 2}, "top_p must be in"),
        ({"temperature": -1}, "temperature must be"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(GenerationConfigError, match=r"generation_config\.json") as error:
        read(tmp_path, content)
    assert named in str(error.value)
