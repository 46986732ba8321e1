"""Write the golden files: tiny random `cohere2_moe` checkpoints and what Transformers computes from them.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install "torch>=2.9" "transformers>=5.8" numpy safetensors
    /tmp/golden/bin/python tests/golden/make_golden.py [--search N] [variant ...]

The files in this folder were made with torch 2.13.0 and transformers 5.24.0 on Python 3.11 (CPU); each output file
names its versions in its metadata. Weights come from NumPy's PCG64, so a run elsewhere gives the same checkpoints.

Weights are rounded to bfloat16 and stored so, as the real checkpoint is; every run below starts from those values.
Eager attention and eager experts throughout. For each variant of `variants.py`:

    <name>/                      the checkpoint, as `save_pretrained` writes it (one tensor per expert)
    <name>/config_legacy.json    some variants: the same model in the older spelling of its configuration
    <name>.outputs.safetensors
        tokens          int32    [1, T]       a random prompt, then `CONTINUATION` greedy tokens
        prompt_length   int32    []
        logits          float32  [1, T, V]    one pass over the whole sequence
        decode_logits   float32  [1, N, V]    the last N positions again, token by token over a KV cache
        margins         float32  [N]          best minus second-best logit where each greedy token was chosen
        router_logits   float32  [M, T, E]    per MoE layer, in layer order
        positions       int32    [P]          the positions of the next three
        hidden          float32  [L + 1, P, D]  the embedding, then the output of each layer
        final           float32  [P, D]       after the final norm
        logits_f64      float64  [1, P, V]    Transformers' code with every float32 in it replaced by float64
        bf16_error      float32  [T]          norm-wise error of Transformers in bfloat16, against `logits`

A checkpoint is useless as a test where rounding alone could change which experts run or which token is greedy, so
the run fails unless both margins hold; `--search N` tries N seeds and prints the best.
"""

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM
from transformers.models.cohere2_moe import modeling_cohere2_moe as modeling
from variants import BY_NAME, VARIANTS, Variant

CONTINUATION = 24  # greedy tokens after the prompt
ROUTER_MARGIN = 5e-3  # smallest gap between the last chosen and the first refused router logit
GREEDY_MARGIN = 1e-2  # smallest gap between the best two logits, in standard deviations of the logits
LEGACY = {"north", "prefix_sliding", "renormalised"}

# Standard deviation of a weight times the square root of its fan-in, chosen so that attention is peaked, router
# logits spread over a few units, and each branch moves the residual stream by about its own size.
GAINS = {
    "q_proj": 1.5,
    "k_proj": 1.5,
    "v_proj": 1.0,
    "o_proj": 1.2,
    "gate_proj": 1.4,
    "up_proj": 1.4,
    "gate_up_proj": 1.4,
    "down_proj": 1.4,
    "gate": 2.0,  # the router
}
EMBEDDING_STD = 0.3  # small beside the branches, or the tied head would only repeat the last token


