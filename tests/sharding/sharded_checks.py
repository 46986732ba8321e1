"""Run by test_sharding.py in a process of eight virtual CPU devices: the model on meshes against one device.

Arguments: "quick" or "long", which checks; an empty directory.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import tiny_config, tiny_params

import north_jax
from north_jax.checkpoint import export, load, restore, save
from north_jax.kv_cache import PagedRows, PageTables
from north_jax.layers import embed
from north_jax.model import North
from north_jax.sharding import current_mesh, exchanges, init_sharded_cache, joined_tables, make_mesh, shardings_of

LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "intermediate_size": 32}
CONFIG = tiny_config(vocab_size=208, **LAYERS)  # 8 query heads, 2 key-value heads, 16 experts
PARAMS = tiny_params(CONFIG)
MESH = make_mesh(data=2, tensor=2, expert=2)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 75)).astype(np.int32)  # beyond the window
PAGES = {"full_pages": 4, "sliding_pages": 4}  # of two rows

forward = jax.jit(north_jax.forward, static_argnums=0)
prefill = jax.jit(north_jax.prefill, static_argnums=(0, 7), donate_argnums=2)
decode_step = jax.jit(north_jax.decode_step, static_argnums=(0, 7), donate_argnums=2)


def error(found: Any, expected: Any) -> float:
    found, expected = (np.asarray(value, np.float64) for value in (found, expected))
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def check_collectives(compiled: jax.stages.Compiled, tokens: int) -> None:
    """The exchanges of two layers, a dense one and one of experts, of so many tokens a device, and no others.

    The embedding, attention and MLPs are summed; q, k and v, and the dense layer's gate and up, are gathered.
    """
    d, (h, k) = CONFIG.head_dim, (CONFIG.num_attention_heads, CONFIG.num_key_value_heads)
    summed, gathered = tokens * CONFIG.hidden_size, tokens * (h + 2 * k) * d
    assert 2 * CONFIG.dense_intermediate_size == (h + 2 * k) * d
    expected = {("all-reduce", summed): 1 + 2 * 2, ("all-gather", gathered): 2 + 1}
    assert Counter(exchanges(compiled)) == expected


def whole_forward(params: Any) -> Any:
    expected = forward(CONFIG, PARAMS, TOKENS)
    with jax.set_mesh(MESH):
        assert current_mesh() is not None
        compiled = forward.lower(CONFIG, params, TOKENS).compile()
        found = compiled(params, TOKENS)
    check_collectives(compiled, TOKENS.size // 2)
    assert error(found, expected) < 1e-5
    assert found.sharding.spec[0] == "data" and found.sharding.spec[2] == "tensor", found.sharding
    absent = np.array([[0, CONFIG.vocab_size, -1]], np.int32)  # one row, which data does not divide
    with jax.set_mesh(MESH):
        vectors = jax.jit(embed)(params, absent)
    assert np.array_equal(vectors, embed(PARAMS, absent), equal_nan=True) and np.isnan(vectors[0, 1:]).all()
    return expected


def module(params: Any, logits: Any) -> None:
    """The Flax model, with its parameters on the mesh."""
    graph, state = nnx.split(North(CONFIG, params))
    with jax.set_mesh(MESH):
        found = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, TOKENS)
    assert error(found, logits) < 1e-5


def gradients(params: Any) -> None:
    def loss(params: Any) -> Any:
        logits = north_jax.forward(CONFIG, params, TOKENS)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    expected = jax.jit(jax.grad(loss))(PARAMS)
    with jax.set_mesh(MESH):
        compiled = jax.jit(jax.grad(loss), out_shardings=shardings_of(CONFIG, MESH)).lower(params).compile()
        found = compiled(params)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert error(ours, theirs) < 1e-5
    smallest = min(leaf.size for leaf in jax.tree.leaves(PARAMS["layers"][1]["mlp"]) if leaf.ndim == 3)
    gathered = [size for kind, size in exchanges(compiled) if kind != "all-reduce"]
    assert max(gathered) < smallest, gathered


class Rows:
    """Four rows, fed from TOKENS; on a mesh two in each part of `data`."""

    def __init__(self, parts: int) -> None:
        sizes = {"max_context": 100, "max_chunk": 72, **{name: n * 2 // parts for name, n in PAGES.items()}}
        self.parts = [PagedRows(CONFIG, rows=4 // parts, **sizes) for _ in range(parts)]

    def grow(self, start: int, end: int) -> PageTables:
        for part in self.parts:
            for row in range(4 // len(self.parts)):
                part.grow(row, start, end)
        tables = [part.snapshot() for part in self.parts]
        return joined_tables(tables, **PAGES) if len(tables) > 1 else tables[0]


def run_rows(
    params: Any, cache: Any, parts: int, *, chunk: int = 0, method: str = "auto"
) -> tuple[Any, dict[int, Any]]:
    """A chunk of tokens, then three steps: the cache, and position → logits there."""
    rows, start, found = Rows(parts), np.zeros(4, np.int32), {}
    if chunk:
        tables = rows.grow(0, chunk)
        cache, found[chunk - 1] = prefill(
            CONFIG, params, cache, tables, TOKENS[:, :chunk], start, start + chunk, method
        )
    for position in range(chunk, chunk + 3):
        tables = rows.grow(position, position + 1)
        arguments = (TOKENS[:, position], start + position, np.ones(4, bool), method)
        cache, found[position] = decode_step(CONFIG, params, cache, tables, *arguments)
    return cache, found


def pages(params: Any, logits: Any) -> None:
    pool = {name: 2 * count for name, count in PAGES.items()}
    with jax.set_mesh(MESH):
        cache = init_sharded_cache(CONFIG, MESH, **pool, dtype=jnp.float32)
        assert cache[0].addressable_shards[0].data.shape == (4, 2, 1, 64, CONFIG.head_dim)
        addresses = [{s.data.unsafe_buffer_pointer() for s in layer.addressable_shards} for layer in cache]
        cache, found = run_rows(params, cache, parts=2, chunk=72)
        assert addresses == [{s.data.unsafe_buffer_pointer() for s in layer.addressable_shards} for layer in cache]
        tables = PageTables(*(np.zeros((4, 2), np.int32) for _ in range(2)))
        arguments = (cache, tables, TOKENS[:, 0], np.zeros(4, np.int32), np.ones(4, bool), "auto")
        check_collectives(decode_step.lower(CONFIG, params, *arguments).compile(), 2)
        _, lost = decode_step(CONFIG, params, *arguments)  # rows 2 and 3 name pages of the others' part
    for position, step_logits in found.items():
        assert error(step_logits, logits[:, position]) < 1e-5
    assert np.isfinite(lost[:2]).all() and np.isnan(lost[2:]).all()


def other_meshes(scratch: Path, logits: Any) -> None:
    """From a file onto one mesh, saved, and onto another where devices share key-value heads."""
    export(scratch / "files", CONFIG, PARAMS)
    loaded = load(scratch / "files", shardings=shardings_of(CONFIG, MESH))
    save(scratch / "orbax", CONFIG, loaded.params)
    wide = make_mesh(tensor=8)
    _, params = restore(scratch / "orbax", shardings=shardings_of(CONFIG, wide))
    for array, value in zip(jax.tree.leaves(params), jax.tree.leaves(PARAMS), strict=True):
        assert np.array_equal(array, value)
    assert params["layers"][1]["mlp"]["down"].addressable_shards[0].data.shape[0] == 2
    pool = {name: 2 * count for name, count in PAGES.items()}
    with jax.set_mesh(wide):
        cache, found = run_rows(params, init_sharded_cache(CONFIG, wide, **pool, dtype=jnp.float32), parts=1)
    assert cache[0].shape[2] == 8
    for position, step_logits in found.items():
        assert error(step_logits, logits[:, position]) < 1e-5


def warp_steps_in_bfloat16() -> None:
    """A mesh of four of the devices: the error is that of bfloat16."""
    small = make_mesh(tensor=2, expert=2)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    exact = np.asarray(forward(CONFIG, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half), TOKENS))
    pool = {name: 2 * count for name, count in PAGES.items()}
    with jax.set_mesh(small):
        placed = jax.device_put(half, shardings_of(CONFIG, small))
        cache = init_sharded_cache(CONFIG, small, **pool, dtype=jnp.bfloat16)
        _, found = run_rows(placed, cache, parts=1, method="warp")
    for position, logits in found.items():
        difference = np.asarray(logits) - exact[:, position]
        assert np.sqrt(np.mean(difference**2) / np.mean(exact[:, position] ** 2)) < 0.02


def refusals() -> None:
    for sizes, message in (
        ({"tensor": 16}, "data 1 × expert 1 × tensor 16 are 16 devices, there are 8"),
        ({"data": 0}, "sizes are at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_mesh(**sizes)
    for changes, mesh, message in (
        ({"num_experts": 12}, MESH, None),
        ({"num_experts": 10}, MESH, "10 experts cannot be divided over expert 2 × tensor 2"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, MESH, "3 key-value heads can be neither divided"),
        ({"vocab_size": 199}, MESH, None),  # stays whole
    ):
        config = tiny_config(**changes)
        if message is None:
            shardings_of(config, mesh)
        else:
            with pytest.raises(ValueError, match=message):
                shardings_of(config, mesh)
    with pytest.raises(ValueError, match="3 full pages cannot be divided over data 2"):
        init_sharded_cache(CONFIG, MESH, full_pages=3, sliding_pages=4, dtype=jnp.float32)


def main(which: str, scratch: Path) -> None:
    params = jax.device_put(PARAMS, shardings_of(CONFIG, MESH))
    if which == "quick":
        refusals()
        logits = whole_forward(params)
        pages(params, logits)
    else:
        logits = forward(CONFIG, PARAMS, TOKENS)
        module(params, logits)
        gradients(params)
        other_meshes(scratch, logits)
        warp_steps_in_bfloat16()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
