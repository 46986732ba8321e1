"""Speed of decoding, by batch, context and routing, beside the speed of light and vLLM on the same GPU.

    python -m north_jax.bench decode --out result.json

One model is drawn and one KV cache filled with random values; every cell then decodes greedily in quanta of --steps
steps, head, draw and token ring included. The time of a step is that of a quantum, with the host's work before and
after it, over its steps: the median of all quanta but the first. A cell counts only if its rows met as many experts as
its routing promises, which JAX's own router tells of the tokens of each row's last steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from north_jax.config import SPARSE, Config
from north_jax.decoding import Decoder, DecodeRow, Finish, TokenRecord, make_decoder
from north_jax.geometries import NORTH
from north_jax.kv_cache import NO_PAGE, KVCache, PagedRows, PageTables
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.megakernel.schedule import Schedule
from north_jax.random_weights.popularity import ROUTINGS, TOLERANCE, distinct
from north_jax.random_weights.weights import random_params, with_routing
from north_jax.sampling import SamplingParams

from . import bandwidth
from .cache import CHUNK, RandomRows
from .layerwise import layers
from .options import add_common
from .peers import vllm
from .record import Results
from .speed_of_light import BANDWIDTH, kv_bytes, weight_bytes

_KEYS = ("kind", "backend", "routing", "batch", "context")
_PROBED = 16  # last steps of each row whose experts are counted


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """What is measured at once."""

    routing: str
    batch: int
    context: int


class Run:
    """One cell: rows that decode, and what they drew."""

    def __init__(self, cell: Cell, decoder: Decoder, paged: PagedRows, vocabulary: int, steps: int) -> None:
        rng = np.random.default_rng(cell.batch)
        self._decoder, self._paged, self._steps = decoder, paged, steps
        self.position = cell.context
        self.tokens = [[int(token)] for token in rng.integers(0, vocabulary, cell.batch)]  # fed or to be fed
        self.seconds: list[float] = []  # of a step, one a quantum

    def tables(self) -> PageTables:
        """Those of the decoder's slots."""
        return PageTables(*(np.asarray(table)[: self._decoder.max_rows] for table in self._paged.snapshot()))

    def quantum(self, cache: KVCache) -> KVCache:
        """Decodes `steps` steps. Raises RuntimeError when a row ends before."""
        greedy = SamplingParams(temperature=0)
        begun = time.perf_counter()
        for row in range(len(self.tokens)):
            self._paged.grow(row, self.position, self.position + self._steps)
        rows = [
            DecodeRow(slot, drawn[-1], self.position, self._steps + 1, frozenset(), greedy)
            for slot, drawn in enumerate(self.tokens)
        ]
        cache = self._decoder.decode(cache, self.tables(), rows, self._steps, self._deliver)
        self.seconds.append((time.perf_counter() - begun) / self._steps)
        self.position += self._steps
        return cache

    def _deliver(self, records: list[TokenRecord]) -> None:
        for record in records:
            if record.finish is not Finish.NONE:
                raise RuntimeError(f"row {record.slot} ended with {record.finish.name}")
            self.tokens[record.slot].append(record.token)


