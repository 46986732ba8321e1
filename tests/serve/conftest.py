import json
from pathlib import Path

import pytest

from north_jax.text import Tokenizer
from tests.support.cmd4 import NAMED, NANO_TEMPLATE, byte_level_backend


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text side of a checkpoint: tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("checkpoint")
    byte_level_backend().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(NAMED))
    (directory / "chat_template.jinja").write_text(NANO_TEMPLATE.read_text())
    return directory


@pytest.fixture(scope="session")
def tokenizer(text_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_dir(text_checkpoint)
