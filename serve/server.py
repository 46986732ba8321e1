"""`python -m serve` after its options: bind, plan, load, start the engine, serve until a signal."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

import jax

from north_jax import compilation_cache
from north_jax.checkpoint import Checkpoint, CheckpointError
from north_jax.checkpoint.loader import resolve
from north_jax.config import ConfigError
from north_jax.decoding import BackendError, Choice, choose_backend, make_decoder
from north_jax.text import TemplateError, TokenizerError

from .app import TextSide, make_service
from .engine.engine import JaxEngine
from .engine.memory import MemoryPlanError
from .engine.pace import Pace
from .lifecycle import serve_until_signal
from .listen import BindError, address_of, bind, local_address_of
from .memory import MemoryPlan, device_memory, plan_memory
from .options import Options
from .protocol.generation_config import GenerationConfigError
from .start import LoggedProgress, Start, backend_line, curl, summary
from .weights import Outlook, load_weights, look_at

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
_BUSY_LATENCY_MS = 52.0  # of a GPU, where the command line names none: an H200 computes 2048 tokens and a step of 8
# Between a thread that wants Python's lock and one that computes under it (a compilation, a long prompt's parsing): a
# chunk of prefill takes the lock again some twenty times, each of which would cost Python's default of 5 ms.
_SWITCH_SECONDS = 0.0005


def run(options: Options, *, begun: float | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Gives the exit status; what keeps it from starting is one line on stderr.

    Args:
      options: the command line's.
      begun: when the process began, on `time.monotonic`'s clock; now, if it is not known.
    """
    start = Start(time.monotonic() if begun is None else begun)
    sys.setswitchinterval(_SWITCH_SECONDS)
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
            directory = resolve(options.model)
            text = TextSide.read(directory)  # before the weights: a fault in it should not take minutes
            outlook, choice, plan = _plan(directory, options)
            print(f"{backend_line(choice)}\n{plan.table()}", flush=True)
            progress = None if sys.stderr.isatty() else LoggedProgress()
            checkpoint = load_weights(outlook, directory, options, progress)
            start.done("loading")
            engine = _engine(options, checkpoint, choice, plan)
            start.done("allocating")
            _LOG.info("loaded %s; compiling", options.model)
            engine.start()
            start.done("compiling")

            def ready() -> None:
                print(summary(options, checkpoint, plan.cache, choice.backend))
                print(start.summary(*engine.prefill_shapes))
                print(f"listening on {address_of(listener)}")
                print(f"try: {curl(options.served_model_name, local_address_of(listener))}", flush=True)
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


def _plan(directory: Path, options: Options) -> tuple[Outlook, Choice, MemoryPlan]:
    """What will run and where everything will lie: all that can be refused before the weights are loaded.

    Raises BackendError and MemoryPlanError, and ConfigError and CheckpointError for what files and headers show.
    """
    outlook = look_at(directory, options)
    config, kind = outlook.config, outlook.config.dtype
    choice = choose_backend(config, kind, backend=options.backend, slots=options.slots, quantized=outlook.quantized)
    plan = plan_memory(
        config,
        kind,
        backend=choice.backend,
        slots=options.slots,
        max_context=options.max_context,
        chunk=options.chunk,
        busy_chunk=options.busy_chunk,
        share=options.memory_share,
        available=device_memory(),
        weights=outlook.weights,
    )
    return outlook, choice, plan


def _engine(options: Options, checkpoint: Checkpoint, choice: Choice, plan: MemoryPlan) -> JaxEngine:
    """The engine over loaded weights, with its KV cache allocated."""
    decoder = make_decoder(
        checkpoint.config,
        checkpoint.params,
        backend=choice.backend,
        slots=plan.cache.slots,
        max_context=plan.cache.max_context,
    )
    latency = options.busy_latency_ms
    if latency is None and jax.devices()[0].platform == "gpu":
        latency = _BUSY_LATENCY_MS
    return JaxEngine(
        checkpoint.config,
        checkpoint.params,
        plan.cache,
        decoder,
        max_queue=options.max_queue,
        prefix_cache=options.prefix_cache,
        pace=Pace(share=options.decode_share, latency_s=(latency or 0) / 1e3 or None),
    )


def _use_compilation_cache(directory: str) -> None:
    """Without it the server starts too, only later."""
    try:
        compilation_cache.use(directory)
    except OSError as error:
        _LOG.warning("no compilation cache: %s", error)


def _defaults(options: Options) -> dict[str, float]:
    given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {name: value for name, value in given.items() if value is not None}
