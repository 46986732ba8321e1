"""Every operation of the compiled decode against float64 on its own input, beside the same operation in JAX.

    python -m north_jax.bench operations --out result.json

One step through the first layers of the model at full width, so many that the last one is dense, or has experts and
slides, or has experts and sees everything. What its operations have left in the workspace is held one by one against a
float64 oracle that starts from what the operations before have left there, and so is what the model's own functions
make of the same in the weights' type. A row of an output agrees if its relative error is at most 1.1 × JAX's and 1e-5
more, which is what float32 sums may differ by. The logits of one token of every tile of the head are looked at. Exits
with 1 if something does not agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import Any

import numpy as np

from north_jax.config import DENSE, FULL, SPARSE, Config
from north_jax.decoding import BackendError
from north_jax.kv_cache import KVCache
from north_jax.layers import Params
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.random_weights.popularity import SKEWED, UNIFORM
from north_jax.random_weights.weights import STRONG, random_params, truncated, with_routing

from .activations import read
from .campaign import Case, cases
from .operation_checks import LayerChecks, fault
from .options import add_common
from .record import Results
from .shared_pages import Row, SharedPages

_KEYS = ("kind", "routing", "layers", "batch", "contexts")


def depths(config: Config) -> dict[str, int]:
    """Numbers of layers after which a layer of each kind is the last, the first of its kind."""
    kinds = list(zip(config.mlp_layer_types, config.layer_types, strict=True))
    found: dict[str, int] = {}
    for mlp, attention in dict.fromkeys(kinds):
        name = "dense" if mlp == DENSE else "sparse, full" if attention == FULL else "sparse, sliding"
        found.setdefault(name, kinds.index((mlp, attention)) + 1)
    return found


class Subject:
    """The compiled decode of a model's first layers, and the checks of the last of them."""

    def __init__(
        self, config: Config, params: Params, layers: int, cache: KVCache, pages: SharedPages, slots: int
    ) -> None:
        self._config, self._pages, self._layers = config, pages, layers
        self._short, part = truncated(config, params, layers)
        self._on_gpu = next(iter(params["embed"].devices())).platform == "gpu"
        self._decoder = MegakernelDecoder(self._short, part, slots=slots, max_context=pages.max_context)
        self._decoder.compile(cache[:layers], pages.tables([], slots))
        self._checks = LayerChecks(config, params, layers - 1, slots)

    def step(self, cache: KVCache, rows: list[Row]) -> tuple[KVCache, dict[str, Any]]:
        """One step of `rows`: the cache, and what its operations were like."""
        last, slots = self._layers - 1, self._decoder.max_rows
        own, drawn = self._pages.step(self._decoder, cache[: self._layers], rows)
        written = self._pages.written(own, rows, slots)[last]
        seen = read(self._short, self._decoder, rows, written, on_gpu=self._on_gpu)
        table = np.asarray(self._pages.tables(rows, len(rows)).of_layer(self._config, last))
        operations = [check.judged() for check in self._checks.checks(seen, own[last], table)]
        wrong = [text for each in operations if (text := fault(each))]
        if drawn != seen.logits.argmax(axis=1).tolist():
            wrong.append(f"SAMPLE_DRAW: greedy rows drew {drawn}, which are not their largest logits")
        result = {"kernel": seen.kernel, "operations": operations, "faults": wrong}
        return (*own, *cache[self._layers :]), result


