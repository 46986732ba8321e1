"""The device side of the engine: one donated KV cache, between packed prefill in a few sizes and the decoder."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.adjust import mask_words
from north_jax.config import Config
from north_jax.decoding import Decoder, Deliver, Draw, SlotSampler, TokenHistory
from north_jax.kv_cache import PageTables, init_cache, pages_for, ring_entries
from north_jax.layers import Array, Params, head
from north_jax.logprobs import Logprobs, TopLogprobs, top_logprobs
from north_jax.packed import PackedPrefill, Piece
from north_jax.sampling import SamplingParams

from .chunk_sizes import chosen
from .memory import CachePlan
from .work import DecodeWork, Prefilled, PrefillRow, PrefillWork

_REPORTED = 64  # positions whose logits are held at once; chunks are a multiple of it
_FIRST = 2  # sizes of prefill that are compiled before the first work
_MOST_WORKERS = 3  # that compile beside the running engine: lowering is Python's, one at a time, the rest XLA's


class Runner:
    """Runs the scheduler's work. One thread uses it."""

    def __init__(self, config: Config, params: Params, plan: CachePlan, decoder: Decoder) -> None:
        """Allocates the cache; `compile` must follow before the first work.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters".
          plan: the sizes of the cache and of the calls.
          decoder: of the same model, for plan.slots slots.
        """
        self._config = config
        self._params = params
        self._decoder = decoder
        self._slots, self._rows = plan.slots, plan.prefill_rows
        self._new_cache = partial(
            init_cache,
            config,
            full_pages=plan.full_pages,
            sliding_pages=plan.sliding_pages,
            dtype=params["embed"].dtype,
        )
        self._cache = self._new_cache()
        self._pages = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self._cache)
        entries = pages_for(plan.max_context), ring_entries(config, plan.max_context, plan.chunk)
        self._prefill = PackedPrefill(config, params, rows=plan.prefill_rows, most=plan.chunk, entries=entries)
        self._sizes = chosen(self._prefill.lengths, jax.devices()[0].platform)
        self._sampler = SlotSampler(plan.slots, config.vocab_size)

    def reset(self) -> None:
        """Allocates the cache anew, after a failed call consumed it."""
        self._cache = ()
        self._cache = self._new_cache()

    def compile(self, tables: PageTables) -> None:
        """Compiles what every request needs, several programs at a time; `tables` are those of all slots."""
        with ThreadPoolExecutor() as pool:
            compiling: list[Future[Array] | Future[None]] = [
                pool.submit(self._decoder.compile, self._cache, tables),
                pool.submit(self._sampler.compile),
            ]
            compiling.append(pool.submit(self._logits_of_slots, jnp.zeros((self._rows, self._config.vocab_size)), []))
            for shape in self._sizes[:_FIRST]:
                compiling.append(pool.submit(self._prefill.compile, shape, self._pages))
        for program in compiling:
            program.result()

    @property
    def sizes(self) -> frozenset[int]:
        """Sizes of prefill that are compiled."""
        return self._prefill.compiled

    @property
    def all_sizes(self) -> int:
        """How many sizes will be compiled after `warm_up`."""
        return len(self._sizes)

    def size_of(self, work: PrefillWork) -> int:
        """The size that a prefill will run in."""
        return self._prefill.shape_of(_pieces(work))

    def device_memory(self) -> tuple[int, int, int] | None:
        """Bytes that this process may use on its device, uses, and used at most; None where the device keeps none."""
        stats = jax.devices()[0].memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return stats["bytes_limit"], stats["bytes_in_use"], stats.get("peak_bytes_in_use", stats["bytes_in_use"])

    def warm_up(self, moment: Callable[[], bool]) -> None:
        """Compiles the draws with penalties, a bias, log-probabilities or a grammar, and the other sizes of prefill.

        Beside the running engine, in any thread: prefills run in the next larger size meanwhile, and the draws have a
        sampler of their own, whose compiled code is shared.

        Args:
          moment: called before each program; waits for a good moment to compile, or ends the warm-up by False.
        """

        def compile(job: Callable[[], object]) -> None:
            if moment():
                job()

        workers = min(max((os.cpu_count() or 1) // 4, 1), _MOST_WORKERS)
        with ThreadPoolExecutor(workers, thread_name_prefix="compile") as pool:
            jobs: list[Callable[[], object]] = self._draws()
            jobs += [partial(self._prefill.compile, size, self._pages) for size in self._sizes]
            for done in [pool.submit(compile, job) for job in jobs]:
                done.result()

    def _draws(self) -> list[Callable[[], object]]:
        """One draw of every kind that is compiled by itself."""
        everything = np.full(mask_words(self._config.vocab_size), 0xFFFFFFFF, np.uint32)
        plain = SamplingParams(temperature=0)
        kinds = (
            Draw(0, plain, grammar=_Anything(everything)),
            Draw(0, replace(plain, logprobs=0)),
            Draw(0, replace(plain, presence_penalty=1.0), TokenHistory([0])),
            Draw(0, replace(plain, logit_bias=((0, 1.0),))),
        )

        def draw(kind: Draw) -> None:
            logits = jnp.zeros((self._slots, self._config.vocab_size), jnp.float32)
            SlotSampler(self._slots, self._config.vocab_size).draw(logits, {0: kind})

        return [partial(draw, kind) for kind in kinds]

    def prefill(self, work: PrefillWork, tables: PageTables) -> Prefilled:
        """Appends chunks of prompts, in one device call, and draws for those that end with it.

        Args:
          work: from the scheduler.
          tables: its page tables, [slots, entries].

        Returns:
          what was drawn, and what is to be reported.
        """
        slots = [row.slot for row in work.rows]
        of_rows = PageTables(tables.full[slots], tables.sliding[slots])
        pieces = _pieces(work)
        reported: dict[int, list[Logprobs]] = {}
        if work.rows[0].following is None:
            self._cache, logits = self._prefill.run(self._cache, of_rows, pieces)
        else:
            self._cache, x, logits = self._prefill.run_whole(self._cache, of_rows, pieces)
            reported[work.rows[0].slot] = self._report(work.rows[0], x)
        logits = self._logits_of_slots(logits, slots)
        draws = {row.slot: row.draw for row in work.rows if row.draw is not None}
        return Prefilled(self._sampler.draw(logits, draws) if draws else {}, reported)

    def _logits_of_slots(self, logits: Array, slots: list[int]) -> Array:
        """Logits [N, V] of the first rows' slots, at their places among all slots."""
        owners = np.full(logits.shape[0], self._slots, np.int32)  # a row without a piece belongs to no slot
        owners[: len(slots)] = slots
        return _of_slots(logits, owners, slots=self._slots)

    def _report(self, row: PrefillRow, x: Array) -> list[Logprobs]:
        """Log-probabilities of the tokens that follow each position; compiled when it is first asked for."""
        assert row.following is not None
        following = np.zeros(x.shape[0], np.int32)
        following[: len(row.following)] = row.following
        ends = {name: self._params[name] for name in ("embed", "final_norm")}
        chosen, tokens, values = map(np.asarray, _top_logprobs(self._config, ends, x, following))
        count = row.alternatives
        return [Logprobs.of(chosen[i], tokens[i][:count], values[i][:count]) for i in range(len(row.following))]

    def decode(self, work: DecodeWork, tables: PageTables, deliver: Deliver) -> None:
        """Runs a quantum of decode steps; see `north_jax.decoding.Decoder.decode`."""
        self._cache = self._decoder.decode(self._cache, tables, work.rows, work.steps, deliver)


def _pieces(work: PrefillWork) -> list[Piece]:
    return [Piece(row.tokens, row.start) for row in work.rows]


class _Anything:
    """A grammar that allows every token."""

    def __init__(self, mask: np.ndarray) -> None:
        self._mask = mask

    def mask(self) -> np.ndarray:
        return self._mask

    def accept(self, token: int) -> None:
        pass


@partial(jax.jit, static_argnames="slots")
def _of_slots(logits: Array, slot: Array, *, slots: int) -> Array:
    """Logits [N, V] in the rows of their slots: [slots, V]; a row of padding has slot = slots."""
    return jnp.zeros((slots, logits.shape[-1])).at[slot].set(logits, mode="drop")


@partial(jax.jit, static_argnums=0)
def _top_logprobs(config: Config, ends: Params, x: Array, following: Array) -> TopLogprobs:
    """Of the tokens that follow each position: x [T, D], following [T] int32. A part of the positions at a time."""

    def part(x: tuple[Array, Array]) -> TopLogprobs:
        return top_logprobs(head(config, ends, x[0]), x[1])

    parts = jax.lax.map(part, (x.reshape(-1, _REPORTED, x.shape[-1]), following.reshape(-1, _REPORTED)))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), parts)