def make_config(settings: dict[str, Any]) -> Cohere2MoeConfig:
    config = Cohere2MoeConfig(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def make_weights(model: Cohere2MoeForCausalLM, seed: int) -> None:
    """Overwrite every parameter with random values that bfloat16 represents exactly."""
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if "norm" in kind:
            values = rng.uniform(0.5, 1.5, parameter.shape)
        elif kind == "embed_tokens":
            values = rng.normal(size=parameter.shape) * EMBEDDING_STD
        else:
            values = rng.normal(size=parameter.shape) * GAINS[kind] / parameter.shape[-1] ** 0.5
        parameter.data.copy_(torch.from_numpy(values).to(torch.bfloat16))


def make_model(variant: Variant, seed: int) -> Cohere2MoeForCausalLM:
    model = Cohere2MoeForCausalLM(make_config(variant.settings)).eval()
    make_weights(model, seed)
    return model


def make_prompt(variant: Variant, seed: int) -> torch.Tensor:  # [1, prompt_length]
    rng = np.random.default_rng([seed, 1])
    return torch.from_numpy(rng.integers(0, variant.settings["vocab_size"], (1, variant.prompt_length)))


@contextlib.contextmanager
def float64_inside() -> Iterator[None]:
    """Make the model's source mean float64 wherever it says float32 (norms, RoPE, softmax), for an exact oracle."""

    class Float64Torch:
        float = float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    to_float = torch.Tensor.float
    modeling.torch = Float64Torch()
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        modeling.torch = torch
        torch.Tensor.float = to_float


def whole_sequence(model: Cohere2MoeForCausalLM, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """One pass without a cache; hidden states and router logits are caught by hooks."""
    hidden: list[torch.Tensor] = []
    routers: list[torch.Tensor] = []
    hooks = [model.model.embed_tokens.register_forward_hook(lambda _m, _i, out: hidden.append(out[0]))]
    for layer in model.model.layers:
        hooks.append(layer.register_forward_hook(lambda _m, _i, out: hidden.append(out[0])))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(lambda _m, _i, out: routers.append(out[0])))
    hooks.append(model.model.norm.register_forward_hook(lambda _m, _i, out: hidden.append(out[0])))
    logits = model(tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return {
        "logits": logits,
        "hidden": torch.stack(hidden[:-1]),  # [L + 1, T, D]
        "final": hidden[-1],  # [T, D]
        "router_logits": torch.stack(routers),  # [M, T, E]
    }


def greedy(model: Cohere2MoeForCausalLM, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Continue the prompt over a KV cache: tokens [1, T], logits of the new positions [1, N, V], margins [N]."""
    tokens, rows, margins = prompt, [], []
    out = model(prompt, use_cache=True)
    for _ in range(CONTINUATION):
        best = out.logits[0, -1].topk(2)
        margins.append(best.values[0] - best.values[1])
        tokens = torch.cat([tokens, best.indices[None, :1]], dim=1)
        out = model(tokens[:, -1:], cache=out.cache, use_cache=True)
        rows.append(out.logits[:, -1])
    return tokens, torch.stack(rows, dim=1), torch.stack(margins)


def router_margin(router_logits: torch.Tensor, top_k: int) -> float:
    ordered = router_logits.sort(dim=-1, descending=True).values
    return (ordered[..., top_k - 1] - ordered[..., top_k]).min().item()


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.double() - exact.double()).norm() / exact.double().norm()).item()


def search(variant: Variant, seeds: int) -> None:
    """Print the seeds with the largest router margins among those whose greedy margin is large enough."""
    top_k = variant.settings["num_experts_per_tok"]
    found = []
    for seed in range(seeds):
        model = make_model(variant, seed)
        prompt = make_prompt(variant, seed)
        if router_margin(whole_sequence(model, prompt)["router_logits"], top_k) < ROUTER_MARGIN:
            continue
        tokens, _, margins = greedy(model, prompt)
        out = whole_sequence(model, tokens)
        token = (margins.min() / out["logits"].std()).item()
        if token >= GREEDY_MARGIN:
            found.append((router_margin(out["router_logits"], top_k), token, seed))
    for router, token, seed in sorted(found, reverse=True)[:3]:
        print(f"{variant.name}: seed {seed} router margin {router:.2e} greedy margin {token:.2e}")


def write_legacy(variant: Variant, config: Cohere2MoeConfig) -> None:
    """The older spelling: a prefix length and patterns in place of lists, rope_theta at the top level."""
    written = json.loads((variant.checkpoint / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "rope_parameters"):
        written.pop(key)
    for key in ("first_k_dense_replace", "rope_theta", "sliding_window_pattern", "prefix_dense_sliding_window_pattern"):
        written[key] = variant.settings[key]
    read_back = Cohere2MoeConfig(**written)
    for key in ("layer_types", "mlp_layer_types", "rope_parameters", "prefix_dense_sliding_window_pattern"):
        assert getattr(read_back, key) == getattr(config, key), key
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (variant.checkpoint / "config_legacy.json").write_text(text)


def selected_positions(variant: Variant, length: int) -> torch.Tensor:  # [P]
    """The start, both sides of the window edge, of the page edges and of the prompt's end, the last one."""
    window = variant.settings["sliding_window"]
    edges = [window, 64, 128, 192, 256, variant.prompt_length]
    wanted = {0, 1, 2, length // 3, length - 2, length - 1} | {edge + step for edge in edges for step in (-1, 0, 1)}
    return torch.tensor(sorted(position for position in wanted if position < length), dtype=torch.int32)


def load(variant: Variant, dtype: torch.dtype) -> Cohere2MoeForCausalLM:
    # Not model.to(dtype) for bfloat16: that would round RoPE's frequencies too.
    model = Cohere2MoeForCausalLM.from_pretrained(variant.checkpoint, dtype=dtype, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    return model.eval()


def generate(variant: Variant) -> None:
    shutil.rmtree(variant.checkpoint, ignore_errors=True)
    model = make_model(variant, variant.seed)
    model.to(torch.bfloat16).save_pretrained(variant.checkpoint)
    if variant.name in LEGACY:
        write_legacy(variant, model.config)

    model = load(variant, torch.float32)
    tokens, decode_logits, margins = greedy(model, make_prompt(variant, variant.seed))
    out = whole_sequence(model, tokens)
    with float64_inside():
        exact = whole_sequence(load(variant, torch.float64), tokens)["logits"]
    bf16 = whole_sequence(load(variant, torch.bfloat16), tokens)["logits"]

    assert exact.dtype == torch.float64
    router = router_margin(out["router_logits"], variant.settings["num_experts_per_tok"])
    token = (margins.min() / out["logits"].std()).item()
    cached = relative(decode_logits, out["logits"][:, variant.prompt_length :])
    single = relative(out["logits"], exact)
    assert router >= ROUTER_MARGIN and token >= GREEDY_MARGIN, (variant.name, router, token)
    assert cached < 2e-6 and single < 2e-6, (variant.name, cached, single)

    positions = selected_positions(variant, tokens.shape[1])
    save_file(
        {
            "tokens": tokens.to(torch.int32),
            "prompt_length": torch.tensor(variant.prompt_length, dtype=torch.int32),
            "logits": out["logits"],
            "decode_logits": decode_logits,
            "margins": margins,
            "router_logits": out["router_logits"],
            "positions": positions,
            "hidden": out["hidden"][:, positions].contiguous(),
            "final": out["final"][positions].contiguous(),
            "logits_f64": exact[:, positions].contiguous(),
            "bf16_error": (bf16.float() - out["logits"]).norm(dim=-1)[0] / out["logits"].norm(dim=-1)[0],
        },
        variant.outputs,
        # One entry: the order of several is random, and a second run should write the same bytes.
        metadata={"made_with": f"torch {torch.__version__}, transformers {transformers.__version__}"},
    )
    size = variant.outputs.stat().st_size, sum(file.stat().st_size for file in variant.checkpoint.iterdir())
    print(
        f"{variant.name:14} margins: router {router:.1e}, greedy {token:.1e} σ; relative errors: float32 {single:.1e},"
        f" bfloat16 {relative(bf16, exact):.1e}, cached decode {cached:.1e}; spread: logits {out['logits'].std():.2f},"
        f" router logits {out['router_logits'].std():.2f}; {size[1] / 1e3:.0f} + {size[0] / 1e3:.0f} KB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden checkpoints and outputs of this folder.")
    parser.add_argument("names", nargs="*", help="variants, default all")
    parser.add_argument("--search", type=int, metavar="N", help="try N seeds and print the best, write nothing")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # one summation order, wherever this runs
    with torch.inference_mode():
        for variant in [BY_NAME[name] for name in arguments.names] or VARIANTS:
            if arguments.search:
                search(variant, arguments.search)
            else:
                generate(variant)


if __name__ == "__main__":
    sys.exit(main())