def key(routing: str, layers: int, case: Case) -> dict[str, Any]:
    """The fields that tell a result from others."""
    sizes = {"layers": layers, "batch": case.batch, "contexts": case.label}
    return {"kind": "operations", "routing": routing} | sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 3, 8], help="(default: 1 3 8)")
    contexts = [1, 64, 4097, 8192]
    parser.add_argument(
        "--context", type=int, nargs="+", default=contexts, help="positions held (default: 1 64 4097 8192)"
    )
    parser.add_argument("--ragged", type=int, default=1, help="batches of mixed contexts (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    config = Config.from_json(options.config)
    results = Results(options.out, _KEYS)
    taken = True
    try:
        measure(config, options, results)
    except BackendError as error:
        print(error)
        taken = False
    sys.exit(not (summary(results.of_kind("operations")) and taken))


def measure(config: Config, options: argparse.Namespace, results: Results) -> None:
    """Runs the cases that have no result yet."""
    every = list(cases(options.batch, options.context, [], options.ragged))
    plan = {UNIFORM: dict.fromkeys(depths(config).values(), every)}
    sparse = [layers for layers in plan[UNIFORM] if config.mlp_layer_types[layers - 1] == SPARSE]
    if sparse:
        plan[SKEWED] = {sparse[0]: list(cases([max(options.batch)], options.context[-1:], [], 0))}
    missing = {
        routing: {
            layers: [case for case in wanted if results.find(**key(routing, layers, case)) is None]
            for layers, wanted in of_routing.items()
        }
        for routing, of_routing in plan.items()
    }
    if not any(wanted for of_routing in missing.values() for wanted in of_routing.values()):
        return
    deepest, slots = max(plan[UNIFORM]), max(options.batch)
    kinds = {name: getattr(config, name)[:deepest] for name in ("layer_types", "mlp_layer_types")}
    slice_config = dataclasses.replace(config, num_hidden_layers=deepest, **kinds)
    params = random_params(slice_config, gains=STRONG)
    pages = SharedPages(config, contexts=sorted({*options.context}), numbers=slots)
    cache = pages.cache(deepest, params["embed"].dtype)
    for routing, of_routing in missing.items():
        routed = with_routing(config, params, routing, gains=STRONG)
        for layers, wanted in of_routing.items():
            subject = Subject(config, routed, layers, cache, pages, slots) if wanted else None
            for case in wanted:
                assert subject is not None
                cache, result = subject.step(cache, _rows(config, case))
                _report(results.add(key(routing, layers, case) | result))


def _rows(config: Config, case: Case) -> list[Row]:
    """Different tokens, each of a page of its own."""
    tokens = np.random.default_rng([case.batch, *case.contexts]).integers(config.vocab_size, size=case.batch)
    numbered = zip(case.contexts, range(case.batch), tokens.tolist(), strict=True)
    return [Row(context, number, token) for context, number, token in numbered]


def _report(row: dict[str, Any]) -> None:
    worst = max(row["operations"], key=_share)
    figures = f"{worst['operation']}, {worst['output']} has {worst['of_allowed']:.2f} of what is allowed"
    print(f"{_where(row)} ({row['kernel']}): {figures}", *row["faults"], sep="; ", flush=True)


def _where(row: dict[str, Any]) -> str:
    layers = "1 layer" if row["layers"] == 1 else f"{row['layers']} layers"
    return f"{layers}, {row['routing']}, batch {row['batch']}, context {row['contexts']}"


def _share(judged: dict[str, Any]) -> float:
    """Of what is allowed; NaN is most."""
    return math.inf if math.isnan(judged["of_allowed"]) else judged["of_allowed"]


def summary(rows: list[dict[str, Any]]) -> bool:
    """Prints a table by operation, and whether everything agrees."""
    every = [(row, each) for row in rows for each in row["operations"]]
    print("| operation | output | cases | error | JAX's | ratio | of what is allowed | in the worst case | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    for name in dict.fromkeys((each["operation"], each["output"]) for _, each in every):
        own = [(row, each) for row, each in every if (each["operation"], each["output"]) == name]
        row, worst = max(own, key=lambda pair: _share(pair[1]))
        wrong = sum(fault(each) is not None for _, each in own)
        ratio = f"{worst['error'] / worst['jax_error']:.3g}" if worst["jax_error"] else ""
        figures = f"{worst['error']:.2e}", f"{worst['jax_error']:.2e}", ratio, f"{worst['of_allowed']:.2f}"
        cells = [*name, len(own), *figures, _where(row), f"{wrong} do not agree" if wrong else "agrees"]
        print("| " + " | ".join(map(str, cells)) + " |")
    faults = [text for row in rows for text in row["faults"]]
    print(*faults[:10], sep="\n")
    return bool(rows) and not faults
