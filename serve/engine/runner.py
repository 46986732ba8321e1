"""The device side of the engine: one donated KV cache, between prefill in a few compiled shapes and the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.adjust import mask_words
from north_jax.config import Config
from north_jax.decoding import Decoder, Deliver, Draw, SlotSampler, TokenHistory
from north_jax.inference import extend, prefill
from north_jax.kv_cache import KVCache, PageTables, init_cache
from north_jax.layers import Array, Params, head
from north_jax.logprobs import Logprobs, TopLogprobs, top_logprobs
from north_jax.sampling import SamplingParams

from .memory import CachePlan
from .work import DecodeWork, Prefilled, PrefillRow, PrefillWork

_SHORT = 64  # tokens a row of the smaller prefill shape


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
        self._row_shapes = sorted({1, plan.prefill_rows})
        self._length_shapes = sorted({min(_SHORT, plan.chunk), plan.chunk})
        self._new_cache = partial(
            init_cache,
            config,
            full_pages=plan.full_pages,
            sliding_pages=plan.sliding_pages,
            dtype=params["embed"].dtype,
        )
        self._cache = self._new_cache()
        self._prefills: dict[tuple[int, int], jax.stages.Compiled] = {}  # by rows and length
        self._sampler = SlotSampler(plan.slots, config.vocab_size)

    def reset(self) -> None:
        """Allocates the cache anew, after a failed call consumed it."""
        self._cache = ()
        self._cache = self._new_cache()

    def compile(self, tables: PageTables) -> None:
        """Compiles every shape, several at a time; `tables` are those of all slots."""
        with ThreadPoolExecutor() as pool:
            decoder = pool.submit(self._decoder.compile, self._cache, tables)
            sampler = pool.submit(self._sampler.compile)
            prefills = {}
            for rows in self._row_shapes:
                of_rows = PageTables(tables.full[[0] * rows], tables.sliding[[0] * rows])
                row = np.zeros(rows, np.int32)
                for length in self._length_shapes:
                    tokens = np.zeros((rows, length), np.int32)
                    arguments = (self._config, self._params, self._cache, of_rows, tokens, row, row, row)
                    prefills[rows, length] = pool.submit(_prefill.lower(*arguments, slots=self._slots).compile)
        decoder.result()
        sampler.result()
        self._prefills = {shape: compiled.result() for shape, compiled in prefills.items()}

    def warm_up(self, stopped: Callable[[], bool]) -> None:
        """Compiles the draws with penalties, a bias, log-probabilities or a grammar, each alone; ends early if told so.

        Beside the running engine, in any thread: it has a sampler of its own, and the compiled code is shared.
        """
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
        rows = _smallest(self._row_shapes, len(work.rows))
        length = _smallest(self._length_shapes, max(len(row.tokens) for row in work.rows))
        tokens = np.zeros((rows, length), np.int32)
        # A row of padding has length 0 and belongs to no slot.
        slots, starts = np.full(rows, self._slots, np.int32), np.zeros(rows, np.int32)
        lengths = np.zeros(rows, np.int32)
        for i, row in enumerate(work.rows):
            tokens[i, : len(row.tokens)] = row.tokens
            slots[i], starts[i], lengths[i] = row.slot, row.start, len(row.tokens)
        owned = np.minimum(slots, self._slots - 1)
        of_rows = PageTables(tables.full[owned], tables.sliding[owned])
        arguments = (self._params, self._cache, of_rows, tokens, starts, lengths, slots)
        reported: dict[int, list[Logprobs]] = {}
        if (following := work.rows[0].following) is None:
            self._cache, logits = self._prefills[rows, length](*arguments)
        else:
            padded = np.zeros(length, np.int32)
            padded[: len(following)] = following
            call = partial(_prefill_and_report, slots=self._slots)  # rare: compiled when it is first asked for
            self._cache, logits, top = call(self._config, *arguments, padded)
            reported[work.rows[0].slot] = _reports(work.rows[0], top)
        draws = {row.slot: row.draw for row in work.rows if row.draw is not None}
        return Prefilled(self._sampler.draw(logits, draws) if draws else {}, reported)

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


def _of_slots(logits: Array, slot: Array, slots: int) -> Array:
    """Logits [N, V] in the rows of their slots: [slots, V]; a row of padding has slot = slots."""
    return jnp.zeros((slots, logits.shape[-1])).at[slot].set(logits, mode="drop")


# Of the module, so that engines of one model compile it once.
@partial(jax.jit, static_argnames=("config", "slots"), donate_argnames="cache")
def _prefill(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: Array,
    length: Array,
    slot: Array,
    *,
    slots: int,
) -> tuple[KVCache, Array]:
    """`prefill`, its logits put into the rows of their slots."""
    cache, logits = prefill(config, params, cache, tables, tokens, start, length)
    return cache, _of_slots(logits, slot, slots)


@partial(jax.jit, static_argnames=("config", "slots"), donate_argnames="cache")
def _prefill_and_report(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: Array,
    length: Array,
    slot: Array,
    following: Array,
    *,
    slots: int,
) -> tuple[KVCache, Array, TopLogprobs]:
    """`_prefill` of one row [1, T], and the log-probabilities of the tokens that follow each position: [T] int32."""
    cache, x = extend(config, params, cache, tables, tokens, start, length)
    logits = head(config, params, x[0])  # [T, V]
    last = jax.lax.dynamic_index_in_dim(logits, jnp.maximum(length[0] - 1, 0))  # [1, V]
    return cache, _of_slots(last, slot, slots), top_logprobs(logits, following)


def _reports(row: PrefillRow, top: TopLogprobs) -> list[Logprobs]:
    assert row.following is not None
    chosen, tokens, values = map(np.asarray, top)
    count = row.alternatives
    return [Logprobs.of(chosen[i], tokens[i][:count], values[i][:count]) for i in range(len(row.following))]


def _smallest(shapes: Sequence[int], size: int) -> int:
    """The smallest compiled shape that holds `size`."""
    return next(shape for shape in shapes if shape >= size)
