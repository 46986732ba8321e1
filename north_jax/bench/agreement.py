"""How far the compiled decode is from float32 on the same weights, beside how far JAX is in the weights' own type.

    python -m north_jax.bench agreement --out result.json

Three parts. "slices": models of the first layers at full width, in which every branch weighs much; only rows whose
experts rounding cannot change. "depth": the whole model, in which branches are moderate, and the rows whose experts are
least in doubt. "float32": slices in float32, where nothing but the order of sums is left. A case agrees if its error is
at most 1.1 × JAX's, for the logits and for the keys and values of every layer, and the cosine at least 0.9999; in the
whole model, where one expert chosen otherwise outweighs all rounding, the errors of all cases together are compared.
Exits with 1 if something does not agree.
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
from north_jax.kv_cache import KVCache
from north_jax.layers import Params
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.random_weights.weights import MODERATE, STRONG, Gains, random_params, truncated, with_routing

from .comparison import COSINE, FACTOR, compare, faults
from .options import add_common
from .record import Results
from .reference import CANDIDATES, Outputs, Reference, references
from .shared_pages import SharedPages

SLOTS = 8
_KEYS = ("kind", "part", "routing", "layers", "batch", "contexts")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One step of a batch: the contexts of its rows, and which of the references of its context each is."""

    contexts: tuple[int, ...]
    picks: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.contexts)

    @property
    def label(self) -> str:
        different = {*self.contexts}
        return " ".join(map(str, self.contexts if len(different) > 1 else different))


def cases(batches: list[int], contexts: list[int], long_contexts: list[int], ragged: int) -> Iterator[Case]:
    """Equal rows of every batch and context, ragged batches of all contexts, and one row of each long context."""
    for context in contexts:
        for batch in batches:
            yield Case((context,) * batch, tuple((batch + row) % SLOTS for row in range(batch)))
    rng = np.random.default_rng(0)
    for number in range(ragged):
        batch = batches[-1 - number % len(batches)]
        mixed = rng.permutation(np.resize(contexts, max(batch, len(contexts))))[:batch]
        yield Case(tuple(map(int, mixed)), tuple(range(batch)))
    for context in long_contexts:
        yield Case((context,), (0,))


class Subject:
    """The compiled decode of a model's first layers."""

    def __init__(self, config: Config, params: Params, layers: int, cache: KVCache, pages: SharedPages) -> None:
        self._pages, self._layers = pages, layers
        short, part = truncated(config, params, layers)
        self._decoder = MegakernelDecoder(short, part, slots=SLOTS, max_context=pages.max_context)
        self._decoder.compile(cache[:layers], pages.tables([], SLOTS))

    def step(self, cache: KVCache, batch: list[Reference]) -> tuple[KVCache, list[Outputs], list[str]]:
        """One step of a batch: the cache, what each row left, and what is wrong with the tokens."""
        rows = [reference.row for reference in batch]
        own, drawn = self._pages.step(self._decoder, cache[: self._layers], rows)
        logits = self._decoder.logits()
        largest = logits.argmax(axis=1).tolist()
        wrong = [] if drawn == largest else [f"greedy rows drew {drawn}, their largest logits are those of {largest}"]
        written = self._pages.written(own, rows, SLOTS)
        outputs = [Outputs({self._layers: logits[i]}, written[:, i]) for i in range(len(rows))]
        return (*own, *cache[self._layers :]), outputs, wrong


def key(part: str, routing: str, depth: int, case: Case) -> dict[str, Any]:
    """The fields that tell a result from others."""
    sizes = {"layers": depth, "batch": case.batch, "contexts": case.label}
    return {"kind": "agreement", "part": part, "routing": routing} | sizes


