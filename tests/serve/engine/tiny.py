"""The tiny model of these tests, the same in all of them: they share what is compiled for it."""

from __future__ import annotations

import jax.numpy as jnp
from support import tiny_config, tiny_params

from north_jax.decoding import Decoder, make_decoder
from north_jax.generation import generate
from north_jax.layers import Params
from serve.engine.engine import JaxEngine
from serve.engine.memory import CachePlan, plan_cache
from serve.engine.types import EngineRequest

# Layers of every kind: dense and full with RoPE, sliding, full without RoPE.
CONFIG = tiny_config(
    num_hidden_layers=3,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    mlp_layer_types=["dense", "sparse", "sparse"],
)
PLAN = plan_cache(CONFIG, jnp.dtype(jnp.float32), slots=4, max_context=512, budget=1 << 24)
PARAMS = tiny_params(CONFIG)


def jax_decoder(params: Params = PARAMS) -> Decoder:
    return make_decoder(CONFIG, params, backend="jax", slots=PLAN.slots, max_context=PLAN.max_context)


def started_engine(
    params: Params = PARAMS, decoder: Decoder | None = None, max_queue: int = 10, plan: CachePlan = PLAN
) -> JaxEngine:
    engine = JaxEngine(CONFIG, params, plan, decoder or jax_decoder(params), max_queue=max_queue)
    engine.start()
    return engine


def alone(one: EngineRequest) -> list[int]:
    """The tokens of a request that has the model for itself."""
    return list(generate(CONFIG, PARAMS, one.prompt, one.max_tokens, one.sampling, stop_token_ids=()))
