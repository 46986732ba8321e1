"""The device side of the engine: one donated KV cache, between packed prefill in a few sizes and the decoder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

from .memory import CachePlan
from .work import DecodeWork, Prefilled, PrefillRow, PrefillWork

_REPORTED = 64  # positions whose logits are held at once; chunks are a multiple of it


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
        self._slots = plan.slots
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
        self._sampler = SlotSampler(plan.slots, config.vocab_size)

    def reset(self) -> None:
        """Allocates the cache anew, after a failed call consumed it."""
        self._cache = ()
        self._cache = self._new_cache()

    def compile(self, tables: PageTables) -> None:
        """Compiles what every request needs, several programs at a time; `tables` are those of all slots."""
        with ThreadPoolExecutor() as pool:
            compiling = [pool.submit(self._decoder.compile, self._cache, tables), pool.submit(self._sampler.compile)]
            for shape in self._prefill.needed:
                compiling.append(pool.submit(self._prefill.compile, shape, self._pages))
        for program in compiling:
            program.result()

    @property
    def prefill_shapes(self) -> tuple[int, int]:
        """Prefill shapes that are compiled, and all that `warm_up` compiles."""
        return len(self._prefill.compiled), len(self._prefill.shapes)

    def device_memory(self) -> tuple[int, int, int] | None:
        """Bytes that this process may use on its device, uses, and used at most; None where the device keeps none."""
        stats = jax.devices()[0].memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return stats["bytes_limit"], stats["bytes_in_use"], stats.get("peak_bytes_in_use", stats["bytes_in_use"])

    def warm_up(self, stopped: Callable[[], bool]) -> None:
        """Compiles the other sizes of prefill, and the draws with penalties, a bias, log-probabilities or a grammar.

        Ends early if told so. Beside the running engine, in any thread: prefills run in the next larger size
        meanwhile, and the draws have a sampler of their own, whose compiled code is shared.
        """
        for shape in self._prefill.shapes:
            if stopped():
                return
            self._prefill.compile(shape, self._pages)
        logits = jnp.zeros((self._slots, self._config.vocab_size), jnp.float32)
        everything = np.full(mask_words(self._config.vocab_size), 0xFFFFFFFF, np.uint32)
        plain = SamplingParams(temperature=0)
        for draw in (
            Draw(0, plain, grammar=_Anything(everything)),
            Draw(0, replace(plain, logprobs=0)),
            Draw(0, replace(plain, presence_penalty=1.0), TokenHistory([0])),
            Draw(0, replace(plain, logit_bias=((0, 1.0),))),
        ):
            if stopped():
                return
            SlotSampler(self._slots, self._config.vocab_size).draw(logits, {0: draw})

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
        pieces = [Piece(row.tokens, row.start) for row in work.rows]
        reported: dict[int, list[Logprobs]] = {}
        if work.rows[0].following is None:
            self._cache, logits = self._prefill.run(self._cache, of_rows, pieces)
        else:
            self._cache, x, logits = self._prefill.run_whole(self._cache, of_rows, pieces)
            reported[work.rows[0].slot] = self._report(work.rows[0], x)
        owners = np.full(logits.shape[0], self._slots, np.int32)  # a row without a piece belongs to no slot
        owners[: len(slots)] = slots
        logits = _of_slots(logits, owners, slots=self._slots)
        draws = {row.slot: row.draw for row in work.rows if row.draw is not None}
        return Prefilled(self._sampler.draw(logits, draws) if draws else {}, reported)

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
