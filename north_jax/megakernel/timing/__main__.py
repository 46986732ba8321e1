"""Prints what the timing model says: its calibration, then a ranking of orders or the result of a search.

python -m north_jax.megakernel.timing [--search | --fit] [--batches 1,2,4,8] [--contexts 1024,8192,32768]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...config import Config
from ...geometries import NORTH
from ...provenance import provenance
from ...random_weights.popularity import SKEWED, UNIFORM
from . import report
from .calibration import fit
from .machine import H200, MACHINES
from .report import Row
from .search import Case, Ranked, rank, search


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m north_jax.megakernel.timing", description=__doc__)
    parser.add_argument("--config", type=Path, default=NORTH, help="config.json of the model")
    parser.add_argument("--machine", choices=MACHINES, default=H200.name)
    parser.add_argument("--batches", type=_integers, default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=_integers, default=[1024, 8192, 32768])
    parser.add_argument("--routing", choices=(UNIFORM, SKEWED), default=UNIFORM)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--search", action="store_true", help="search each case instead of ranking the named orders")
    what.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--out", type=Path, help="also write it as JSON, a row a line")
    return parser.parse_args()


def main() -> None:
    """Runs the command."""
    arguments = _arguments()
    config, machine = Config.from_json(arguments.config), MACHINES[arguments.machine]
    if arguments.fit:
        for constant, value in fit(config, H200):
            print(f"{constant} = {value:.3f}", flush=True)
        return
    rows: list[Row] = []

    def kept(made: Iterable[Row]) -> Iterator[Row]:
        for row in made:
            rows.append(row)
            yield row

    _print(report.calibration_table(kept(report.calibration_rows(config, H200))))
    _print(report.trace_table(config, H200))
    kind: str = "search" if arguments.search else "ranking"
    look: Callable[[Case], Iterable[Ranked]] = search if arguments.search else rank
    for rows_of_batch in arguments.batches:
        for context in arguments.contexts:
            case = Case(config, machine, rows_of_batch, context, arguments.routing)
            _print(report.ranking_table(case, kept(report.ranking_row(case, each, kind) for each in look(case))))
    if arguments.out:
        device = f"none: a model of the {machine.name}"
        origin = provenance("north_jax.megakernel.timing", device) | {"devices": 0}
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        arguments.out.write_text(f'{{\n "provenance": {json.dumps(origin)},\n "rows": [\n{lines}\n ]\n}}\n')


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)
    print()


if __name__ == "__main__":
    main()
