"""The scripted server of tests/serve."""

from tests.serve.api.conftest import serve_script as serve_script
from tests.serve.api.conftest import speak as speak
from tests.serve.conftest import text_checkpoint as text_checkpoint
from tests.serve.conftest import tokenizer as tokenizer
