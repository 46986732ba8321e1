"""The builder: waves in the order that was asked for, dealt evenly, and refusals in words."""

from __future__ import annotations

import dataclasses
import itertools
import secrets

import numpy as np
import pytest
from support import tiny_config

from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.megakernel.abi import OPERATIONS, Buffer, Field, Lane, Opcode
from north_jax.megakernel.build import BATCHES, build
from north_jax.megakernel.checker import instances
from north_jax.megakernel.division import attention_items, dealt, routes
from north_jax.megakernel.orders import ORDERS, TUNED, streamed
from north_jax.megakernel.tasks import qkv_rows

F, Op = Field, Opcode
REAL = Config.from_json(NORTH)
SHORT = dataclasses.replace(  # of its 49 layers the first ones: each kind
    REAL, num_hidden_layers=6, layer_types=REAL.layer_types[:6], mlp_layer_types=REAL.mlp_layer_types[:6]
)
OPCODES = {
    "norm": (Op.ADD_RMSNORM,),
    "qkv": (Op.QKV_PROJ,),
    "router": (Op.ROUTER_GEMM,),
    "topk": (Op.ROUTER_TOPK,),
    "finalize": (Op.ROUTE_FINALIZE,),
    "gather": (Op.MOE_GATHER,),
    "attention": (Op.ATTN_DECODE, Op.ATTN_DRAIN),
    "combine": (Op.ATTN_COMBINE,),
    "up": (Op.FFN_UPGATE_ACT, Op.MOE_UPGATE_ACT, Op.MOE_UPGATE_ACT_DRAIN),
    "down": (Op.FFN_DOWN, Op.MOE_DOWN, Op.MOE_DOWN_DRAIN),
    "moe_combine": (Op.MOE_COMBINE,),
    "o_proj": (Op.O_PROJ,),
}
ON_EVERY_SM = {Op.ATTN_DECODE, Op.ATTN_DRAIN, Op.MOE_UPGATE_ACT, Op.MOE_UPGATE_ACT_DRAIN, Op.MOE_DOWN_DRAIN}
ROUTING = ["ADD_RMSNORM", "QKV_PROJ", "ROUTER_GEMM", "ROUTER_TOPK", "ROUTE_FINALIZE", "MOE_GATHER"]
# Of an MoE layer that attends to everything: the published ablation, and what measured.md names.
SEQUENCES = {
    "tuned": [
        *ROUTING,
        *("ATTN_DRAIN", "ATTN_COMBINE", "MOE_UPGATE_ACT_DRAIN", "MOE_DOWN_DRAIN", "MOE_COMBINE", "O_PROJ"),
    ],
    "interleaved": [
        *ROUTING,
        *("ATTN_DRAIN", "MOE_UPGATE_ACT_DRAIN", "MOE_DOWN_DRAIN", "ATTN_COMBINE", "MOE_COMBINE", "O_PROJ"),
    ],
    "attention-first": [
        *ROUTING,
        *("ATTN_DRAIN", "ATTN_COMBINE", "O_PROJ", "MOE_UPGATE_ACT_DRAIN", "MOE_DOWN_DRAIN", "MOE_COMBINE"),
    ],
    "streamed-2": [
        *("ADD_RMSNORM", "QKV_PROJ", "ROUTER_GEMM", "MOE_UPGATE_ACT", "ATTN_DECODE", "ATTN_COMBINE"),
        *("MOE_UPGATE_ACT", "O_PROJ", "MOE_DOWN"),
    ],
    "streamed-0": [
        *("ADD_RMSNORM", "QKV_PROJ", "ROUTER_GEMM", "ATTN_DECODE", "ATTN_COMBINE", "MOE_UPGATE_ACT"),
        *("O_PROJ", "MOE_DOWN"),
    ],
    "down-first-1": [
        *("ADD_RMSNORM", "QKV_PROJ", "ROUTER_GEMM", "MOE_UPGATE_ACT", "ATTN_DECODE", "ATTN_COMBINE"),
        *("MOE_UPGATE_ACT", "MOE_DOWN", "O_PROJ"),
    ],
}
HEAD = ["ADD_RMSNORM", "LM_HEAD", "SAMPLE_HISTOGRAM", "SAMPLE_MASS", "SAMPLE_DRAW", "END_STEP"]


