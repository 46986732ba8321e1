"""The command line. Imports nothing that is slow, so that --help and mistakes are answered at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from north_jax.compilation_cache import default_directory

TYPE_CHECKING = False  # as in typing, without the time that importing it takes
if TYPE_CHECKING:
    from north_jax.decoding import Backend

NANO = "north-nano"
API_KEY_VARIABLE = "NORTH_JAX_API_KEY"


class Options(argparse.Namespace):
    """What was asked for. (Not a dataclass: importing those takes as long as all the rest.)"""

    model: str
    dtype: str
    random_weights: bool
    served_model_name: str
    backend: Backend
    slots: int
    max_context: int | None
    max_queue: int
    memory_share: float
    prefix_cache: bool
    chunk: int | None
    busy_chunk: int | None
    busy_latency_ms: float | None
    decode_share: float
    compilation_cache: str | None
    host: str
    port: int
    api_key: str | None
    drain_seconds: float
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    log_level: str


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m serve",
        description="Serve a North Mini Code checkpoint through an OpenAI-compatible HTTP API.",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        default=NANO,
        metavar="DIR",
        help="checkpoint: a Hugging Face or Orbax directory, or north-nano, the small model that is built in (default)",
    )
    model.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="the model's name in the API (default: the last part of --model)",
    )
    model.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="type of the weights and the KV cache (default: auto, the checkpoint's own)",
    )
    model.add_argument(
        "--random-weights",
        action="store_true",
        help="draw weights on the device instead of loading them: DIR needs config.json and the tokenizer's files alone"
        " (python -m north_jax.bench random_model DIR writes some)",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--backend",
        choices=("auto", "jax", "warp", "megakernel"),
        default="auto",
        help="what decodes: jax runs everywhere, warp is jax with kernels for the experts, megakernel is one kernel "
        "where it was compiled (default: auto: the megakernel on a GPU for which it was compiled, else jax)",
    )
    engine.add_argument(
        "--slots", type=_positive, default=8, metavar="N", help="requests that run at once (default: %(default)s)"
    )
    engine.add_argument(
        "--max-context",
        type=_positive,
        metavar="TOKENS",
        help="longest prompt and answer together (default: the model's own limit, or what fits into memory)",
    )
    engine.add_argument(
        "--max-queue",
        type=_positive,
        default=256,
        metavar="N",
        help="requests that may wait for a slot before further ones get a 429 (default: %(default)s)",
    )
    engine.add_argument(
        "--memory-share",
        type=_share,
        default=0.92,
        metavar="X",
        help="part of a GPU's memory for weights, KV pages and workspace; a start prints how it is divided, and is"
        " refused where it is too little (default: %(default)g; a CPU's memory is not divided)",
    )
    engine.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt from its beginning, also where the KV cache still holds what an earlier one left",
    )
    engine.add_argument(
        "--chunk",
        type=_positive,
        metavar="TOKENS",
        help="prompt tokens computed at once, of all prompts together (default: 8192 on a GPU, less where many slots"
        " leave little memory; 256 on a CPU)",
    )
    engine.add_argument(
        "--busy-chunk",
        type=_positive,
        metavar="TOKENS",
        help="the same at most while other requests decode, which wait for it (default: 2048 on a GPU, 256 on a CPU)",
    )
    engine.add_argument(
        "--busy-latency-ms",
        type=_milliseconds,
        metavar="MS",
        help="what others may wait for a token while a prompt is computed: a chunk has the largest size that, by what"
        " chunks took before, keeps it; 0 for no bound (default: 52 on a GPU, none on a CPU)",
    )
    engine.add_argument(
        "--decode-share",
        type=_part,
        default=0.3,
        metavar="X",
        help="part of the time that requests in the course of decoding keep while prompts are computed: so many steps"
        " follow each chunk (default: %(default)g)",
    )
    cache = engine.add_mutually_exclusive_group()
    cache.add_argument(
        "--compilation-cache",
        default=default_directory(),
        metavar="DIR",
        help="where compiled programs are kept for the next start (default: %(default)s)",
    )
    cache.add_argument(
        "--no-compilation-cache",
        dest="compilation_cache",
        action="store_const",
        const=None,
        help="compile everything anew, and keep nothing",
    )
    sampling = parser.add_argument_group(
        "sampling",
        "What holds when a request says nothing (default: the checkpoint's generation_config.json, else the model card:"
        " temperature 1.0, top_p 0.95).",
    )
    for name, low, high in (("temperature", 0, 2), ("top-p", 0, 1), ("min-p", 0, 1)):
        sampling.add_argument(f"--{name}", type=_between(low, high), metavar="X", help=f"from {low} to {high}")
    sampling.add_argument("--top-k", type=_count, metavar="N", help="0 keeps all tokens")
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    network.add_argument("--port", type=_port, default=8000, help="0 takes any free one (default: %(default)s)")
    network.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(API_KEY_VARIABLE) or None,
        help="what clients must send as 'Authorization: Bearer KEY'; /health, /version and /metrics stay open (default:"
        f" the environment's {API_KEY_VARIABLE}, which other users of the machine can't see; else everybody may ask)",
    )
    network.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="on SIGTERM or Ctrl-C, how long running requests may take to finish (default: %(default)g)",
    )
    network.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="info logs one line per request to standard error (default: %(default)s)",
    )
    options = parser.parse_args(arguments, namespace=Options())
    if options.served_model_name is None:
        options.served_model_name = os.path.basename(os.path.abspath(os.path.expanduser(options.model)))
    return options


def _between(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a number from {low} to {high}, not {text!r}")
        return value

    return number


def _share(text: str) -> float:
    return _open_interval(text, 1.0)


def _part(text: str) -> float:
    return _between(0, 0.95)(text)


def _milliseconds(text: str) -> float:
    return _between(0, 1e6)(text)


def _open_interval(text: str, high: float) -> float:
    value = _between(0, high)(text)
    if not 0 < value < high:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and below {high:g}, not {text!r}")
    return value


def _count(text: str) -> int:
    return _whole_number(text, 0, 2**31 - 1)


def _positive(text: str) -> int:
    return _whole_number(text, 1, None)


def _port(text: str) -> int:
    return _whole_number(text, 0, 65535)


def _whole_number(text: str, low: int, high: int | None) -> int:
    if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, not {text!r}")
    return value
