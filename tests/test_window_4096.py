"""The edge of a sliding window at North's own size: 4095 or 4097 keys instead of 4096 must show, in both passes.

A model of one sliding layer reads a few more tokens than the window holds. Its weights are made so that single keys
decide the result: otherwise one key in 4096 would drown in the others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from north_jax.config import DENSE, SLIDING, Config
from north_jax.inference import decode_step, prefill
from north_jax.kv_cache import PagedRows, init_cache, pages_for, ring_entries
from north_jax.layers import Params
from north_jax.model import init_params
from tests.golden.compare import TOLERANCE, UNOPTIMISED, error
from tests.golden.oracle import Layer, Model
from tests.golden.oracle import forward as oracle_forward

forward = importlib.import_module("north_jax.forward_pass").forward
VISIBLE = 100 * TOLERANCE
WINDOW, CHUNK, DECODED = 4096, 512, 6
LENGTH = WINDOW + DECODED
NEEDLES = (0, 2)  # positions that every query attends to strongly while it sees them; the first leaves at LENGTH − 6
EDGE = Config(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=16,
    dense_intermediate_size=16,
    num_experts=1,
    num_experts_per_tok=1,
    expert_selection_fn="sigmoid",
    norm_topk_prob=False,
    layer_types=(SLIDING,),
    mlp_layer_types=(DENSE,),
    prefix_dense_sliding_window_pattern=1,
    sliding_window=WINDOW,
    rope_theta=50000.0,
    norm_type="rms",
    norm_eps=1e-6,
    logit_scale=1.0,
    max_position_embeddings=2 * WINDOW,
)


@dataclass(frozen=True)
class Edge:
    params: Params
    tokens: np.ndarray  # [LENGTH] int32
    logits: np.ndarray  # [LENGTH, V] float64, of the oracle


@pytest.fixture(scope="module")
def edge() -> Edge:
    """Random weights, and one direction by which all queries look for the needle token whatever its distance.

    Feature 0 is constant, feature 1 marks the needle. They reach the last rotary pair of queries and keys, which turns
    by only 0.3 rad over the window; the score outweighs the sum of 4096 ordinary keys.
    """
    params = jax.tree.map(np.array, init_params(EDGE, jax.random.key(0), "float32"))
    needle = 1
    params["embed"][:, :2] = [3, 0]
    params["embed"][needle, 1] = 6
    by_head = params["layers"][0]["qkv"].reshape(-1, EDGE.head_dim, EDGE.hidden_size)
    by_head[:3] *= 0.3  # two query heads and the key head: ordinary scores stay near zero
    by_head[:3, -2, :] = 0
    by_head[:2, -2, 0] = 2.5
    by_head[2, -2, 1] = 2.5
    tokens = np.random.default_rng(0).integers(needle + 1, EDGE.vocab_size, LENGTH).astype(np.int32)
    tokens[list(NEEDLES)] = needle
    layer = Layer(EDGE.num_attention_heads, EDGE.num_key_value_heads, rope=True, window=WINDOW)
    exact = Model([layer], centred=False, eps=1e-6, theta=50000.0, top_k=1, router="sigmoid", logit_scale=1.0)
    return Edge(params, tokens, oracle_forward(exact, params, tokens))


def whole(config: Config, edge: Edge) -> np.ndarray:
    """Logits of the last DECODED + 1 positions, by the whole-sequence pass."""
    logits = jax.jit(forward, static_argnums=0, compiler_options=UNOPTIMISED)(config, edge.params, edge.tokens[None])
    return np.asarray(logits[0, WINDOW - 1 :])


def paged(config: Config, edge: Edge) -> np.ndarray:
    """The same logits: prefill of WINDOW tokens in chunks, then token by token."""
    pages = {"full_pages": pages_for(LENGTH), "sliding_pages": ring_entries(config, LENGTH, CHUNK)}
    rows = PagedRows(config, rows=1, max_context=LENGTH, max_chunk=CHUNK, **pages)
    cache = init_cache(config, **pages, dtype="float32")
    jit = functools.partial(jax.jit, static_argnums=0, donate_argnums=2, compiler_options=UNOPTIMISED)
    step, decode = jit(prefill), jit(decode_step)
    results = []
    for start in [*range(0, WINDOW, CHUNK), *range(WINDOW, LENGTH)]:
        count = CHUNK if start < WINDOW else 1
        rows.grow(0, start, start + count)
        arguments = config, edge.params, cache, rows.snapshot()
        tokens, at = edge.tokens[None, start : start + count], np.array([start], np.int32)
        if count > 1:
            cache, logits = step(*arguments, tokens, at, np.array([count], np.int32))
        else:
            cache, logits = decode(*arguments, tokens[0], at, np.array([True]))
        results.append(logits[0])
    return np.stack(results[WINDOW // CHUNK - 1 :])


@pytest.mark.parametrize("path", [whole, paged])
@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_the_edge_of_a_window_of_4096(edge, path, window):
    logits = path(dataclasses.replace(EDGE, sliding_window=window), edge)
    off = error(logits, edge.logits[WINDOW - 1 :])
    print(f"window {window}, {path.__name__}: error {off:.1e}")
    assert off < TOLERANCE if window == WINDOW else off > VISIBLE
