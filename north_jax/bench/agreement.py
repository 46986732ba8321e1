"""How far the compiled decode is from float32 on the same weights, beside how far JAX is in the weights' own type.

    python -m north_jax.bench agreement --out result.json

Three parts. "depth": the whole model, in which branches are moderate, and the rows whose experts are least in doubt.
"slices": models of the first layers at full width, in which every branch weighs much; only rows whose experts rounding
cannot change. "float32": slices in float32, where nothing but the order of sums is left.

A case agrees if its error is at most 1.1 × JAX's, for the logits and for the keys and values of every layer, and the
cosine at least 0.9999. In 48 routers of the whole model some experts are so near a tie that rounding decides, and one
chosen otherwise outweighs all other rounding: so there both sides are held against float32 with the experts that they
ran themselves. That theirs are other ones than float32's is right where these are less than 4 yardsticks apart in
float32, a yardstick being how far JAX's router logits are from exact ones in that layer.

Every case is kept as soon as it is there. With --seconds a run stops after the case that passes the limit, and the next
one goes on; cases that show most come first. Exits with 1 if something does not agree, with 2 if cases are missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from north_jax.compare.measures import rms
from north_jax.config import Config
from north_jax.decoding import BackendError
from north_jax.random_weights.popularity import SKEWED, UNIFORM
from north_jax.random_weights.weights import MODERATE, STRONG, random_params, with_routing

from .campaign import FLOAT32, KEYS, PARTS, WHOLE, Campaign, Case, cases, key
from .limit import Limit, TimeOver, add_limit
from .options import add_common
from .record import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add_limit(parser)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="(default: all)")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 5, 9], help="of the slices (default: 1 5 9)")
    parser.add_argument("--batch", type=int, nargs="+", default=list(range(1, 9)), help="(default: 1 to 8)")
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[0, 1, 63, 64, 65, 4095, 4096, 4097, 8192, 32768],
        help="positions held (default: edges of pages and window, 8K, 32K)",
    )
    parser.add_argument(
        "--long", type=int, nargs="*", default=[131072, 262144], help="for single rows (default: 128K, 256K)"
    )
    parser.add_argument("--ragged", type=int, default=8, help="batches of mixed contexts (default: %(default)s)")


type Plan = dict[str, tuple[list[int], list[Case]]]  # routing → depths and cases


def run(options: argparse.Namespace) -> None:
    config = Config.from_json(options.config)
    results, limit = Results(options.out, KEYS), Limit(options.seconds)
    plans = {part: _plan(config, part, options) for part in options.part}
    taken = True
    try:
        for part, plan in plans.items():
            try:
                _measure(config, part, plan, results, limit)
            except BackendError as error:
                print(f"{part}: {error}")
                taken = False
            gc.collect()  # the weights of the next part need the room
    except TimeOver:
        pass
    every = [own for part, plan in plans.items() for own in _keys(part, plan)]
    missing = sum(results.find(**own) is None for own in every)
    agrees = summary(results.of_kind("agreement"))
    if missing:
        print(f"{missing} of {len(every)} cases are missing: run again to go on")
    sys.exit(1 if not (agrees and taken) else 2 if missing else 0)


def _plan(config: Config, part: str, options: argparse.Namespace) -> Plan:
    # The deepest first, as the cases that show most.
    depths = [config.num_hidden_layers] if part == WHOLE else sorted(options.layers, reverse=True)
    few = list(cases(options.batch[-1:], options.context[::4], [], 1))
    if part == FLOAT32:
        return {UNIFORM: (depths, few)}
    every = list(cases(options.batch, options.context, options.long, options.ragged))
    return {UNIFORM: (depths, every), SKEWED: (depths[:1], few)}


def _keys(part: str, plan: Plan) -> Iterator[dict[str, Any]]:
    for routing, (depths, wanted) in plan.items():
        for depth in depths:
            # Two ragged batches may have the same contexts.
            different = {(case.batch, case.label): case for case in wanted}.values()
            yield from (key(part, routing, depth, case) for case in different)


def _measure(config: Config, part: str, plan: Plan, results: Results, limit: Limit) -> None:
    """Runs the cases of a part that have no result yet."""
    missing = [own for own in _keys(part, plan) if results.find(**own) is None]
    if not missing:
        return
    gains = MODERATE if part == WHOLE else STRONG
    deepest = max(depth for depths, _ in plan.values() for depth in depths)
    kinds = {name: getattr(config, name)[:deepest] for name in ("layer_types", "mlp_layer_types")}
    slice_config = dataclasses.replace(config, num_hidden_layers=deepest, **kinds)
    params = random_params(slice_config, gains=gains, dtype=FLOAT32 if part == FLOAT32 else config.dtype)
    for routing, (depths, wanted) in plan.items():
        if any(own["routing"] == routing for own in missing):
            # The whole model's configuration throughout: what JAX compiles for one part serves the others.
            routed = with_routing(config, params, routing, gains=gains)
            contexts = sorted({context for case in wanted for context in case.contexts})
            Campaign(config, routed, part, routing, contexts).measure(depths, wanted, results, limit)


def summary(rows: list[dict[str, Any]]) -> bool:
    """Prints a table by part, and whether everything agrees."""
    agrees = True
    print("| part | routing | layers | cases | error | JAX's | largest ratio | least cosine | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    groups = dict.fromkeys((row["part"], row["routing"], row["layers"]) for row in rows)
    for group in groups:
        own = [row for row in rows if (row["part"], row["routing"], row["layers"]) == group and "error" in row]
        if not own:
            print("| " + " | ".join(map(str, group)) + " | 0 | | | | | nothing was compared |")
            agrees = False
            continue
        ours = float(rms(np.concatenate([row["row_errors"] for row in own])))
        theirs = float(rms(np.concatenate([row["jax_row_errors"] for row in own])))
        ratio = max((row["error"] / row["jax_error"] for row in own if row["jax_error"]), default=math.nan)
        cosine = min(row["cosine"] for row in own)
        failed = [f"batch {row['batch']} context {row['contexts']}" for row in own if row["faults"]]
        agrees &= not failed
        verdict = "agrees" if not failed else f"{len(failed)} do not: {', '.join(failed[:3])}"
        cells = [*group, len(own), f"{ours:.2e}", f"{theirs:.2e}", f"{ratio:.2f}", f"{cosine:.6f}", verdict]
        print("| " + " | ".join(map(str, cells)) + " |")
    skipped = sum("skipped" in row for row in rows)
    if skipped:
        print(f"{skipped} cases were skipped: too few rows choose their experts beyond doubt")
    _print_choices([row for row in rows if row["part"] == WHOLE and "error" in row])
    return agrees


def _print_choices(rows: list[dict[str, Any]]) -> None:
    """How often float32 would have chosen other experts, and what that makes of the logits."""
    if not rows:
        return
    total = sum(row["batch"] for row in rows)
    for who, prefix in (("the kernel", ""), ("JAX", "jax_")):
        choices = np.concatenate([row[f"{prefix}row_choices"] for row in rows])
        cosines = np.concatenate([row[f"{prefix}row_cosines"] for row in rows])
        print(
            f"{WHOLE}: {np.count_nonzero(choices)} of {total} rows ran an expert somewhere that float32 would not have "
            f"chosen ({who}); beside float32 with its own experts the least cosine is {cosines.min():.6f}"
        )
    print(f"{WHOLE}: the kernel's were at most {max(row['gap'] for row in rows):.2f} yardsticks from a tie")