class Campaign:
    """Models of one part under one routing: references by context, decoders by depth, results by case."""

    def __init__(self, config: Config, params: Params, part: str, routing: str, contexts: list[int]) -> None:
        self._config, self._params, self.part, self.routing = config, params, part, routing
        self._pages = SharedPages(config, contexts=contexts, numbers=CANDIDATES)
        self._cache = self._pages.cache(len(params["layers"]), params["embed"].dtype)
        self._references: dict[int, list[Reference]] = {}

    def measure(self, depths: list[int], wanted: list[Case], results: Results) -> None:
        """Runs the cases that have no result yet."""
        for depth in depths:
            subject: Subject | None = None
            for case in wanted:
                own = key(self.part, self.routing, depth, case)
                if results.find(**own) is not None:
                    continue
                subject = subject or Subject(self._config, self._params, depth, self._cache, self._pages)
                self._report(results.add(own | self._run(subject, case, depth, depths)))

    def _run(self, subject: Subject, case: Case, depth: int, depths: list[int]) -> dict[str, Any]:
        batch = []
        for context, pick in zip(case.contexts, case.picks, strict=True):
            known = self._known(context, depths)
            if not known:
                return {"skipped": f"no row of context {context} chooses its experts beyond doubt"}
            batch.append(known[pick % len(known)])
        if len({reference.row for reference in batch}) < case.batch:
            return {"skipped": f"too few rows of contexts {case.label} choose their experts beyond doubt"}
        self._cache, ours, wrong = subject.step(self._cache, batch)
        result = compare(batch, ours, depth)
        return result | {"faults": faults(result) + wrong}

    def _known(self, context: int, depths: list[int]) -> list[Reference]:
        if context not in self._references:
            self._references[context] = references(
                self._config,
                self._params,
                self._cache,
                self._pages,
                context,
                depths=depths,
                wanted=SLOTS,
                beyond_doubt=self.part == "slices",
            )
        return self._references[context]

    @staticmethod
    def _report(row: dict[str, Any]) -> None:
        start = (
            f"{row['part']} {row['routing']} {row['layers']} layers, batch {row['batch']}, context {row['contexts']}:"
        )
        if "skipped" in row:
            print(start, "skipped,", row["skipped"], flush=True)
            return
        figures = f"{row['error']:.2e} (JAX {row['jax_error']:.2e}), cosine {row['cosine']:.6f}"
        print(start, figures, "; ".join(row["faults"]), flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parts = ("slices", "depth", "float32")
    parser.add_argument("--part", choices=parts, nargs="+", default=list(parts), help="(default: all)")
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


def run(options: argparse.Namespace) -> None:
    config = Config.from_json(options.config)
    results = Results(options.out, _KEYS)
    taken = True
    for part in options.part:
        whole = part == "depth"
        depths = [config.num_hidden_layers] if whole else options.layers
        gains = MODERATE if whole else STRONG
        dtype = "float32" if part == "float32" else config.dtype
        longest = [] if part == "float32" else options.long
        try:
            _part(config, part, depths, gains, dtype, longest, options, results)
        except BackendError as error:
            print(f"{part}: {error}")
            taken = False
        gc.collect()  # the weights of the next part need the room
    sys.exit(not (summary(results.of_kind("agreement")) and taken))


def _part(
    config: Config,
    part: str,
    depths: list[int],
    gains: Gains,
    dtype: str,
    longest: list[int],
    options: argparse.Namespace,
    results: Results,
) -> None:
    few = list(cases(options.batch[-1:], options.context[::4], [], 1))
    plan = {"uniform": (depths, few)}
    if part != "float32":
        every = list(cases(options.batch, options.context, longest, options.ragged))
        plan = {"uniform": (depths, every), "skewed": (depths[-1:], few)}

    def complete(routing: str) -> bool:
        chosen, wanted = plan[routing]
        return all(results.find(**key(part, routing, depth, case)) for depth in chosen for case in wanted)

    if all(map(complete, plan)):
        return
    kinds = {name: getattr(config, name)[: max(depths)] for name in ("layer_types", "mlp_layer_types")}
    slice_config = dataclasses.replace(config, num_hidden_layers=max(depths), **kinds)
    params = random_params(slice_config, gains=gains, dtype=dtype)
    for routing, (chosen, wanted) in plan.items():
        if not complete(routing):
            # The whole model's configuration throughout: what JAX compiles for one part serves the others.
            routed = with_routing(config, params, routing, gains=gains)
            contexts = sorted({context for case in wanted for context in case.contexts})
            Campaign(config, routed, part, routing, contexts).measure(chosen, wanted, results)


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
        if group[0] == "depth":  # one expert chosen otherwise decides a case's ratio
            failed = [] if cosine >= COSINE and ours <= FACTOR * theirs else ["all rows together"]
            failed += [fault for row in own for fault in row["faults"] if "greedy" in fault]
        else:
            failed = [f"batch {row['batch']} context {row['contexts']}" for row in own if row["faults"]]
        agrees &= not failed
        verdict = "agrees" if not failed else f"{len(failed)} do not: {', '.join(failed[:3])}"
        cells = [*group, len(own), f"{ours:.2e}", f"{theirs:.2e}", f"{ratio:.2f}", f"{cosine:.6f}", verdict]
        print("| " + " | ".join(map(str, cells)) + " |")
    skipped = sum("skipped" in row for row in rows)
    if skipped:
        print(f"{skipped} cases were skipped: too few rows choose their experts beyond doubt")
    return agrees