def sequence(schedule, layer: int) -> list[str]:
    """Opcodes of a layer in the order of the first list, each run of one once."""
    tasks = schedule.list_of(0)
    names = [Opcode(int(task[F.OPCODE])).name for task in tasks if task[F.LAYER] == layer]
    return [name for name, _ in itertools.groupby(names)]


@pytest.mark.parametrize("name", SEQUENCES)
def test_waves_come_in_the_order_asked_for(name):
    schedule = build(tiny_config(), batch=3, sms=1, order=ORDERS[name])
    assert schedule.order == name
    assert sequence(schedule, 4) == SEQUENCES[name]
    sliding = [step.replace("ATTN_DRAIN", "ATTN_DECODE") for step in SEQUENCES[name]]
    assert sequence(schedule, 2) == sliding
    assert sequence(schedule, 5) == HEAD[:-1]
    assert schedule.tasks[-1, F.OPCODE] == Op.END_STEP


def test_rounds_of_up_run_before_attention_as_asked():
    for rounds in range(4):
        schedule = build(SHORT, batch=1, sms=128, order=streamed(rounds))
        own = [task for task in schedule.list_of(5) if task[F.LAYER] == 3]
        opcodes = [int(task[F.OPCODE]) for task in own]
        attention = opcodes.index(Op.ATTN_DECODE)
        spans = [(int(t[F.ROUND_BEGIN]), int(t[F.ROUND_END])) for t in own if t[F.OPCODE] == Op.MOE_UPGATE_ACT]
        assert spans == ([(0, rounds), (rounds, 6)] if rounds else [(0, 6)])
        before = [
            span for span, place in zip(spans, _places(opcodes, Op.MOE_UPGATE_ACT), strict=True) if place < attention
        ]
        assert before == ([(0, rounds)] if rounds else [])


def _places(opcodes: list[int], wanted: int) -> list[int]:
    return [place for place, opcode in enumerate(opcodes) if opcode == wanted]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("model", "batch", "sms"), [("tiny", 5, 4), ("real", 8, 128), ("real", 1, 132)])
