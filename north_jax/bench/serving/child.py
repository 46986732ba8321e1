"""The server as a child process: started, waited for, asked for its figures, and never left behind."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .endpoint import Endpoint

_STOP_SECONDS = 20.0


class ServerError(RuntimeError):
    """The server did not start, or did not stay; the message has its last words."""


@dataclass
class Server:
    """A running server.

    Attributes:
      url: its address.
      lines: what it said on standard output until it was ready.
      start_s: seconds from the process's start until then.
    """

    url: str
    lines: list[str] = field(default_factory=list)
    start_s: float = 0.0

    @property
    def device(self) -> str:
        """The device's name, as the server's first line has it."""
        found = re.match(r"backend \S+ on (?:\w+ \((.*?)\)|(\w+)):", self.lines[0]) if self.lines else None
        return (found[1] or found[2]) if found else "unknown"


@contextmanager
def server(arguments: Sequence[str], *, log: Path | None = None, timeout_s: float = 600.0) -> Iterator[Server]:
    """Runs `python -m serve` with these arguments on a free port until the context is left.

    Args:
      arguments: of the command line, without a port.
      log: a file for its standard error; by default its last lines are kept, to be shown where it fails.
      timeout_s: seconds until it must be ready.

    Raises:
      ServerError: it ended before it was ready, or was not ready in time.
    """
    begun = time.monotonic()
    command = [sys.executable, "-m", "serve", *arguments, "--port", "0"]
    last: deque[str] = deque(maxlen=20)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=_keep, args=(process.stderr, last, log), daemon=True)
    reader.start()
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        running = Server("")
        for line in process.stdout:
            running.lines.append(line.rstrip("\n"))
            if line.startswith("listening on "):
                running.url = "http://" + line.removeprefix("listening on ").strip()
                break
        watchdog.cancel()
        if not running.url:
            process.wait(_STOP_SECONDS)
            reader.join(1.0)
            raise ServerError(f"the server ended with status {process.returncode}: " + "".join(last).strip())
        running.start_s = round(time.monotonic() - begun, 1)
        threading.Thread(target=_keep, args=(process.stdout, deque(maxlen=1), None), daemon=True).start()
        yield running
        if process.poll() is not None:
            raise ServerError(f"the server died with status {process.returncode}: " + "".join(last).strip())
    finally:
        watchdog.cancel()
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _keep(stream: Iterator[str], last: deque[str], log: Path | None) -> None:
    """Empties a pipe."""
    with log.open("w") if log else open("/dev/null", "w") as kept:
        for line in stream:
            last.append(line)
            kept.write(line)
            kept.flush()


async def metrics(endpoint: Endpoint) -> dict[str, float]:
    """The figures at /metrics, `name{labels}` → value; empty where the endpoint has none in Prometheus' form."""
    found: dict[str, float] = {}
    try:
        body = await endpoint.get("/metrics")
    except OSError:
        return found
    for line in (body or b"").decode(errors="replace").splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("#") or not name:
            continue
        try:
            found[name] = float(value)
        except ValueError:
            continue
    return found


async def is_warm(endpoint: Endpoint) -> bool:
    """Whether a server of ours has compiled all that it compiles ahead; True of others, which do not say."""
    return (await metrics(endpoint)).get("north_warm", 1.0) > 0


async def until_warm(endpoint: Endpoint, timeout_s: float) -> bool:
    """Waits until a server of ours has compiled all that it compiles ahead; whether it has."""
    end = time.monotonic() + timeout_s
    while not await is_warm(endpoint):
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(1.0)
    return True
