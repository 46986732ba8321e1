"""Text: the tokenizer, the chat template and streaming detokenisation."""

from .chat_template import ChatTemplate, TemplateError
from .detokenizer import Detokenizer
from .markers import Marker
from .tokenizer import Tokenizer, TokenizerError

__all__ = ["ChatTemplate", "Detokenizer", "Marker", "TemplateError", "Tokenizer", "TokenizerError"]
