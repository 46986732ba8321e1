"""Load a checkpoint and look inside: what each layer would say next, read from its hidden state ("logit lens").

    python -m examples.hidden_states
    python -m examples.hidden_states --model DIR --prompt "def fibonacci(n):"

`forward_with_taps` is an ordinary JAX function: jit it, differentiate it, change it.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import north_jax
from north_jax.layers import head

PROMPT = "for i in range(len(items)):\n    print(items["


def main(arguments: list[str] | None = None) -> list[str]:
    """Prints a line a layer; gives each layer's next token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="north-nano", help="checkpoint directory (default: %(default)s)")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args(arguments)

    model = north_jax.load(options.model)
    tokenizer = model.tokenizer()
    tokens = jnp.array([[tokenizer.bos_id, *tokenizer.encode_text(options.prompt)]])

    forward = jax.jit(north_jax.forward_with_taps, static_argnums=0)
    logits, taps = forward(model.config, model.params, tokens)

    layers = range(model.config.num_hidden_layers)
    last = jnp.stack([taps[f"layers.{i}.output"][0, -1] for i in layers])  # [layers, D]
    read = jax.nn.softmax(head(model.config, model.params, last))  # [layers, V]: the head on every layer's output
    print(options.prompt + "▁")
    said = []
    for i in layers:
        best = int(read[i].argmax())
        said.append(tokenizer.decode([best]))
        size = float(jnp.linalg.norm(last[i].astype(jnp.float32)))
        experts = taps.get(f"layers.{i}.experts")  # [B, T, k]; a dense layer has none
        chosen = "dense" if experts is None else f"experts {sorted(np.asarray(experts[0, -1]).tolist())}"
        print(f"layer {i:2}: |x| = {size:7.1f}, {said[-1]!r} at {float(read[i, best]):.0%}, {chosen}")
    # After the last layer that is the model's answer.
    assert said[-1] == tokenizer.decode([int(logits[0, -1].argmax())])
    return said


if __name__ == "__main__":
    main()
