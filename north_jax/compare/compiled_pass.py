"""The compiled decode's tensors: token by token, on the CPU executor or as a CUDA kernel, as the weights lie."""

from __future__ import annotations

import numpy as np

from ..config import DENSE, Config
from ..layers import Params
from ..megakernel.abi import Buffer
from ..megakernel.decoder import MegakernelDecoder
from ..megakernel.forced import forced
from ..prompt_rows import PromptRows
from .passes import Pass, flat


def compiled_pass(config: Config, params: Params, tokens: np.ndarray, last: int) -> Pass:
    """Decodes the last tokens of a text; JAX has put those before into the cache, in the weights' type.

    The kernel keeps the residual stream in float32 and partly in registers and shared memory; the outputs of the layers
    are the embedding and what attention and MLPs add to it, summed here.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      tokens: [T] int32.
      last: tokens to decode; 1 to T.

    Returns:
      all tensors of `passes.TENSORS`. `experts` are those of the router logits.

    Raises:
      BackendError: nothing compiled decodes on this device, or it does not take this model.
    """
    layers = config.num_hidden_layers
    first = len(tokens) - last
    decoder = MegakernelDecoder(config, params, slots=1, max_context=len(tokens), planes=layers)
    rows = PromptRows(config, params, rows=1, max_context=len(tokens))
    decoder.compile(rows.cache, rows.tables())
    steps: list[list[dict[str, np.ndarray]]] = []
    logits = []
    for _ in forced(decoder, rows, tokens[None], first):
        steps.append([_seen(config, decoder, layer) for layer in range(layers)])
        logits.append(decoder.logits()[0])
    shown = [
        {name: np.stack([step[layer][name] for step in steps]) for name in steps[0][layer]} for layer in range(layers)
    ]
    stream = flat(np.asarray(params["embed"][tokens[first:]]))
    for tensors in shown:
        stream = stream + tensors["attention"] + tensors["mlp"]
        tensors["output"] = stream
    experts = [chosen_experts(config, tensors.get("router_logits")) for tensors in shown]
    return Pass(shown, experts, np.stack(logits))


def chosen_experts(config: Config, router_logits: np.ndarray | None) -> np.ndarray | None:
    """The experts of router logits [S, E], ascending [S, k]: among equal logits the lowest index is taken first."""
    if router_logits is None:
        return None
    order = np.argsort(-router_logits, axis=-1, kind="stable")
    return np.sort(order[:, : config.num_experts_per_tok], axis=-1).astype(np.int32)


def _seen(config: Config, decoder: MegakernelDecoder, layer: int) -> dict[str, np.ndarray]:
    """What the last step's only row left of a layer: name → float32 [n]."""

    def row(buffer: Buffer) -> np.ndarray:
        return np.asarray(decoder.activations(buffer, layer)[0], np.float32)

    d = config.head_dim
    heads = np.cumsum([config.num_attention_heads * d, config.num_key_value_heads * d])
    tensors = dict(zip(("q", "k", "v"), np.split(row(Buffer.QKV), heads), strict=True))
    tensors["attention"] = decoder.activations(Buffer.ATTENTION_OUT, layer)[:, 0].sum(axis=0)
    tensors["mlp"] = row(Buffer.MLP_OUT)
    if config.mlp_layer_types[layer] != DENSE:
        tensors["router_logits"] = row(Buffer.ROUTER_LOGITS)
    return tensors
