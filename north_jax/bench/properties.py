"""What must hold of the compiled decode whatever its numbers are: same bits, independent rows, honest draws.

    python -m north_jax.bench properties --out result.json

On the first layers of the model at full width: equal inputs give equal bits in many runs; a row's tokens and logits do
not depend on its neighbours, on its place in the batch, or on who joins, leaves and is cancelled; greedy rows take the
largest logit; draws are those of `sampling.sample` for their seeds, and follow the exact probabilities (chi-square).
Exits with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.decoding import DecodeRow, Finish, TokenRecord
from north_jax.kv_cache import PageTables
from north_jax.layers import Params
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.random_weights.weights import random_params, truncated
from north_jax.sampling import SamplingBatch, SamplingParams, sample

from .cache import CHUNK, RandomRows
from .draws import probabilities, surprise
from .options import add_common
from .record import Results

GREEDY = SamplingParams(temperature=0)
CONTEXTS = (1, 64, 300, 4097, 8192, 63, 4095, 1000)  # of the rows, cut to --context
DRAWS = {
    "all tokens": SamplingParams(temperature=1),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1, top_k=20),
    "top-p": SamplingParams(temperature=1, top_p=0.7),
    "min-p": SamplingParams(temperature=1.5, min_p=0.05),
    "all of them": SamplingParams(temperature=1.2, top_k=200, top_p=0.9, min_p=0.01),
}
_MOST_SURPRISE = 4.0
_DRAW_VOCABULARY = 2048  # several blocks of the draw, and still many draws a token


class Stage:
    """A decoder, and rows of a fixed past that it can be started from again and again."""

    def __init__(self, config: Config, params: Params, contexts: Sequence[int], room: int) -> None:
        self.contexts, self.room, self.vocabulary = contexts, room, config.vocab_size
        rows = RandomRows(config, rows=len(contexts), max_context=max(contexts) + room)
        self._cache = rows.cache(params["embed"].dtype)
        paged = rows.tables(list(contexts))
        for row, context in enumerate(contexts):
            paged.grow(row, context, context + room)
        self._tables: PageTables = paged.snapshot()
        self.decoder = MegakernelDecoder(config, params, slots=len(contexts), max_context=max(contexts) + room)
        self.decoder.compile(self._cache, self._tables)

    def row(self, slot: int, sampling: SamplingParams = GREEDY) -> DecodeRow:
        """A row as it begins."""
        token = int(np.random.default_rng(slot).integers(self.vocabulary))
        return DecodeRow(slot, token, self.contexts[slot], self.room, frozenset(), sampling)

    def run(
        self, rows: Sequence[DecodeRow], steps: int, after_step: Callable[[int], None] = lambda count: None
    ) -> dict[int, list[TokenRecord]]:
        """A quantum: slot → records."""
        records: dict[int, list[TokenRecord]] = {row.slot: [] for row in rows}
        count = 0

        def deliver(step: list[TokenRecord]) -> None:
            nonlocal count
            count += 1
            for record in step:
                records[record.slot].append(record)
            after_step(count)

        self._cache = self.decoder.decode(self._cache, self._tables, rows, steps, deliver)
        return records

    def logits(self) -> np.ndarray:
        """Those of the last step, by place in the batch."""
        return self.decoder.logits()

    def digest(self, place: int | slice = slice(None)) -> bytes:
        """Of the bits of the logits at a place, or at all."""
        return hashlib.sha256(self.logits()[place].tobytes()).digest()


def gone_on(row: DecodeRow, records: Sequence[TokenRecord]) -> DecodeRow:
    """A row after a quantum."""
    steps = len(records)
    return dataclasses.replace(
        row, token=records[-1].token, position=row.position + steps, remaining=row.remaining - steps
    )


def same_bits(stage: Stage, runs: int) -> dict[str, Any]:
    """Tokens and logits of `runs` equal quanta, of one row and of all."""
    different = 0
    for count in (1, len(stage.contexts)):
        rows = [stage.row(slot) for slot in range(count)]
        results = {(repr(stage.run(rows, 4)), stage.digest()) for _ in range(runs)}
        different += len(results) - 1
    return {"ok": different == 0, "runs": runs, "different": different}


def independent_rows(stage: Stage) -> dict[str, Any]:
    """Every row among other neighbours and at another place of a batch of the same size, for every size."""
    rng, different, compared = np.random.default_rng(0), [], 0
    slots = len(stage.contexts)
    for size in range(2, slots + 1):
        for slot in range(slots):
            seen = set()
            for place in {0, size - 1, int(rng.integers(size))}:
                others = rng.permutation([other for other in range(slots) if other != slot])[: size - 1].tolist()
                rows = [stage.row(other) for other in (*others[:place], slot, *others[place:])]
                tokens = [record.token for record in stage.run(rows, 3)[slot]]
                seen.add((tuple(tokens), stage.digest(place)))
            compared += 1
            if len(seen) > 1:
                different.append(f"slot {slot} in batches of {size}")
    return {"ok": not different, "compared": compared, "different": different[:5]}


def joining_and_leaving(stage: Stage, steps: int) -> dict[str, Any]:
    """Rows that go on while others come, go and are cancelled draw what they draw alone with the same batch size."""
    slots, quanta, cancellations = len(stage.contexts), stage.room // steps, 0
    size = slots // 2
    alone = {}
    for slot in range(slots):
        batch = [stage.row((slot + i) % slots) for i in range(size)]
        alone[slot] = stage.run(batch, quanta * steps)[slot]
    wrong = []
    rows = {slot: stage.row(slot) for slot in range(size)}
    history: dict[int, list[TokenRecord]] = {slot: [] for slot in rows}
    for quantum in range(quanta):
        cancelled = min(rows) if quantum % 2 else None

        def after_step(count: int, slot: int | None = cancelled) -> None:
            if slot is not None and count == 1:
                stage.decoder.cancel(slot)

        records = stage.run(list(rows.values()), steps, after_step)
        for slot, own in records.items():
            kept = [record for record in own if record.finish is Finish.NONE]
            history[slot] += kept
            cancellations += slot == cancelled and kept != own
            if kept != own and slot != cancelled:
                wrong.append(f"slot {slot} ended with {own[-1].finish.name} in quantum {quantum}")
            if kept:
                rows[slot] = gone_on(rows[slot], kept)
        leaving = min(rows)  # the cancelled one, or one whose request ended between quanta
        joining = next((slot for slot in range(slots) if slot not in history), None)
        if joining is None:
            break  # fewer rows would be another schedule, and other roundings
        del rows[leaving]
        rows[joining], history[joining] = stage.row(joining), []
    for slot, found in history.items():
        if found != alone[slot][: len(found)]:
            wrong.append(f"slot {slot}")
    return {"ok": not wrong, "rows": len(history), "cancelled": cancellations, "different": wrong[:5]}


def seeded_draws(stage: Stage) -> dict[str, Any]:
    """Draws are JAX's own from the same logits; a seed draws the same again, another one something else."""
    slots = len(stage.contexts)
    kinds = [GREEDY, *DRAWS.values()]
    wrong, different = [], 0
    for seed in (1, 2**40 + 3):
        rows = [
            stage.row(slot, dataclasses.replace(kinds[slot % len(kinds)], seed=seed + slot)) for slot in range(slots)
        ]
        drawn = [stage.run(rows, 1)[slot][0].token for slot in range(slots)]
        logits = stage.logits()
        positions = np.array([row.position + 1 for row in rows], np.int32)
        batch = SamplingBatch.of([row.sampling for row in rows])
        expected = np.asarray(sample(jnp.asarray(logits), batch, jnp.asarray(positions))).tolist()
        again = [stage.run(rows, 1)[slot][0].token for slot in range(slots)]
        for slot in range(slots):
            if not drawn[slot] == again[slot] == expected[slot]:
                wrong.append(f"slot {slot}, seed {seed + slot}: {drawn[slot]}, {again[slot]}, JAX {expected[slot]}")
            if rows[slot].sampling.temperature == 0 and drawn[slot] != int(logits[slot].argmax()):
                wrong.append(f"greedy slot {slot} drew {drawn[slot]}")
        others = [
            dataclasses.replace(row, sampling=dataclasses.replace(row.sampling, seed=seed + 100 + row.slot))
            for row in rows
        ]
        moved = stage.run(others, 1)
        different += sum(moved[slot][0].token != drawn[slot] for slot in range(slots))
    return {"ok": not wrong and different > 0, "different_seeds_differ": different, "wrong": wrong[:5]}


