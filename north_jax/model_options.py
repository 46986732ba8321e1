"""Arguments of commands that take a model: a checkpoint, or random weights of a geometry."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import load
from .checkpoint.errors import CheckpointError
from .checkpoint.loader import NANO
from .config import Config, ConfigError
from .decoding import BackendError
from .layers import Params
from .random_weights.weights import random_params
from .text import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable

MISTAKES = (BackendError, CheckpointError, ConfigError, TokenizerError, OSError, ValueError)
"""What a command reports in a line instead of a traceback; the message says what is wrong with its arguments."""


@dataclasses.dataclass(frozen=True)
class ChosenModel:
    """What the arguments name.

    Attributes:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      tokenizer: None for random weights.
      title: the model in words, without its place on this machine.
    """

    config: Config
    params: Params = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None
    title: str


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model, --random-weights, --dtype."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR", default=NANO, help="checkpoint (default: the built-in %(default)s)")
    which.add_argument(
        "--random-weights", metavar="CONFIG", type=Path, help="a config.json: its geometry with random weights"
    )
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the weights (default: their own)"
    )


def chosen_model(options: argparse.Namespace, *, needs_text: bool = False) -> ChosenModel:
    """Loads the model, or draws its weights on the device.

    Args:
      options: of a parser with `add_model`.
      needs_text: whether random weights will not do, for want of a tokenizer.

    Raises:
      CheckpointError, ConfigError, TokenizerError, ValueError: the message says what is wrong.
    """
    dtype: Any = None if options.dtype == "auto" else options.dtype
    if options.random_weights is None:
        model = load(options.model, dtype=dtype)
        return ChosenModel(model.config, model.params, model.tokenizer(), Path(options.model).resolve().name)
    if needs_text:
        raise ValueError("--random-weights: this needs a tokenizer, and a model that has learnt something")
    config = Config.from_json(options.random_weights)
    params = random_params(config, dtype=dtype)
    layers, width = config.num_hidden_layers, config.hidden_size
    return ChosenModel(config, params, None, f"random weights, {layers} layers of width {width}")


def answer(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], object]) -> None:
    """Runs a command with the process's arguments; one of MISTAKES becomes the parser's own kind of message."""
    options = parser.parse_args()
    try:
        run(options)
    except MISTAKES as error:
        parser.error(str(error))


def at_least(least: int) -> Callable[[str], int]:
    """For `type=`: a whole number from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, at least {least}, not {text!r}")
        return int(text)

    return number
