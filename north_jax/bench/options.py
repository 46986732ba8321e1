"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

from north_jax.geometries import NORTH


def add_common(parser: argparse.ArgumentParser) -> None:
    """The model's geometry, and where results go."""
    parser.add_argument("--config", type=Path, default=NORTH, help="config.json (default: North Mini Code)")
    parser.add_argument("--out", type=Path, help="JSON file, written after every row; a second run goes on with it")
