"""What an SM keeps: the real model fits at every batch size, with enough pages of weights."""

from __future__ import annotations

import dataclasses

import pytest

from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.megakernel.build import BATCHES, build
from north_jax.megakernel.orders import ORDERS
from north_jax.megakernel.shared_memory import Capacities, budget

REAL = Config.from_json(NORTH)
SHORT = dataclasses.replace(
    REAL, num_hidden_layers=4, layer_types=REAL.layer_types[:4], mlp_layer_types=REAL.mlp_layer_types[:4]
)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("order", ["streamed-2", "tuned"])
def test_the_real_model_fits(batch, order):
    memory = budget(build(SHORT, batch=batch, sms=128, order=ORDERS[order]))
    print(f"batch {batch}, {order}: {memory.pages} pages, {memory.parts}, resident input: {memory.resident_input}")
    assert memory.bytes <= 227 * 1024
    assert memory.pages >= (6 if batch == 1 else 5 if batch <= 4 else 4)
    assert memory.resident_input == (order == "streamed-2" and batch <= 8)
    assert (memory.parts["input"] > 0) == memory.resident_input


def test_parts_of_batch_8():
    memory = budget(build(SHORT, batch=8, sms=128))
    assert memory.page_bytes == 16 * (2048 + 16)
    assert memory.parts["input"] == 8 * (2048 * 2 + 16)
    assert memory.parts["staging"] == 2 * 8 * (1024 * 2 + 16)  # a KV head's slice of the attention output, twice
    assert memory.parts["sums"] == 4 * 8 * (128 + 2) * 4  # of attention: half of 8 warps, 8 query heads


def test_smaller_memory_leaves_fewer_pages():
    schedule = build(SHORT, batch=8, sms=128)
    pages = [budget(schedule, Capacities(total=size * 1024)).pages for size in (100, 150, 227, 400)]
    assert pages == sorted(pages)
    assert pages[-1] == Capacities().most_pages
