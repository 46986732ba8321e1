"""What others reach on the same GPU."""

from __future__ import annotations

# vLLM 0.24.0 on one H200 (torch 2.11, FlashAttention 3, Triton experts with their H200 tuning file, full CUDA graphs;
# random weights of this geometry in bfloat16, KV cache filled, only decode runs): tok/s over all rows, by batch.
# Skewed routing is its figure without the 0.79 ms a step that simulating the routing cost there.
_VLLM = {
    ("uniform", 1024): {1: 231, 2: 390, 4: 600, 8: 850, 16: 1232, 32: 1935},
    ("uniform", 8192): {1: 224, 2: 372, 4: 563, 8: 787, 16: 1104, 32: 1630},
    ("uniform", 32768): {1: 216, 2: 352, 4: 520, 8: 704, 16: 952, 32: 1302},
    ("uniform", 131072): {1: 191},
    ("skewed", 8192): {1: 224, 2: 379, 4: 611, 8: 924, 16: 1386, 32: 2021},
}

# The same, one prompt to its first token, in milliseconds, by its tokens.
_VLLM_PREFILL = {128: 84, 512: 50, 2048: 50, 8192: 145, 32768: 763}

# One MoE layer (128 experts, top-8, 2048 × 768, bfloat16) by vLLM 0.24.0's fused Triton experts in a CUDA graph on one
# H200, uniform routing, weights rotating over six layers: microseconds by tokens.
_VLLM_EXPERTS = {1: 32.0, 2: 49.2, 4: 79.6, 8: 136.5, 16: 204.5, 32: 260.7, 64: 302.2}


def vllm(routing: str, context: int, batch: int) -> int | None:
    """vLLM's tok/s, None where it was not measured."""
    return _VLLM.get((routing, context), {}).get(batch)


def vllm_prefill(tokens: int) -> int | None:
    """vLLM's milliseconds for a prompt of so many tokens, None where it was not measured."""
    return _VLLM_PREFILL.get(tokens)


def vllm_experts(tokens: int) -> float | None:
    """Microseconds of vLLM's fused experts for one layer of North's shape, None where it was not measured."""
    return _VLLM_EXPERTS.get(tokens)
