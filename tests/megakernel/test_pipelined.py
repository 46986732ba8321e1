"""The pipelined kernel's shapes: which schedules it runs, and that bfloat16 is as near to float32 as JAX's own.

The numbers come from what the platform has: the CPU executor, or the pipelined kernel on a GPU.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params
from support.quantum import Quanta, start

import ffi
from north_jax.config import Config
from north_jax.decoding.types import Finish
from north_jax.geometries import NORTH
from north_jax.inference import decode_step
from north_jax.megakernel import binding
from north_jax.megakernel.abi import Buffer, Field, Opcode, Weight
from north_jax.megakernel.build import build
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.megakernel.orders import TUNED, router_first, streamed
from north_jax.megakernel.schedule import Schedule
from north_jax.megakernel.selection import choices, select

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "")
pytestmark = pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))
native = pytest.importorskip("ffi._native") if ffi.available(PLATFORM) else None

WINDOW = 70  # of tiny_config
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 128,
    "prefix_dense_intermediate_size": 512,  # four slices of 128
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 1031,
}
VARIANTS = {
    "north": {},
    "wide": {"hidden_size": 1152, "intermediate_size": 384, "prefix_dense_intermediate_size": 1536},
    "one KV head": {"num_key_value_heads": 1},
    "softmax": {"expert_selection_fn": "softmax"},
    "renormalised": {"norm_topk_prob": True},
    "layer norm": {"rms_norm_eps": None, "layer_norm_eps": 1e-5},
}
POSITIONS = (130, 0, WINDOW - 1, 63, WINDOW, 64, 1, WINDOW - 2)
step = jax.jit(decode_step, static_argnums=0)


def reasons(
    config: Config, *, batch: int, dtype: str = "bfloat16", changed=lambda schedule: schedule, **options
) -> str:
    """Why the pipelined kernel would not run a schedule; weights are addresses that nobody reads."""
    assert native is not None
    params = jax.eval_shape(lambda: tiny_params(config))
    shapes = {number: array.shape for number, (_, array) in binding._weights(config, params)}
    numbers = range((config.num_hidden_layers + 1) * len(Weight))
    engine = native.DecodeEngine(
        platform="cpu",
        dtype=dtype,
        geometry=binding._geometry(config),
        weights=[(64, math.prod(shapes[n][:-1]), shapes[n][-1]) if n in shapes else (0, 0, 0) for n in numbers],
        frequencies=[0.0] * (config.head_dim // 2),
        owner=config,
    )
    schedule = changed(build(config, batch=batch, dtype=dtype, **{"sms": 128} | options))
    return engine.not_pipelined(binding.add_schedule(engine, schedule))


@pytest.mark.parametrize("batch", range(1, 9))
def test_runs_north_mini_code(batch):
    config = Config.from_json(NORTH)
    config = dataclasses.replace(
        config, num_hidden_layers=6, layer_types=config.layer_types[:6], mlp_layer_types=config.mlp_layer_types[:6]
    )
    for _, order in choices(batch):
        assert reasons(config, batch=batch, order=order) == ""


@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_the_models_of_these_tests(variant):
    config = tiny_config(**SIZES | VARIANTS[variant], num_hidden_layers=2)
    for batch in (1, 2, 4, 8):
        for _, order in choices(batch):
            assert reasons(config, batch=batch, order=order, sms=8) == ""


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {"dtype": "float32"}, "weights other than bfloat16"),
        ({}, {"batch": 16}, "more than 8 rows"),
        ({}, {"order": TUNED}, "the operation ATTN_DRAIN"),
        ({"head_dim": 64}, {}, "a head of other than 128 values"),
        ({"num_attention_heads": 16, "num_key_value_heads": 1}, {}, "more than 8 query heads a KV head"),
        ({"hidden_size": 192}, {}, "a hidden size that is no multiple of 128 up to 2048"),
        ({"intermediate_size": 96}, {}, "experts whose width is no multiple of 128 up to 1024"),
        ({"num_experts": 256}, {}, "more than 128 experts"),
        ({"num_experts": 18}, {}, "a number of experts that is no multiple of 4"),
    ],
)
def test_says_what_it_does_not_run(changes, options, reason):
    config = tiny_config(**SIZES | changes)
    batch = {"batch": 2, "sms": 4} | options
    assert reasons(config, **batch) == reason


def test_the_head_is_the_last_product():
    """Then nobody reads the step's parameters when the next step's are written."""

    def head_first(schedule: Schedule) -> Schedule:
        tasks = np.array(schedule.tasks)
        first, last = schedule.begin[0], schedule.begin[1]
        own = tasks[first:last, Field.OPCODE]
        head, product = np.flatnonzero(own == Opcode.LM_HEAD)[0], np.flatnonzero(own == Opcode.MOE_DOWN)[-1]
        tasks[[first + head, first + product]] = tasks[[first + product, first + head]]
        tasks[:, Field.TASK] = schedule.tasks[:, Field.TASK]
        return dataclasses.replace(schedule, tasks=tasks)

    config = tiny_config(**SIZES)
    assert reasons(config, batch=2, sms=4, changed=head_first) == "a product after LM_HEAD"


def test_an_input_is_either_normed_or_copied():
    """Threads' writes and copies to one place would need a fence between."""

    def copies_the_last(schedule: Schedule) -> Schedule:
        tasks = np.array(schedule.tasks)
        tasks[tasks[:, Field.OPCODE] == Opcode.LM_HEAD, Field.INPUT] = Buffer.HIDDEN
        return dataclasses.replace(schedule, tasks=tasks)

    config = tiny_config(**SIZES)
    order = dataclasses.replace(select(1, 1), local_norm=True)
    reason = reasons(config, batch=1, sms=4, order=order, changed=copies_the_last)
    assert reason == "an SM that norms its input and copies it too"


