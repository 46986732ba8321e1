"""What tests hand to programs of their own: a model, task lists and a batch, as arrays one after another in a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from north_jax.config import Config
from north_jax.layers import Params
from north_jax.megakernel import binding
from north_jax.megakernel.abi import Buffer, Weight
from north_jax.megakernel.schedule import Schedule


def write_arrays(path: Path, arrays: Iterable[np.ndarray]) -> None:
    """Writes each array's bytes after their number, an int64."""
    with path.open("wb") as file:
        for array in arrays:
            file.write(np.int64(array.nbytes).tobytes() + np.ascontiguousarray(array).tobytes())


def sizes_of(config: Config) -> tuple[int, ...]:
    """The geometry's sizes and flags, in the order of csrc/megakernel/plan.h."""
    return (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.dense_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.vocab_size,
        config.norm_type == "layer",
        config.expert_selection_fn == "softmax",
        config.norm_topk_prob,
    )


def weight_arrays(config: Config, params: Params) -> list[np.ndarray]:
    """Rows and columns of every entry of the weight table, [entries, 2] int64, then the entries."""
    named = {number: np.asarray(array) for number, (_, array) in binding._weights(config, params)}
    table = [named.get(n, np.zeros((0, 0), np.int16)) for n in range((config.num_hidden_layers + 1) * len(Weight))]
    shapes = [(array.size // max(array.shape[-1], 1), array.shape[-1]) for array in table]
    return [np.array(shapes, np.int64), *table]


def buffer_places(schedule: Schedule) -> np.ndarray:
    """[buffers, 4] int64: offset, bytes of a plane, planes, size of the first axis; zeros for an absent buffer."""
    places = np.zeros((max(Buffer) + 1, 4), np.int64)
    for name, spec in schedule.workspace.buffers.items():
        places[name] = schedule.workspace.offsets[name], spec.plane_bytes, spec.planes, spec.shape[0]
    return places
