"""Progress of a long read, as a callback or as a bar on the terminal."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO


class Progress(Protocol):
    """Called often while a checkpoint is read: bytes done, bytes in total, name of the parameter at hand."""

    def __call__(self, done: int, total: int, name: str, /) -> None: ...


class ProgressBar:
    """Draws one line on `stream`, a terminal, at most ten times a second."""

    def __init__(self, stream: TextIO, width: int = 24) -> None:
        self._stream = stream
        self._width = width
        self._start = time.monotonic()
        self._next = 0.0

    def __call__(self, done: int, total: int, name: str, /) -> None:
        now = time.monotonic()
        if now < self._next and done < total:
            return
        self._next = now + 0.1
        fraction = done / total if total else 1.0
        rate = done / max(now - self._start, 1e-9)
        bar = ("#" * round(fraction * self._width)).ljust(self._width, ".")
        line = f"loading [{bar}] {fraction:4.0%}  {done / 1e9:.2f}/{total / 1e9:.2f} GB  {rate / 1e9:.2f} GB/s  {name}"
        self._stream.write(f"\r{line}\x1b[K" + ("\n" if done == total else ""))
        self._stream.flush()


def silent(done: int, total: int, name: str, /) -> None:
    """Progress that nobody sees."""


def default_progress() -> Progress:
    """A bar on standard error where that is a terminal, else nothing."""
    return ProgressBar(sys.stderr) if sys.stderr.isatty() else silent
