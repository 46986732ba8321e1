"""Steps of the compiled decode beside rows with known results: which batches, how they run, what is kept of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from north_jax.compare.compiled_pass import chosen_experts
from north_jax.config import SPARSE, Config
from north_jax.kv_cache import KVCache
from north_jax.layers import Params
from north_jax.megakernel.abi import Buffer
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.random_weights.weights import truncated

from .comparison import Found, compare, faults
from .limit import Limit
from .record import Results
from .reference import CANDIDATES, Outputs, Reference, given_experts, references
from .shared_pages import SharedPages

SLOTS = 8
WHOLE, SLICES, FLOAT32 = PARTS = ("depth", "slices", "float32")
KEYS = ("kind", "part", "routing", "layers", "batch", "contexts")


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
    """Ragged batches of all contexts, one row of each long context, and equal rows of every batch and context.

    In this order, large batches first: a run that is stopped has seen what shows most.
    """
    rng = np.random.default_rng(0)
    for number in range(ragged):
        batch = batches[-1 - number % len(batches)]
        mixed = rng.permutation(np.resize(contexts, max(batch, len(contexts))))[:batch]
        yield Case(tuple(map(int, mixed)), tuple(range(batch)))
    for context in long_contexts:
        yield Case((context,), (0,))
    for batch in reversed(batches):
        for context in contexts:
            yield Case((context,) * batch, tuple((batch + row) % SLOTS for row in range(batch)))


class Subject:
    """The compiled decode of a model's first layers."""

    def __init__(self, config: Config, params: Params, layers: int, cache: KVCache, pages: SharedPages) -> None:
        self._pages, self._layers = pages, layers
        self._model = truncated(config, params, layers)
        self._idle = pages.tables([], SLOTS)
        self._decoder = self._compiled(cache, planes=2)
        self._watched: MegakernelDecoder | None = None

    def _compiled(self, cache: KVCache, planes: int) -> MegakernelDecoder:
        max_context = self._pages.max_context
        decoder = MegakernelDecoder(*self._model, slots=SLOTS, max_context=max_context, planes=planes)
        decoder.compile(cache[: self._layers], self._idle)
        return decoder

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

    def experts(self, cache: KVCache, batch: list[Reference]) -> tuple[KVCache, np.ndarray, list[str]]:
        """The step that `step` has just run, again by a decoder that keeps the router logits of every layer.

        Returns:
          the cache, the experts int32 [layers with experts, rows, k], and what is wrong: other bits of the logits.
        """
        if self._watched is None:
            self._watched = self._compiled(cache, planes=self._layers)
        config, rows = self._model[0], [reference.row for reference in batch]
        own, _ = self._pages.step(self._watched, cache[: self._layers], rows)
        same = np.array_equal(self._watched.logits().view(np.uint32), self._decoder.logits().view(np.uint32))
        experts = [
            chosen_experts(config, self._watched.activations(Buffer.ROUTER_LOGITS, layer)[: len(rows)])
            for layer, kind in enumerate(config.mlp_layer_types)
            if kind == SPARSE
        ]
        wrong = [] if same else ["with as many planes as layers the logits have other bits"]
        shape = (len(experts), len(rows), config.num_experts_per_tok)
        return (*own, *cache[self._layers :]), np.array(experts, np.int32).reshape(shape), wrong


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

    def measure(self, depths: list[int], wanted: list[Case], results: Results, limit: Limit) -> None:
        """Runs the cases that have no result yet, until the limit is passed (TimeOver)."""
        for depth in depths:
            subject: Subject | None = None
            for case in wanted:
                own = key(self.part, self.routing, depth, case)
                if results.find(**own) is not None:
                    continue
                subject = subject or Subject(self._config, self._params, depth, self._cache, self._pages)
                self._report(results.add(own | self._run(subject, case, depth, depths)))
                limit.check()

    def _run(self, subject: Subject, case: Case, depth: int, depths: list[int]) -> dict[str, Any]:
        batch = []
        for context, pick in zip(case.contexts, case.picks, strict=True):
            known = self._known(context, depths)
            if not known:
                return {"skipped": f"no row of context {context} chooses its experts beyond doubt"}
            batch.append(known[pick % len(known)])
        if len({reference.row for reference in batch}) < case.batch:
            return {"skipped": f"too few rows of contexts {case.label} choose their experts beyond doubt"}
        self._cache, outputs, wrong = subject.step(self._cache, batch)
        found = Found.of_exact_experts(batch, outputs)
        if self.part == WHOLE:
            found, more = self._with_its_experts(subject, batch, outputs, depth)
            wrong += more
        result = compare(batch, found, depth)
        return result | {"faults": faults(result) + wrong}

    def _with_its_experts(
        self, subject: Subject, batch: list[Reference], outputs: list[Outputs], depth: int
    ) -> tuple[Found, list[str]]:
        """The step held against float32 with the experts that it ran, and what is wrong with them."""
        self._cache, experts, wrong = subject.experts(self._cache, batch)
        exact, gaps = given_experts(
            self._config,
            self._params,
            self._cache,
            self._pages,
            [reference.row for reference in batch],
            experts,
            depth=depth,
            slots=SLOTS,
        )
        yardsticks = np.stack([reference.yardsticks for reference in batch], axis=1)
        return Found(outputs, exact, gaps / yardsticks), wrong

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
                beyond_doubt=self.part != WHOLE,
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