def honest_draws(stage: Stage, draws: int) -> dict[str, Any]:
    """Chi-square of the tokens that equal rows with different seeds draw."""
    slots = len(stage.contexts)
    token = stage.row(0).token
    surprises = {}
    for name, params in DRAWS.items():
        tokens: list[int] = []
        logits = np.zeros(0)
        for first in range(0, draws, slots):
            rows = [
                dataclasses.replace(
                    stage.row(slot), token=token, sampling=dataclasses.replace(params, seed=first + slot)
                )
                for slot in range(slots)
            ]
            tokens += [records[0].token for records in stage.run(rows, 1).values()]
            logits = stage.logits()
            if not (logits == logits[0]).all():
                return {"ok": False, "why": "equal rows have different logits"}
        surprises[name] = round(surprise(np.array(tokens), probabilities(logits[0], params)), 2)
    return {"ok": all(abs(s) < _MOST_SURPRISE for s in surprises.values()), "draws": draws, "surprise": surprises}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--layers", type=int, default=5, help="of the model (default: %(default)s)")
    parser.add_argument("--context", type=int, default=8192, help="of the longest row (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=100, help="that must give the same bits (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="between joining and leaving (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=8192, help="of each chi-square (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    whole = Config.from_json(options.config)
    kinds = {name: getattr(whole, name)[: options.layers] for name in ("layer_types", "mlp_layer_types")}
    config = dataclasses.replace(whole, num_hidden_layers=options.layers, **kinds)
    results = Results(options.out, ("kind", "check"))
    contexts = [min(context, options.context) for context in CONTEXTS]
    room = max(5 * options.steps, 4)  # rows join after each of the first quanta
    if room > CHUNK:
        raise SystemExit(f"--steps must be at most {CHUNK // 5}")
    params = random_params(config)
    stage = Stage(config, params, contexts, room)
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "same bits": lambda: same_bits(stage, options.runs),
        "independent rows": lambda: independent_rows(stage),
        "joining and leaving": lambda: joining_and_leaving(stage, options.steps),
        "seeded draws": lambda: seeded_draws(stage),
        "honest draws": lambda: honest_draws(_small_vocabulary(config, params), options.draws),
    }
    for name, check in checks.items():
        row = results.find(kind="property", check=name)
        if row is None:
            begun = time.perf_counter()
            found = check()
            seconds = round(time.perf_counter() - begun, 1)
            row = results.add({"kind": "property", "check": name} | found | {"seconds": seconds})
        print("  ".join(f"{key} {value}" for key, value in row.items() if key != "kind"), flush=True)
    sys.exit(not all(row["ok"] for row in results.of_kind("property")))


def _small_vocabulary(config: Config, params: Params) -> Stage:
    """A model of few tokens, and rows that hold nothing: equal rows have equal logits."""
    short, part = truncated(config, params, min(config.num_hidden_layers, 2))
    vocabulary = min(_DRAW_VOCABULARY, config.vocab_size)
    # Special tokens of the large one would lie outside.
    short = dataclasses.replace(short, vocab_size=vocabulary, bos_token_id=None, eos_token_id=(), pad_token_id=None)
    return Stage(short, part | {"embed": part["embed"][:vocabulary]}, [0] * len(CONTEXTS), 1)
