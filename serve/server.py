"""`python -m serve` after its options: bind, load, serve until a signal."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from .lifecycle import serve_until_signal
from .listen import BindError, address_of, bind, local_address_of
from .loading import CANNOT_LOAD, load
from .options import Options
from .start import Start, curl, summary


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
    try:
        listener = bind(options.host, options.port)
        with listener:
            start.done("importing")
            loaded = load(options, start)

            def ready() -> None:
                print(summary(options, loaded.checkpoint, loaded.plan.cache, loaded.choice.backend))
                print(start.summary(*loaded.engine.prefill_shapes))
                print(f"listening on {address_of(listener)}")
                print(f"try: {curl(options.served_model_name, local_address_of(listener))}", flush=True)
                loaded.engine.warm_up()

            asyncio.run(serve_until_signal(loaded.service, listener, drain_seconds=options.drain_seconds, ready=ready))
    except (BindError, *CANNOT_LOAD) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while loading
        return 130
    return 0
