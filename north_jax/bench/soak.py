"""A long run of the compiled decode under changing batches, and answers decoded again to compare.

    python -m north_jax.bench soak --out result.json

Requests of random lengths, draws and stop tokens join and leave eight slots; some are cancelled and quanta are stopped
while they run, from the thread that takes the tokens. Counters of each quantum begin at --counter-origin, just below
their wrap-around. After each part, some answers are decoded again: among strangers in batches of the same sizes, which
must give the same tokens, and alone, which is reported. A part that is in the file is not run again. Exits with 1 if an
answer differs or a page is lost.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from north_jax.config import Config
from north_jax.decoding import DecodeRow, Finish, TokenRecord
from north_jax.kv_cache import KVCache, PagedRows
from north_jax.layers import Params
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.random_weights.weights import random_params
from north_jax.sampling import SamplingParams

from .cache import RandomRows
from .options import add_common
from .record import Results

SLOTS = 8
MOST_STEPS = 64  # of a quantum
ORIGIN = 0xFFFFFFFF - 1000


@dataclasses.dataclass
class Request:
    """A request, what it drew so far, and in what company.

    Attributes:
      row: as it begins: an empty row at position 0, of slot 0.
      drawn: its tokens.
      quanta: (rows of the batch, tokens drawn) of each quantum that it was in.
      finish: NONE while it goes on.
    """

    row: DecodeRow
    drawn: list[int] = dataclasses.field(default_factory=list)
    quanta: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    finish: Finish = Finish.NONE

    def at(self, slot: int) -> DecodeRow:
        """Where it goes on, in a slot."""
        token = self.drawn[-1] if self.drawn else self.row.token
        drawn = len(self.drawn)
        return dataclasses.replace(
            self.row, slot=slot, token=token, position=drawn, remaining=self.row.remaining - drawn
        )


class Soak:
    """A decoder and its slots."""

    def __init__(self, config: Config, params: Params, *, most_tokens: int, origin: int) -> None:
        self._vocabulary, self._most_tokens = config.vocab_size, most_tokens
        max_context = most_tokens + MOST_STEPS
        self._rows = RandomRows(config, rows=SLOTS, max_context=max_context)
        self._paged: PagedRows = self._rows.tables([])
        self._cache: KVCache = self._rows.cache(params["embed"].dtype)
        self.free = self._paged.free
        self.decoder = MegakernelDecoder(config, params, slots=SLOTS, max_context=max_context, counter_origin=origin)
        self.decoder.compile(self._cache, self._paged.snapshot())

    def part(self, seed: int, steps: int, replays: int) -> dict[str, Any]:
        """Runs about `steps` steps of requests, until the last one has ended, then replays some of them."""
        rng = np.random.default_rng(seed)
        live: dict[int, Request] = {}
        ended: list[Request] = []
        done = quanta = stops = 0
        begun = time.perf_counter()
        while done < steps or live:
            for slot in range(SLOTS):
                if done < steps and slot not in live and rng.random() < 0.3:
                    live[slot] = self._request(rng)
            if not live:
                continue
            stop = int(rng.integers(1, MOST_STEPS)) if rng.random() < 0.2 else None
            cancel = int(rng.choice(list(live))) if rng.random() < 0.1 else None
            length = int(rng.integers(1, MOST_STEPS + 1))
            done += self._quantum(live, rng, length, stop, cancel)
            quanta, stops = quanta + 1, stops + (stop is not None)
            for slot in [slot for slot, request in live.items() if request.finish is not Finish.NONE]:
                ended.append(live.pop(slot))
                self._paged.release(slot)
        seconds = time.perf_counter() - begun
        lost = self._paged.free != self.free
        finished = Counter(request.finish for request in ended)
        answered = [request for request in ended if request.drawn]
        picked = rng.permutation(len(answered))[:replays]
        among, alone = (
            sum(self._replay(answered[number], rng, strangers) == answered[number].drawn for number in picked)
            for strangers in (True, False)
        )
        return {
            "ok": not lost and among == len(picked) and not finished[Finish.ERROR],
            "steps": done,
            "quanta": quanta,
            "stops": stops,
            "requests": len(ended),
            "tokens": sum(len(request.drawn) for request in ended),
            "finished": {finish.name: count for finish, count in finished.items()},
            "replayed": len(picked),
            "same_among_strangers": among,
            "same_alone": alone,
            "pages_lost": lost,
            "seconds": round(seconds, 1),
            "steps_s": round(done / seconds, 1),
            "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }

    def _request(self, rng: np.random.Generator) -> Request:
        tokens = rng.integers(0, self._vocabulary, 1 + int(rng.integers(4)))
        length = max(1, int(self._most_tokens * rng.random() ** 3))  # many short ones, some long
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([0, 0, 40])),
            top_p=float(rng.choice([1.0, 1.0, 0.9])),
            min_p=float(rng.choice([0.0, 0.0, 0.02])),
            seed=int(rng.integers(2**63)),
        )
        return Request(DecodeRow(0, int(tokens[0]), 0, length, frozenset(map(int, tokens[1:])), sampling))

    def _quantum(
        self, live: dict[int, Request], rng: np.random.Generator, steps: int, stop: int | None, cancel: int | None
    ) -> int:
        """Steps that ran."""
        slots = rng.permutation(list(live)).tolist()
        rows = [live[slot].at(slot) for slot in slots]
        before = {slot: len(live[slot].drawn) for slot in slots}
        count = 0

        def deliver(records: list[TokenRecord]) -> None:
            nonlocal count
            count += 1
            for record in records:
                request = live[record.slot]
                request.finish = record.finish
                if record.finish is not Finish.CANCELLED:
                    request.drawn.append(record.token)
            if cancel is not None:
                self.decoder.cancel(cancel)
            if stop is not None and count >= stop:
                self.decoder.stop()

        self._decode(rows, steps, deliver)
        for slot in slots:
            if drawn := len(live[slot].drawn) - before[slot]:
                live[slot].quanta.append((len(slots), drawn))
        return count

    def _decode(self, rows: list[DecodeRow], steps: int, deliver: Any) -> None:
        for row in rows:
            self._paged.grow(row.slot, row.position, row.position + min(steps, row.remaining))
        self._cache = self.decoder.decode(self._cache, self._paged.snapshot(), rows, steps, deliver)

    def _replay(self, request: Request, rng: np.random.Generator, strangers: bool) -> list[int]:
        """What the request draws in slot 0, in quanta of the same lengths."""
        again = Request(request.row)
        for size, steps in request.quanta:
            others = [self._request(rng).at(slot) for slot in range(1, size if strangers else 1)]
            rows = [again.at(0), *others]

            def deliver(records: list[TokenRecord]) -> None:
                again.drawn.extend(record.token for record in records if record.slot == 0)

            self._decode(rng.permutation(np.array(rows, object)).tolist(), steps, deliver)
            for other in others:
                self._paged.release(other.slot)
        self._paged.release(0)
        return again.drawn


def soak_config(config: Config, layers: int, window: int) -> Config:
    """The first layers of a model, with a window that answers outgrow."""
    kinds = {name: getattr(config, name)[:layers] for name in ("layer_types", "mlp_layer_types")}
    vocabulary = min(config.vocab_size, 8192)
    return dataclasses.replace(
        config, num_hidden_layers=layers, vocab_size=vocabulary, sliding_window=window, eos_token_id=(), **kinds
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--layers", type=int, default=5, help="of the model (default: %(default)s)")
    parser.add_argument("--window", type=int, default=300, help="of sliding layers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100_000, help="of all parts (default: %(default)s)")
    parser.add_argument("--parts", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--replays", type=int, default=100, help="of all parts (default: %(default)s)")
    parser.add_argument("--most-tokens", type=int, default=1500, help="of an answer (default: %(default)s)")
    parser.add_argument("--counter-origin", type=int, default=ORIGIN, help="(default: 0xFFFFFFFF - 1000)")


def run(options: argparse.Namespace) -> None:
    config = soak_config(Config.from_json(options.config), options.layers, options.window)
    results = Results(options.out, ("kind", "part"))
    soak: Soak | None = None
    for part in range(options.parts):
        row = results.find(kind="soak", part=part)
        if row is None:
            if soak is None:
                soak = Soak(
                    config, random_params(config), most_tokens=options.most_tokens, origin=options.counter_origin
                )
            found = soak.part(part, options.steps // options.parts, -(-options.replays // options.parts))
            row = results.add({"kind": "soak", "part": part} | found)
        print("  ".join(f"{name} {value}" for name, value in row.items() if name != "kind"), flush=True)
    rows = results.of_kind("soak")
    total = {name: sum(row[name] for row in rows) for name in ("steps", "tokens", "requests", "replayed")}
    print("all parts: " + "  ".join(f"{name} {value}" for name, value in total.items()))
    sys.exit(not all(row["ok"] for row in rows))
