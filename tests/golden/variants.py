"""The table of golden variants: what `make_golden.py` generates and what the tests walk through.

A variant is a tiny random `cohere2_moe` model. `BASE` has North Mini Code's own shape in miniature: a dense layer 0
with full attention and RoPE, then three sliding layers to one full NoPE layer, eight query heads per KV head, and a
sigmoid router whose top-k weights are not renormalised. Every other row changes what its comment says.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 12,
    "prefix_dense_intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": False,
    "first_k_dense_replace": 1,
    "prefix_dense_sliding_window_pattern": 1,
    "sliding_window_pattern": 4,
    "sliding_window": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "logit_scale": 1.0,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "bos_token_id": 5,
}


@dataclass(frozen=True)
class Variant:
    """One tiny model: what differs from `BASE`, the seed of its weights and prompt, and the prompt's length."""

    name: str
    seed: int
    changes: dict[str, Any] = field(default_factory=dict)
    prompt_length: int = 48

    @property
    def settings(self) -> dict[str, Any]:
        return BASE | self.changes

    @property
    def checkpoint(self) -> Path:
        """Directory in the Hugging Face layout: config.json, model.safetensors, generation_config.json."""
        return GOLDEN / self.name

    @property
    def outputs(self) -> Path:
        """What Transformers computed from that checkpoint."""
        return GOLDEN / f"{self.name}.outputs.safetensors"


SLIDING, FULL = "sliding_attention", "full_attention"

VARIANTS = (
    Variant("north", seed=29),
    # Three dense layers in front, all full with RoPE; then one sliding layer to one full.
    Variant(
        "prefix3",
        seed=51,
        changes={
            "first_k_dense_replace": 3,
            "sliding_window_pattern": 2,
            "num_attention_heads": 8,
        },
    ),
    # A sliding pattern inside the prefix: its full layer (1) then has no RoPE, unlike North's.
    Variant(
        "prefix_sliding",
        seed=178,
        changes={
            "first_k_dense_replace": 3,
            "prefix_dense_sliding_window_pattern": 2,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
        },
    ),
    # Softmax over the selected logits, no dense layer at all.
    Variant(
        "softmax",
        seed=184,
        changes={
            "expert_selection_fn": "softmax",
            "norm_topk_prob": True,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 0,
            "prefix_dense_intermediate_size": None,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    # Sigmoid weights divided by their sum; dense width left out, so it is the experts' width.
    Variant(
        "renormalised",
        seed=321,
        changes={
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "logit_scale": 0.25,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "prefix_dense_intermediate_size": None,
        },
    ),
    # No rms_norm_eps: mean-centred LayerNorm. As many KV heads as query heads.
    Variant(
        "layer_norm",
        seed=396,
        changes={
            "rms_norm_eps": None,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
        },
    ),
    # One wide KV head for all query heads, and a window that no prompt here fills.
    Variant(
        "head64",
        seed=75,
        changes={
            "head_dim": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "sliding_window": 128,
            "rope_theta": 10000.0,
        },
    ),
    # An odd vocabulary, head size 16, an odd number of experts.
    Variant(
        "odd_vocab",
        seed=360,
        changes={
            "vocab_size": 197,
            "head_dim": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
        },
    ),
    # A single expert per token, a very small window, a hidden size that is no power of two. The configuration gives
    # RoPE's base as Transformers 5 writes it: in rope_parameters, beside a rope_theta that is only its own default.
    Variant(
        "top1",
        seed=395,
        changes={
            "hidden_size": 40,
            "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
            "rope_theta": 10000.0,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "sliding_window": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
    ),
    # Layer lists no pattern gives: a dense full layer in the middle (RoPE) and a dense sliding layer at the end.
    Variant(
        "irregular",
        seed=266,
        changes={
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, FULL, SLIDING],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "sliding_window": 11,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
        },
    ),
    # Long enough for a ring of pages to wrap: several 64-token pages, a window that crosses them.
    Variant(
        "long",
        seed=334,
        changes={
            "vocab_size": 64,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "sliding_window": 70,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
        },
        prompt_length=264,
    ),
)

BY_NAME = {variant.name: variant for variant in VARIANTS}
