"""Builds schedules: from a model, a batch size and a wave order to the task lists of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from ..config import Config
from .abi import DESCRIPTOR_FIELDS, MAX_ROWS, MAX_TOP_K, OPERATIONS, Field
from .head import head_waves
from .layout import activation_type, workspace
from .orders import Order, streamed
from .schedule import Schedule
from .tasks import Dealt, Draft, Task, Tiling, qkv_rows
from .waves import LayerWaves

BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)  # that the decoder builds


def build(
    config: Config,
    *,
    batch: int,
    sms: int,
    dtype: jnp.dtype | str = "bfloat16",
    order: Order | None = None,
    planes: int = 2,
    splits: int = 1,
) -> Schedule:
    """Builds the lists of one step.

    Args:
      config: the model's configuration.
      batch: rows, 1 … MAX_ROWS.
      sms: lists to deal to. On an H200 128 of its 132 divide every wave evenly.
      dtype: of the weights.
      order: `streamed(2)` by default.
      planes: copies of each buffer between layers; one is enough only for orders that route by tables.
      splits: slices of the input that the attention output projection is split into; the next norm adds their sums.

    Raises:
      ValueError: a size is out of range, or the model has a shape that the operations do not take.
    """
    _check(config, batch=batch, sms=sms, planes=planes, splits=splits)
    order = order or streamed(2)
    tiling = Tiling.of(config, batch, sms, splits)
    _check_reuse(config, order, sms, planes)
    draft = Draft(config, order, tiling, batch, sms)
    lists = _deal(_groups(draft), sms, restart=not order.round_robin)
    return Schedule(
        config=config,
        batch=batch,
        order=order.name,
        tasks=_encode(lists, draft.counters.needs),
        begin=np.cumsum([0, *map(len, lists)], dtype=np.int32),
        counter_names=tuple(draft.counters.names),
        counter_needs=np.array(draft.counters.needs, np.int32),
        queue_names=tuple(draft.queues),
        workspace=workspace(
            config, batch=batch, sms=sms, dtype=activation_type(dtype), planes=planes, splits=splits, ranges=sms
        ),
    )


def most_sms(config: Config) -> int:
    """Most lists of a schedule whose SMs choose experts for themselves: each needs a QKV tile."""
    return (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim // qkv_rows(config)


def _groups(draft: Draft) -> Iterator[list[Dealt]]:
    """All waves of a step in order, in groups that are dealt together."""
    end: int | None = None
    for layer in range(draft.config.num_hidden_layers):
        waves = LayerWaves(draft, layer, end)
        for group in draft.order.groups:
            yield [waves.wave(wave) for wave in group]
        end = waves.end
    assert end is not None
    for wave in head_waves(draft, end):
        yield [wave]


def _deal(groups: Iterator[list[Dealt]], sms: int, *, restart: bool) -> list[list[Task]]:
    """Each SM's list: the tasks of a group go to one SM after the other."""
    lists: list[list[Task]] = [[] for _ in range(sms)]
    cursor = 0
    for group in groups:
        cursor = 0 if restart else cursor
        for wave in group:
            for number, tasks in enumerate(wave.tasks):
                lists[number if wave.fixed else cursor % sms] += tasks
                cursor += not wave.fixed
    return lists


def _encode(lists: Sequence[Sequence[Task]], needs: Sequence[int]) -> np.ndarray:
    """The descriptors, with what waits need filled in: always all arrivals of a step."""
    flat = [task for tasks in lists for task in tasks]
    encoded = np.zeros((len(flat), DESCRIPTOR_FIELDS), np.int32)
    for row, task in zip(encoded, flat, strict=True):
        row[list(task)] = list(task.values())
    encoded[:, Field.TASK] = np.arange(len(flat))
    need = np.array(needs, np.int32)
    waits = encoded[:, Field.WAIT_COUNT] > 0
    encoded[waits, Field.WAIT_NEED] = need[encoded[waits, Field.WAIT]]
    slices = np.isin(encoded[:, 0], [code for code, op in OPERATIONS.items() if Field.SLICE_WAIT in op.fields])
    encoded[slices, Field.SLICE_NEED] = need[encoded[slices, Field.SLICE_WAIT]]
    return encoded


def _check(config: Config, *, batch: int, sms: int, planes: int, splits: int) -> None:
    for name, value, most in (
        ("batch", batch, MAX_ROWS),
        ("sms", sms, None),
        ("planes", planes, None),
        ("splits", splits, None),
    ):
        if value < 1 or (most is not None and value > most):
            raise ValueError(f"{name} must be at least 1{f' and at most {most}' if most else ''}, got {value}")
    if config.num_experts_per_tok > MAX_TOP_K:
        raise ValueError(f"the megakernel takes at most {MAX_TOP_K} experts a token, not {config.num_experts_per_tok}")


def _check_reuse(config: Config, order: Order, sms: int, planes: int) -> None:
    """A layer's outputs may be overwritten only when every SM has read them, those without a tile included.

    Where every SM norms and routes for itself, one that was dealt no expert tile may still be reading a layer's router
    logits and outputs while others write the next layer's: with a second plane, it has a QKV tile in between, without
    which nobody gets further.
    """
    if planes >= config.num_hidden_layers or order.routed_by_tables:
        return  # nothing is overwritten, or everybody waits for the tables
    if planes == 1:
        raise ValueError(f"planes must be at least 2 for order {order.name!r}, whose SMs choose experts for themselves")
    most = most_sms(config)
    if sms > most:
        raise ValueError(f"sms must be at most {most}, the QKV tiles of a layer, for order {order.name!r}, got {sms}")
