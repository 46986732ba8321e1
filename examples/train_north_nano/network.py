"""North Nano's forward pass for training: the project's layers around a fused attention, and the routers' logits.

`north_jax.forward_pass.hidden_states` computes the same function; tests/nano/test_training.py holds them together. What
differs is speed on a GPU, where cuDNN's attention replaces the blocked one, and the dtypes: float32 master weights, of
which the layers see bfloat16 copies.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from north_jax.attention import attention as blocked
from north_jax.config import DENSE, FULL, SLIDING, SPARSE, Config
from north_jax.layers import Array, Params, embed, linear, norm, project_qkv
from north_jax.model import default_positions, feed_forward, init_params
from north_jax.text import Marker, Tokenizer

from .train_tokenizer import BOS, EOS, PAD

type Attention = Callable[[Array, Array, Array, int | None], Array]  # as north_jax.attention.attention

LAYERS = 8


def geometry(tokenizer: Tokenizer) -> Config:
    """North Nano's configuration: the architecture of North Mini Code within 16 MB of bfloat16."""
    return Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        dense_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=4,
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        layer_types=tuple(FULL if layer % 4 == 0 else SLIDING for layer in range(LAYERS)),
        mlp_layer_types=(DENSE,) + (SPARSE,) * (LAYERS - 1),
        prefix_dense_sliding_window_pattern=1,
        sliding_window=512,
        rope_theta=50000.0,
        norm_type="rms",
        norm_eps=1e-6,
        logit_scale=1.0,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.special_id(BOS),
        eos_token_id=(tokenizer.special_id(Marker.END_OF_TURN), tokenizer.special_id(EOS)),
        pad_token_id=tokenizer.special_id(PAD),
    )


def initial_params(config: Config, key: Array) -> Params:
    """Float32 weights to start from: `init_params`, with logits of unit size and quiet branches into the residual."""
    params = init_params(config, key, "float32")
    params["embed"] *= config.hidden_size**-0.5
    for layer in params["layers"].values():
        layer["o"] *= 0.1
        layer["mlp"]["down"] *= 0.1
    return params


def cudnn(q: Array, k: Array, v: Array, window: int | None) -> Array:
    """cuDNN's fused attention with the meaning of `north_jax.attention.attention`; bfloat16 on a GPU."""
    span = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=span, implementation="cudnn")


def choose_attention(config: Config) -> Attention:
    """`cudnn` where it runs and agrees with the blocked attention, values and gradients; else the latter."""
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, 2 * config.sliding_window, n, d) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))

    def run(attention: Attention, window: int | None) -> list[Array]:
        def total(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out = attention(q, k, v, window).astype(jnp.float32)
            return jnp.sum(out * jnp.cos(jnp.arange(out.shape[1]))[:, None, None]), out

        gradients, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)
        return [out, *(gradient.astype(jnp.float32) for gradient in gradients)]

    for window in (None, config.sliding_window):
        try:
            pairs = list(zip(run(cudnn, window), run(blocked, window), strict=True))
        except Exception as error:  # whatever XLA raises where cuDNN lacks this shape, or there is no GPU
            print(f"attention: blocked, cuDNN is not usable ({str(error).splitlines()[0]})")
            return blocked
        worst = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
        if worst > 0.03:
            print(f"attention: blocked, cuDNN differs by {worst:.3f} with window {window}")
            return blocked
    print("attention: cuDNN")
    return cudnn


def hidden_states(config: Config, params: Params, tokens: Array, attention: Attention) -> tuple[Array, list[Array]]:
    """Runs every layer in bfloat16.

    Args:
      config: the model's configuration.
      params: float32 master weights.
      tokens: [B, T] int32.
      attention: how to attend.

    Returns:
      [B, T, D] bfloat16, to be given to `layers.head`, and the router logits [B, T, E] float32 of every MoE layer.
    """
    router_logits: list[Array] = []

    def tap(name: str, value: Array) -> None:
        if name == "router_logits":
            router_logits.append(value)

    # Rows are fetched in float32 and rounded afterwards, so that the embedding's gradient is summed in float32.
    x = embed(params, tokens).astype(jnp.bfloat16)
    positions = default_positions(x)
    for i in range(config.num_hidden_layers):
        layer = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), params["layers"][i])
        h = norm(config, x, layer["norm"])
        q, k, v = project_qkv(config, i, h, layer["qkv"], positions)
        mixed = attention(q, k, v, config.window(i)).reshape(*h.shape[:-1], -1)
        x = x + linear(mixed, layer["o"]) + feed_forward(config, i, layer["mlp"], h, "dense", tap)
    return x, router_logits
