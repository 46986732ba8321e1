"""A limit on how long a command measures: it stops after the row that passes it, and another run goes on."""

from __future__ import annotations

import argparse
import time


class TimeOver(Exception):
    """The limit is passed; what is there is kept."""


class Limit:
    """Counts from its making."""

    def __init__(self, seconds: float | None) -> None:
        """None: no limit."""
        self._end = None if seconds is None else time.monotonic() + seconds

    def check(self) -> None:
        """Raises TimeOver where the limit is passed."""
        if self._end is not None and time.monotonic() > self._end:
            raise TimeOver


def add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, help="stop after the row that passes this limit; run again to go on")
