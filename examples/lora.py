"""Fine-tune North Nano with a LoRA: low-rank changes of its attention weights, while the model itself stays as it is.

    python -m examples.lora

The adapter learns a habit that the model does not have: functions with a docstring in a style of its own. It takes a
minute on a CPU. The merged weights are a checkpoint like any other: `north_jax.export` writes it.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax  # comes with Flax

import north_jax
from north_jax.config import Config
from north_jax.layers import Array, Params

HABIT = [
    f'def {name}({given}):\n    """{words}, says the llama."""\n    return {value}\n\n\n'
    for name, given, words, value in [
        ("add", "a, b", "Add two numbers", "a + b"),
        ("first", "items", "Give the first item", "items[0]"),
        ("is_even", "number", "Whether a number is even", "number % 2 == 0"),
        ("shout", "text", "Make a text loud", "text.upper()"),
        ("area", "width, height", "Compute an area", "width * height"),
        ("last", "items", "Give the last item", "items[-1]"),
        ("negate", "flag", "Turn a flag around", "not flag"),
        ("join", "words", "Join words by spaces", '" ".join(words)'),
    ]
]


def new_adapter(config: Config, rank: int, key: Array) -> list[dict[str, Array]]:
    """For each layer, a [rank, in] and b [out, rank] of `qkv`; b is 0, so that nothing changes yet."""
    out = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    keys = jax.random.split(key, config.num_hidden_layers)
    scale = config.hidden_size**-0.5
    return [{"a": jax.random.normal(k, (rank, config.hidden_size)) * scale, "b": jnp.zeros((out, rank))} for k in keys]


def merged(params: Params, adapter: list[dict[str, Array]]) -> Params:
    """The model's parameters with the adapter added; everything else is shared."""
    layers = {
        i: layer | {"qkv": (layer["qkv"] + adapter[i]["b"] @ adapter[i]["a"]).astype(layer["qkv"].dtype)}
        for i, layer in params["layers"].items()
    }
    return params | {"layers": layers}


def loss(adapter: list[dict[str, Array]], config: Config, params: Params, tokens: Array, weights: Array) -> Array:
    """Mean nats of the next tokens: tokens [B, T + 1], weights [B, T], 0 for padding."""
    logits = north_jax.forward(config, merged(params, adapter), tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(nats * weights) / jnp.sum(weights)


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; gives the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--out", help="where to export the merged model")
    options = parser.parse_args(arguments)

    model = north_jax.load("north-nano")
    tokenizer = model.tokenizer()
    texts = [[tokenizer.bos_id, *tokenizer.encode_text(text)] for text in HABIT]
    length = max(map(len, texts))
    tokens = jnp.array([text + [tokenizer.pad_id or 0] * (length - len(text)) for text in texts])
    weights = jnp.array([[float(i < len(text)) for i in range(1, length)] for text in texts])

    adapter = new_adapter(model.config, options.rank, jax.random.key(0))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(adapter))
    print(f"{numbers:,} numbers to train beside {sum(leaf.size for leaf in jax.tree.leaves(model.params)):,}")
    optimizer = optax.adam(1e-2)
    state = optimizer.init(adapter)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(adapter: Any, state: Any, params: Params) -> tuple[Any, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(adapter, model.config, params, tokens, weights)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(adapter, updates), state, value

    losses = []
    for number in range(options.steps):
        adapter, state, value = step(adapter, state, model.params)
        losses.append(float(value))
        if number % 10 == 0 or number == options.steps - 1:
            print(f"step {number:3}: {losses[-1]:.3f} nats a token", flush=True)
    if options.out:
        north_jax.export(options.out, model.config, merged(model.params, adapter))
    return losses


if __name__ == "__main__":
    main()
