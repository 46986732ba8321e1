import pytest

from north_jax.text import Tokenizer
from tests.support.cmd4 import cmd4_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return cmd4_tokenizer()
