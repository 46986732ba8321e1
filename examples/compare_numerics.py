"""How much does a change of the numbers cost? Compare variants of a model with float32, layer by layer.

    python -m examples.compare_numerics

Here the experts' weights are rounded to eight bits (MXFP8), and the result is held against the same model in bfloat16.
`python -m north_jax.compare` does this for the decoders that are part of the product; this shows how to do it for an
idea of your own: anything that takes a configuration and parameters.
"""

from __future__ import annotations

import argparse

import jax.numpy as jnp
import numpy as np

import north_jax
from north_jax.compare import Pass, difference, jax_pass
from north_jax.layers import Params
from north_jax.moe import quantize

TEXT = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""


def in_eight_bits(params: Params) -> Params:
    """The same model, its experts in MXFP8."""
    layers = {}
    for number, layer in params["layers"].items():
        mlp = dict(layer["mlp"])
        if "router" in mlp:
            mlp["gate_up"], mlp["down"] = quantize(mlp["gate_up"], "mxfp8", parts=2), quantize(mlp["down"], "mxfp8")
        layers[number] = layer | {"mlp": mlp}
    return params | {"layers": layers}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Prints a table; gives the error of each variant's logits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="north-nano", help="checkpoint directory (default: %(default)s)")
    options = parser.parse_args(arguments)

    model = north_jax.load(options.model, dtype="bfloat16")
    tokens = np.array(model.tokenizer().encode_text(TEXT), np.int32)
    variants = {"bfloat16": model.params, "experts in MXFP8": in_eight_bits(model.params)}

    def run(params: Params, dtype: object) -> Pass:
        return jax_pass(model.config, params, tokens, last=len(tokens), dtype=dtype)

    exact = run(model.params, jnp.float32)
    found = {name: difference(exact, run(params, jnp.bfloat16)) for name, params in variants.items()}
    print(f"relative error of each layer's output, median over {len(tokens)} positions")
    print("            " + "  ".join(found))
    for layer in range(model.config.num_hidden_layers):
        errors = [layers[layer]["output"].median for layers, _ in found.values()]
        print(f"layer {layer:2}:   " + "   ".join(f"{error:.1e}" for error in errors))
    print("logits:     " + "   ".join(f"{logits.median:.1e}" for _, logits in found.values()))
    return {name: logits.median for name, (_, logits) in found.items()}


if __name__ == "__main__":
    main()