class Bench:
    """A model, its cache and its decoders."""

    def __init__(self, config: Config, *, backend: str, batches: list[int], contexts: list[int], tokens: int) -> None:
        """Draws the weights and fills the cache for `tokens` tokens after the largest context."""
        self._config, self._backend = config, backend
        self._most = max(batches)
        self._max_context = max(contexts) + tokens
        self._rows = RandomRows(config, rows=self._most, max_context=self._max_context)
        self._params = random_params(config)
        self._cache: KVCache = ()
        self._decoder: Decoder | None = None
        self._made_for: tuple[str, int] | None = None
        self.fill_cache()

    def fill_cache(self) -> None:
        """Makes a new cache: a quantum that failed lost the old one."""
        self._cache = ()
        self._cache = self._rows.cache(self._config.dtype)

    def measure(self, cell: Cell, *, steps: int, quanta: int) -> dict[str, Any]:
        """Runs a cell: a quantum to warm up and `quanta` that count."""
        decoder = self._decoder_for(cell)
        run = Run(cell, decoder, self.tables(cell), self._config.vocab_size, steps)
        for _ in range(quanta + 1):
            self.decode(run)
        experts = self._distinct_experts(run)
        seconds = run.seconds[1:]
        step = statistics.median(seconds)
        expected = distinct(self._config.num_experts, self._config.num_experts_per_tok, cell.routing, cell.batch)
        fed = cell.context + steps * (1 + quanta / 2)  # the mean position of the quanta that count
        itemsize = self._params["embed"].dtype.itemsize
        weights = weight_bytes(self._config, experts, itemsize=itemsize)
        keys_and_values = kv_bytes(self._config, [fed] * cell.batch, itemsize=itemsize)
        light = BANDWIDTH.get(jax.devices()[0].device_kind)
        is_north = self._config == Config.from_json(NORTH)
        peer = vllm(cell.routing, cell.context, cell.batch) if is_north else None
        rate = cell.batch / step
        return {
            "kind": "decode",
            "backend": self._backend,
            **dataclasses.asdict(cell),
            "tok_s": round(rate, 1),
            "ms_step": round(step * 1e3, 4),
            "ms_step_range": [round(f(seconds) * 1e3, 4) for f in (min, max)],
            "sol_percent": light and round(100 * (weights + keys_and_values) / light / step, 1),
            "tb_s": round((weights + keys_and_values) / step / 1e12, 3),
            "vllm_tok_s": peer,
            "ratio": peer and round(rate / peer, 2),
            "distinct_experts": round(experts, 2),
            "expected_experts": round(expected, 2),
            "counts": bool(abs(experts - expected) <= TOLERANCE * expected),
            "weight_gb": round(weights / 1e9, 3),
            "kv_gb": round(keys_and_values / 1e9, 3),
            "steps_per_launch": steps,
            "tokens_per_row": steps * quanta,
            "distinct_tokens": round(statistics.mean(len({*row}) / len(row) for row in run.tokens), 3),
        }

    def tables(self, cell: Cell) -> PagedRows:
        """Rows that hold the cell's context."""
        return self._rows.tables([cell.context] * cell.batch)

    def decode(self, run: Run) -> None:
        """A quantum of `run` on this cache."""
        self._cache = run.quantum(self._cache)

    def megakernel(self, cell: Cell) -> tuple[MegakernelDecoder, Schedule]:
        """The decoder of a cell, and the task lists that it runs with it."""
        decoder = self._decoder_for(cell)
        assert isinstance(decoder, MegakernelDecoder)
        return decoder, decoder.schedule_of(cell.batch, cell.context + 1)

    def _decoder_for(self, cell: Cell) -> Decoder:
        """One megakernel serves all batches; JAX computes every slot, so it gets as many as there are rows."""
        slots = self._most if self._backend == "megakernel" else cell.batch
        if self._decoder is None or self._made_for != (cell.routing, slots):
            self._decoder, self._made_for = None, (cell.routing, slots)
            self._params = with_routing(self._config, self._params, cell.routing)
            self._decoder = make_decoder(
                self._config,
                self._params,
                backend=self._backend,  # type: ignore[arg-type]
                slots=slots,
                max_context=self._max_context,
            )
            empty = self._rows.tables([]).snapshot()
            self._decoder.compile(self._cache, PageTables(empty.full[:slots], empty.sliding[:slots]))
        return self._decoder

    def _distinct_experts(self, run: Run) -> float:
        """Mean number of distinct experts a layer over the last steps of a run, 0 for a dense model."""
        rows = len(run.tokens)
        probed = min(_PROBED, len(run.tokens[0]) - 1)
        tokens = np.zeros((self._most, _PROBED), np.int32)
        start, length = np.zeros((2, self._most), np.int32)
        tokens[:rows, :probed] = [drawn[-probed - 1 : -1] for drawn in run.tokens]  # the last one was not fed
        start[:rows], length[:rows] = run.position - probed, probed
        tables = PageTables(*(np.full((self._most, table.shape[1]), NO_PAGE, np.int32) for table in run.tables()))
        for padded, table in zip(tables, run.tables(), strict=True):
            padded[:rows] = table[:rows]
        dtype = self._params["embed"].dtype
        passes = layers(self._config, self._params, self._cache, tables, tokens, start, length, dtype)
        chosen = [np.asarray(layer.experts)[:rows, :probed] for layer in passes if layer.experts is not None]
        counts = [len(np.unique(layer[:, step])) for layer in chosen for step in range(probed)]
        return statistics.fmean(counts) if counts else 0.0


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """In the order that builds the fewest decoders."""
    for routing in options.routing:
        for batch in options.batch:
            for context in options.context:
                yield Cell(routing, batch, context)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--backend", choices=("jax", "warp", "megakernel"), default="megakernel")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8], help="rows (default: 1 2 4 8)")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[1024, 8192, 32768], help="positions held (default: 1024 8192 32768)"
    )
    parser.add_argument("--routing", choices=ROUTINGS, nargs="+", default=list(ROUTINGS), help="(default: both)")
    parser.add_argument("--steps", type=int, default=64, help="of a quantum, one launch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of each row, at least (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    config = Config.from_json(options.config)
    if not 1 <= options.steps <= CHUNK:
        raise SystemExit(f"--steps must be from 1 to {CHUNK}")
    if SPARSE not in config.mlp_layer_types:
        raise SystemExit("a model without experts has no routing to measure")
    results = Results(options.out, _KEYS)
    quanta = -(-options.tokens // options.steps)
    wanted = [cell for cell in cells(options) if _row(results, options.backend, cell) is None]
    if wanted:
        memory = {f"{name}_tb_s": round(rate / 1e12, 3) for name, rate in bandwidth.measure().items()}
        results.add({"kind": "bandwidth", **memory})
        print("memory: " + "  ".join(f"{name} {rate}" for name, rate in memory.items()), flush=True)
        sizes = {"batches": options.batch, "contexts": options.context, "tokens": (quanta + 1) * options.steps}
        bench = Bench(config, backend=options.backend, **sizes)
        for cell in wanted:
            try:
                row = results.add(bench.measure(cell, steps=options.steps, quanta=quanta))
            except RuntimeError as error:  # of a quantum that failed: other cells may still be measured
                print(f"{cell}: {error}", flush=True)
                bench.fill_cache()
                continue
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    found = [_row(results, options.backend, cell) for cell in cells(options)]
    print(table([row for row in found if row is not None]))


def _row(results: Results, backend: str, cell: Cell) -> dict[str, Any] | None:
    return results.find(kind="decode", backend=backend, **dataclasses.asdict(cell))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| routing | context | batch | tok/s | ms a step | % of SoL | vLLM | ratio | experts | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        fields = ("routing", "context", "batch", "tok_s", "ms_step", "sol_percent", "vllm_tok_s", "ratio")
        values = ["" if row[name] is None else str(row[name]) for name in fields]
        note = "" if row["counts"] else f"does not count: {row['expected_experts']} experts expected"
        lines.append("| " + " | ".join([*values, str(row["distinct_experts"]), note]) + " |")
    return "\n".join(lines)
