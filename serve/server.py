"""`python -m serve` after its options: bind, load, start the engine, serve until a signal."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import jax

from north_jax import compilation_cache
from north_jax.checkpoint import Checkpoint, CheckpointError, load
from north_jax.checkpoint.loader import resolve
from north_jax.config import ConfigError
from north_jax.decoding import BackendError, make_decoder
from north_jax.text import TemplateError, TokenizerError

from .app import TextSide, make_service
from .engine.engine import JaxEngine
from .engine.memory import CachePlan, MemoryPlanError, plan_cache
from .lifecycle import serve_until_signal
from .listen import BindError, address_of, bind, local_address_of
from .options import Options
from .protocol.generation_config import GenerationConfigError

_LOG = logging.getLogger("serve")
_CANNOT_START = (
    GenerationConfigError,
    BackendError,
    BindError,
    ConfigError,
    CheckpointError,
    TokenizerError,
    TemplateError,
    MemoryPlanError,
)


def run(options: Options, *, begun: float | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Gives the exit status; what keeps it from starting is one line on stderr.

    Args:
      options: the command line's.
      begun: when the process began, on `time.monotonic`'s clock; now, if it is not known.
    """
    start = Start(time.monotonic() if begun is None else begun)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    for library in ("jax", "absl", "orbax"):
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        if options.compilation_cache is not None:
            _use_compilation_cache(options.compilation_cache)
        listener = bind(options.host, options.port)
        with listener:
            start.done("importing")
            text = TextSide.read(resolve(options.model))  # before the weights: a fault in it should not take minutes
            dtype = None if options.dtype == "auto" else options.dtype
            progress = None if sys.stderr.isatty() else _LoggedProgress()
            checkpoint = load(options.model, dtype=dtype, progress=progress)
            kv_dtype = checkpoint.params["embed"].dtype
            start.done("loading")
            plan = plan_cache(
                checkpoint.config,
                kv_dtype,
                slots=options.slots,
                max_context=options.max_context,
                chunk=options.chunk,
                busy_chunk=options.busy_chunk,
            )
            decoder = make_decoder(
                checkpoint.config,
                checkpoint.params,
                backend=options.backend,
                slots=plan.slots,
                max_context=plan.max_context,
            )
            engine = JaxEngine(
                checkpoint.config,
                checkpoint.params,
                plan,
                decoder,
                max_queue=options.max_queue,
                prefix_cache=options.prefix_cache,
            )
            start.done("allocating")
            _LOG.info("loaded %s; compiling", options.model)
            engine.start()
            start.done("compiling")

            def ready() -> None:
                print(_summary(options, checkpoint, plan, decoder.backend))
                print(start.summary(*engine.prefill_shapes))
                print(f"listening on {address_of(listener)}")
                print(f"try: {_curl(options.served_model_name, local_address_of(listener))}", flush=True)
                engine.warm_up()

            asyncio.run(
                serve_until_signal(
                    lambda: make_service(
                        options.served_model_name,
                        text,
                        checkpoint.config,
                        engine,
                        api_key=options.api_key,
                        defaults=_defaults(options),
                    ),
                    listener,
                    drain_seconds=options.drain_seconds,
                    ready=ready,
                )
            )
    except _CANNOT_START as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while loading
        return 130
    return 0


def _use_compilation_cache(directory: str) -> None:
    """Without it the server starts too, only later."""
    try:
        compilation_cache.use(directory)
    except OSError as error:
        _LOG.warning("no compilation cache: %s", error)


def _defaults(options: Options) -> dict[str, float]:
    given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {name: value for name, value in given.items() if value is not None}


class Start:
    """How long each part of a start took."""

    def __init__(self, begun: float) -> None:
        """Begins the first part, at `begun` on `time.monotonic`'s clock."""
        self._begun = self._last = begun
        self._parts: dict[str, float] = {}

    def done(self, part: str) -> None:
        """Ends a part; the next one begins."""
        now = time.monotonic()
        self._parts[part], self._last = now - self._last, now

    def summary(self, compiled: int, shapes: int) -> str:
        """One line: the parts, and how many sizes of prefill are compiled of how many there will be."""
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._parts.items())
        rest = f"; {shapes - compiled} of {shapes} prefill sizes follow in the background" if compiled < shapes else ""
        return f"ready after {self._last - self._begun:.1f} s: {parts}{rest}"


class _LoggedProgress:
    """Progress of loading where there is no terminal to draw a bar on: a line for each tenth."""

    def __init__(self) -> None:
        self._tenths = 0

    def __call__(self, done: int, total: int, name: str, /) -> None:
        tenths = done * 10 // max(total, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            _LOG.info("loading: %d%% of %s", tenths * 10, _gib(total))


def _summary(options: Options, checkpoint: Checkpoint, plan: CachePlan, backend: str) -> str:
    """Model, device, what decodes, context, slots and memory in one line."""
    weights = jax.tree.leaves(checkpoint.params)
    device = jax.devices()[0]
    kind = device.platform if device.device_kind == device.platform else f"{device.platform} ({device.device_kind})"
    return (
        f"model {options.served_model_name}, {weights[0].dtype} on {kind}, decoding by {backend},"
        f" context {plan.max_context} tokens, {plan.slots} slot{'s' if plan.slots > 1 else ''},"
        f" memory {_gib(sum(leaf.nbytes for leaf in weights))} weights + {_gib(plan.bytes)} KV cache"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.0f} MiB"


def _curl(model: str, host: str) -> str:
    """A command that streams a chat completion."""
    body = (
        f'{{"model": "{model}", "stream": true, "max_tokens": 200,'
        ' "messages": [{"role": "user", "content": "Write a Python function that reverses a list."}]}'
    )
    return f"curl -N http://{host}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