@pytest.mark.slow  # on a CPU: half a minute each
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [(130, None, 64, WINDOW), POSITIONS, (330, 0, 1)])
def test_bfloat16_is_as_near_to_float32_as_jax(variant, rows):
    config = tiny_config(**SIZES | VARIANTS[variant], num_hidden_layers=2)
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_params(config, seed=1))
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), rounded)
    batch = start(config, rows, room=4, seed=2, dtype=jnp.bfloat16)
    decoder = MegakernelDecoder(config, rounded, slots=batch.slots, max_context=batch.max_context, sms=8)
    decoder.compile(batch.cache(), batch.tables)
    if PLATFORM == "cuda":
        assert decoder.not_pipelined() == {}
    Quanta(decoder, batch).run(1)

    live = np.zeros(batch.slots, bool)
    tokens, lengths = np.zeros((2, batch.slots), np.int32)
    for row in batch.rows:
        live[row.slot], tokens[row.slot], lengths[row.slot] = True, row.token, row.position
    cache32 = tuple(pages.astype(jnp.float32) for pages in batch.cache())
    expected = step(config, exact, cache32, batch.tables, tokens, lengths, live)[1]
    theirs = step(config, rounded, batch.cache(), batch.tables, tokens, lengths, live)[1]

    def error(logits: np.ndarray) -> np.ndarray:
        difference = np.asarray(logits, np.float32) - np.asarray(expected)[live]
        return np.linalg.norm(difference, axis=1) / np.linalg.norm(np.asarray(expected)[live], axis=1)

    # By median: a router's choice between nearly equal experts may tip in either.
    assert np.median(error(decoder.logits())) <= 1.1 * np.median(error(np.asarray(theirs)[live]))


def test_one_batch_gives_the_same_bits_again():
    config = tiny_config(**SIZES, num_hidden_layers=2)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_params(config, seed=1))
    batch = start(config, (130, 0, WINDOW), room=8, seed=2, dtype=jnp.bfloat16)
    order = router_first(streamed(0))
    decoder = MegakernelDecoder(config, params, slots=batch.slots, max_context=batch.max_context, sms=8, order=order)
    decoder.compile(batch.cache(), batch.tables)
    results = set()
    for _ in range(10 if PLATFORM == "cuda" else 3):
        run = Quanta(decoder, batch).run(4)
        results.add((str(run.steps), decoder.logits().tobytes(), *(np.asarray(pages).tobytes() for pages in run.cache)))
    assert len(results) == 1


def test_counters_may_wrap():
    config = tiny_config(**SIZES, num_hidden_layers=2)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_params(config, seed=1))
    batch = start(config, (130, 0, WINDOW), room=8, seed=2, dtype=jnp.bfloat16)
    results = set()
    for origin in (0, 2**32 - 3, 2**31 - 1):
        decoder = MegakernelDecoder(
            config, params, slots=batch.slots, max_context=batch.max_context, sms=8, counter_origin=origin
        )
        decoder.compile(batch.cache(), batch.tables)
        if PLATFORM == "cuda":
            assert decoder.not_pipelined() == {}
        run = Quanta(decoder, batch).run(3)
        results.add((str(run.steps), decoder.logits().tobytes(), *(np.asarray(pages).tobytes() for pages in run.cache)))
    assert len(results) == 1


@pytest.mark.slow  # on a CPU
@pytest.mark.parametrize("ending", [0, 1, 3])
def test_rows_that_end_leave_the_others_alone(ending):
    """Whichever row ends first, and with an idle one between: tokens and finishes of the others stay what they were."""
    config = tiny_config(**SIZES, num_hidden_layers=2)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_params(config, seed=1))
    batch = start(config, (130, 0, None, WINDOW, 64), room=4, seed=2, dtype=jnp.bfloat16)
    decoder = MegakernelDecoder(config, params, slots=batch.slots, max_context=batch.max_context, sms=8)
    decoder.compile(batch.cache(), batch.tables)
    whole = Quanta(decoder, batch).run(4)
    rows = [dataclasses.replace(row, remaining=1 if row.slot == ending else 4) for row in batch.rows]
    shorter = Quanta(decoder, batch).run(4, rows)
    for row in rows:
        expected, found = whole.of(row.slot), shorter.of(row.slot)
        assert [record.token for record in found] == [record.token for record in expected[: row.remaining]]
        assert [record.finish for record in found] == [Finish.NONE] * (row.remaining - 1) + [Finish.LENGTH]