def test_every_wave_is_dealt_evenly(order, model, batch, sms):
    config = {"tiny": tiny_config(), "real": SHORT}[model]
    schedule = build(config, batch=batch, sms=sms, order=ORDERS[order])
    sm = np.repeat(np.arange(sms), np.diff(schedule.begin))
    opcode, layer = schedule.tasks[:, F.OPCODE], schedule.tasks[:, F.LAYER]
    layers = config.num_hidden_layers
    for group in ORDERS[order].groups:
        dealt_otherwise = ON_EVERY_SM | {Op.ADD_RMSNORM, Op.QKV_PROJ}
        shares = [code for wave in group for code in OPCODES[wave.name] if code not in dealt_otherwise]
        chosen = np.isin(opcode, shares) & (layer < layers)
        waves = 2 if "up" in [wave.name for wave in group] else 1  # of a dense layer's tiles, each dealt evenly
        counts = np.zeros((layers, sms), int)
        np.add.at(counts, (layer[chosen], sm[chosen]), 1)
        assert (counts.max(axis=1) - counts.min(axis=1) <= waves).all(), group
    # QKV is dealt by rows: every SM has as many, to a unit.
    chosen = opcode == Op.QKV_PROJ
    rows = np.zeros((layers, sms), int)
    np.add.at(rows, (layer[chosen], sm[chosen]), schedule.tasks[chosen, F.ROW_COUNT])
    assert (rows.max(axis=1) - rows.min(axis=1) <= qkv_rows(config)).all()
    assert (rows.sum(axis=1) == (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim).all()
    for code in ON_EVERY_SM:
        counts = np.zeros((layers, sms), int)
        chosen = opcode == code
        np.add.at(counts, (layer[chosen], sm[chosen]), 1)
        assert (counts.max(axis=1) == counts.min(axis=1)).all(), code.name
    counts = np.bincount(sm[opcode == Op.LM_HEAD], minlength=sms)
    assert (counts == 1).all()
    rows = schedule.tasks[opcode == Op.LM_HEAD, F.ROW_COUNT]
    assert rows[:-1].max() - rows[:-1].min() <= 16


@pytest.mark.parametrize("batch", [1, 8])
def test_128_sms_divide_the_real_waves_evenly(batch):
    """Six up blocks, one of O_PROJ and one of down an SM, as measured."""
    schedule = build(SHORT, batch=batch, sms=128)
    for sm in range(128):
        tasks = schedule.list_of(sm)
        own = tasks[tasks[:, F.LAYER] == 3]
        count = {code: int((own[:, F.OPCODE] == code).sum()) for code in (Op.O_PROJ, Op.MOE_DOWN)}
        assert count == {Op.O_PROJ: 1, Op.MOE_DOWN: 1}
        spans = own[own[:, F.OPCODE] == Op.MOE_UPGATE_ACT][:, [F.ROUND_BEGIN, F.ROUND_END]]
        items = [len(dealt(8 * 96, sm, 128, (int(first), int(end)))) for first, end in spans]
        assert items == [2, 4]


def test_dynamic_work_is_dealt_evenly_whatever_the_step():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    schedule = build(SHORT, batch=8, sms=128)
    for instance in instances(schedule, seed):
        for window in (0, REAL.sliding_window):
            items = len(attention_items(instance.positions.tolist(), instance.live.tolist(), 4, window))
            shares = [len(dealt(items, dealer, 128, (0, items))) for dealer in range(128)]
            assert sum(shares) == items
            assert max(shares) - min(shares) <= 1
        active = len(routes(instance.experts[3].astype(np.int32), instance.live.tolist()).experts)
        assert active >= REAL.num_experts_per_tok
        for rounds in ((0, 2), (2, 48)):
            shares = [len(dealt(active * 96, dealer, 128, rounds)) for dealer in range(128)]
            assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("batch", BATCHES)
def test_batches(batch):
    schedule = build(tiny_config(), batch=batch, sms=3)
    assert schedule.batch == batch
    assert schedule.sms == 3
    assert schedule.tasks[:, F.BATCH_COUNT].max() == batch
    drawn = schedule.tasks[schedule.tasks[:, F.OPCODE] == Op.SAMPLE_DRAW]
    assert sorted(drawn[:, F.BATCH_BEGIN]) == list(range(batch))
    assert schedule.workspace.buffers[Buffer.LOGITS].shape == (batch, 199)


@pytest.mark.parametrize("order", ORDERS)
def test_tasks_of_each_lane_are_in_every_list_of_a_machine(order):
    """No SM is idle by mistake: every list has work of the lanes that all SMs share."""
    schedule = build(tiny_config(), batch=2, sms=4, order=ORDERS[order])
    lanes = {(sm, OPERATIONS[Op(task[F.OPCODE])].lane) for sm in range(4) for task in schedule.list_of(sm)}
    assert {(sm, Lane.MATRIX) for sm in range(4)} <= lanes


def test_building_twice_gives_the_same():
    one, two = (build(tiny_config(), batch=4, sms=3, order=TUNED) for _ in range(2))
    np.testing.assert_array_equal(one.tasks, two.tasks)
    assert one.counter_names == two.counter_names
    assert not one.tasks.flags.writeable


def test_descriptors_name_their_place_and_no_more_than_they_read():
    schedule = build(tiny_config(), batch=4, sms=3)
    np.testing.assert_array_equal(schedule.tasks[:, F.TASK], np.arange(len(schedule.tasks)))
    for task in schedule.tasks:
        read = OPERATIONS[Opcode(int(task[F.OPCODE]))].fields | {F.OPCODE, F.TASK}
        assert set(np.flatnonzero(task).tolist()) <= read


@pytest.mark.parametrize(
    ("changes", "sizes", "words"),
    [
        ({}, {"batch": 0}, "batch must be at least 1 and at most 32, got 0"),
        ({}, {"batch": 33}, "batch must be at least 1 and at most 32, got 33"),
        ({}, {"sms": 0}, "sms must be at least 1, got 0"),
        ({}, {"planes": 0}, "planes must be at least 1, got 0"),
        ({}, {"splits": 0}, "splits must be at least 1, got 0"),
        ({}, {"planes": 1}, "planes must be at least 2 for order 'streamed-2'"),
        ({}, {"sms": 13}, "sms must be at most 12, the QKV tiles of a layer, for order 'streamed-2', got 13"),
        ({}, {"splits": 3}, "splits=3 does not divide 2 KV heads"),
        ({}, {"dtype": "float16"}, "the megakernel runs bfloat16 and float32 weights, not float16"),
        ({"num_experts": 40, "num_experts_per_tok": 17}, {}, "at most 16 experts a token, not 17"),
    ],
    ids=str,
)
def test_refusals(changes, sizes, words):
    with pytest.raises(ValueError, match=words):
        build(tiny_config(**changes), **({"batch": 1, "sms": 1} | sizes))
