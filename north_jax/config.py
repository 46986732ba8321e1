"""Configuration of a `cohere2_moe` model, read from a Hugging Face `config.json`.

Every field of the file is accounted for: it is used, or it is known to have no influence on the forward pass, or it is
refused by name. Defaults of absent fields are those of Transformers' `Cohere2MoeConfig`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

FULL = "full_attention"
SLIDING = "sliding_attention"
DENSE = "dense"
SPARSE = "sparse"


class ConfigError(ValueError):
    """A `config.json` that is malformed, or asks for something this code does not do; the message names the field."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Geometry and constants of one model. Frozen and hashable: it is a static argument of the jitted functions."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int  # width of one routed expert
    dense_intermediate_size: int  # width of the MLP of a dense layer
    num_experts: int
    num_experts_per_tok: int
    expert_selection_fn: str  # "sigmoid", or "softmax" over the selected logits
    norm_topk_prob: bool  # divide sigmoid weights by their sum over the selected experts
    layer_types: tuple[str, ...]  # FULL or SLIDING, one a layer
    mlp_layer_types: tuple[str, ...]  # DENSE or SPARSE, one a layer
    prefix_dense_sliding_window_pattern: int  # 1: dense layers use RoPE even where they attend fully
    sliding_window: int  # keys a sliding layer sees, the query's own included
    rope_theta: float
    norm_type: str  # "rms", or "layer": mean-centred, without bias
    norm_eps: float
    logit_scale: float
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"  # of the checkpoint's weights

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def rope_layers(self) -> tuple[bool, ...]:
        """Which layers rotate queries and keys: sliding ones, and dense ones under `prefix_dense_… == 1`."""
        force = self.prefix_dense_sliding_window_pattern == 1
        return tuple(
            attention == SLIDING or (mlp == DENSE and force)
            for attention, mlp in zip(self.layer_types, self.mlp_layer_types, strict=True)
        )

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    def window(self, layer: int) -> int | None:
        """Keys that `layer` sees, or None when it attends to everything before it."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_json(cls, path: str | Path, *, ignore: Collection[str] = ()) -> Config:
        """Reads `config.json` (`path` may be the file or its directory). Raises ConfigError; see `from_dict`."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file; a checkpoint directory needs a config.json") from None
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise ConfigError(f"{file}: not valid JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{file}: expected a JSON object, found {type(raw).__name__}")
        try:
            return cls.from_dict(raw, ignore=ignore)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, ignore: Collection[str] = ()) -> Config:
        """Builds a Config from the contents of `config.json`.

        Both spellings in use are read: `layer_types` / `mlp_layer_types`, or `first_k_dense_replace` with
        `sliding_window_pattern` and `prefix_dense_sliding_window_pattern`; `rope_parameters`, or `rope_theta`.

        Args:
          raw: the parsed JSON object.
          ignore: names of fields to skip although this code does not know them.

        Raises:
          ConfigError: a field is missing, has a wrong type or value, or asks for something unsupported.
        """
        fields = _Fields(raw, ignore)
        fields.expect("model_type", "cohere2_moe", required=True)
        for name, only in _ONLY_SUPPORTED.items():
            fields.expect(name, only)
        layers = fields.integer("num_hidden_layers")
        heads = fields.integer("num_attention_heads")
        experts_width = fields.integer("intermediate_size")
        layer_types, mlp_layer_types, prefix_pattern = _layer_types(fields, layers)
        norm_type, norm_eps = _norm(fields)
        config = cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", 128),
            intermediate_size=experts_width,
            dense_intermediate_size=fields.integer("prefix_dense_intermediate_size", experts_width),
            num_experts=fields.integer("num_experts"),
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            expert_selection_fn=fields.string("expert_selection_fn", "softmax"),
            norm_topk_prob=fields.boolean("norm_topk_prob", True),
            layer_types=layer_types,
            mlp_layer_types=mlp_layer_types,
            prefix_dense_sliding_window_pattern=prefix_pattern,
            sliding_window=fields.integer("sliding_window", 4096),
            rope_theta=_rope_theta(fields),
            norm_type=norm_type,
            norm_eps=norm_eps,
            logit_scale=fields.number("logit_scale", 0.0625),
            max_position_embeddings=fields.integer("max_position_embeddings", 8192),
            bos_token_id=fields.optional_integer("bos_token_id"),
            eos_token_id=_eos_token_ids(fields),
            pad_token_id=fields.optional_integer("pad_token_id"),
            dtype=_dtype(fields),
        )
        fields.finish()
        return config

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` that Transformers 5 and `from_dict` read back to this Config."""
        eos = self.eos_token_id
        result: dict[str, Any] = {
            "architectures": ["Cohere2MoeForCausalLM"],
            "model_type": "cohere2_moe",
            "dtype": self.dtype,
            "attention_bias": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(eos) if len(eos) > 1 else (eos[0] if eos else None),
            "expert_selection_fn": self.expert_selection_fn,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layer_types": list(self.layer_types),
            "logit_scale": self.logit_scale,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_layer_types": list(self.mlp_layer_types),
            "norm_topk_prob": self.norm_topk_prob,
            "num_attention_heads": self.num_attention_heads,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_shared_experts": 0,
            "pad_token_id": self.pad_token_id,
            "prefix_dense_intermediate_size": self.dense_intermediate_size,
            "prefix_dense_sliding_window_pattern": self.prefix_dense_sliding_window_pattern,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": True,
            "vocab_size": self.vocab_size,
        }
        result["rms_norm_eps" if self.norm_type == "rms" else "layer_norm_eps"] = self.norm_eps
        return dict(sorted(result.items()))


# Fields of which one value is supported; absent, null and that value are accepted, anything else is refused by name.
_ONLY_SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_qk_norm": False,
    "num_shared_experts": 0,
    "tie_word_embeddings": True,
    "rope_scaling": None,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_embedding_sharing": True,
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "use_router_bias": False,
    "routed_scaling_factor": 1.0,
    "quantization_config": None,
    "compression_config": None,
    "is_encoder_decoder": False,
}

# Fields that say nothing about the forward pass of a decoder.
_WITHOUT_INFLUENCE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "cache_implementation",
        "chunk_size_feed_forward",
        "id2label",
        "initializer_range",
        "label2id",
        "layer_norm_eps",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "pruned_heads",
        "return_dict",
        "router_aux_loss_coef",
        "shared_expert_combination_strategy",
        "task_specific_params",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
        "use_parallel_embedding",
    }
)
_DTYPES = ("bfloat16", "float16", "float32")
_REQUIRED = object()


class _Fields:
    """A view of the raw dictionary that checks types and remembers which fields were read."""

    def __init__(self, raw: Mapping[str, Any], ignore: Collection[str]) -> None:
        self._raw = raw
        self._unread = set(raw) - _WITHOUT_INFLUENCE - set(ignore)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`; `default` where it is absent or null."""
        self._unread.discard(name)
        value = self._raw.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{name} is missing")
        return default

    def _typed(self, name: str, default: Any, kind: type | tuple[type, ...], words: str) -> Any:
        value = self.get(name, default)
        boolean_for_number = isinstance(value, bool) and kind is not bool
        if value is not None and (boolean_for_number or not isinstance(value, kind)):
            raise ConfigError(f"{name} must be {words}, found {value!r}")
        return value

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        value = self._typed(name, default, int, "a positive integer")
        if not 1 <= value < 2**31:  # sizes and positions are int32 on the device
            raise ConfigError(f"{name} must be a positive integer below 2**31, found {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return self._typed(name, None, int, "an integer or null")

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        return _finite(name, self._typed(name, default, (int, float), "a number"))

    def string(self, name: str, default: Any = _REQUIRED) -> str:
        return self._typed(name, default, str, "a string")

    def boolean(self, name: str, default: Any = _REQUIRED) -> bool:
        return self._typed(name, default, bool, "true or false")

    def names(self, name: str) -> tuple[str, ...] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} must be a list of strings, found {value!r}")
        return tuple(value)

    def expect(self, name: str, only: Any, *, required: bool = False) -> None:
        value = self.get(name, _REQUIRED if required else only)
        if value != only:
            raise ConfigError(f"{name} = {value!r} is not supported (only {only!r} is)")

    def finish(self) -> None:
        """Refuses fields nobody read. null says nothing; false and 0 may switch something off."""
        unknown = sorted(name for name in self._unread if self._raw[name] is not None)
        if unknown:
            listed = ", ".join(f"{name} = {self._raw[name]!r}" for name in unknown)
            raise ConfigError(
                f"unknown fields: {listed}. They may change what the model computes; if you know that they do not, "
                f"pass ignore={unknown!r}"
            )


def _layer_types(fields: _Fields, layers: int) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """(layer_types, mlp_layer_types, prefix pattern), given or derived as Transformers derives them."""
    layer_types = fields.names("layer_types")
    mlp_layer_types = fields.names("mlp_layer_types")
    prefix_pattern = fields.integer("prefix_dense_sliding_window_pattern", 1)
    pattern = fields.integer("sliding_window_pattern", 4)
    dense = fields.get("first_k_dense_replace", 0)
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense <= layers:
        raise ConfigError(f"first_k_dense_replace must be an integer from 0 to num_hidden_layers, found {dense!r}")

    def types(count: int, every: int) -> tuple[str, ...]:
        return tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(count))

    if layer_types is None:
        layer_types = types(dense, prefix_pattern) + types(layers - dense, pattern)
    if mlp_layer_types is None:
        mlp_layer_types = (DENSE,) * dense + (SPARSE,) * (layers - dense)
    return layer_types, mlp_layer_types, prefix_pattern


def _norm(fields: _Fields) -> tuple[str, float]:
    """RMSNorm where `rms_norm_eps` is set, else the family's LayerNorm."""
    if fields.get("rms_norm_eps") is not None:
        return "rms", fields.number("rms_norm_eps")
    return "layer", fields.number("layer_norm_eps", 1e-5)


def _finite(name: str, value: float) -> float:
    """The number as a float: JSON as Python reads it knows NaN, infinities and integers beyond any float."""
    if not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{name} must be a finite number, found {value!r}")
    return float(value)


def _rope_theta(fields: _Fields) -> float:
    """The base of the rotary frequencies; any scaling of them is refused."""
    parameters = fields.get("rope_parameters")
    theta = fields.number("rope_theta") if fields.get("rope_theta") is not None else None
    if parameters is None:
        if theta is None:
            raise ConfigError("rope_theta is missing (neither rope_parameters nor rope_theta is given)")
        return theta
    if not isinstance(parameters, dict):
        raise ConfigError(f"rope_parameters must be an object, found {parameters!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope_parameters.rope_type = {kind!r} is not supported (only 'default' is)")
    extra = sorted(
        name
        for name, value in parameters.items()
        if name not in ("rope_theta", "rope_type", "type")
        and value is not None
        and not (name == "partial_rotary_factor" and value == 1)
    )
    if extra:
        raise ConfigError(f"rope_parameters.{extra[0]} = {parameters[extra[0]]!r} is not supported")
    inner = parameters.get("rope_theta", theta)  # Transformers 5 may write its class default beside it: this one counts
    if isinstance(inner, bool) or not isinstance(inner, int | float):
        raise ConfigError(f"rope_parameters.rope_theta must be a number, found {inner!r}")
    return _finite("rope_parameters.rope_theta", inner)


def _eos_token_ids(fields: _Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"eos_token_id must be an integer or a list of integers, found {value!r}")
    return tuple(ids)


def _dtype(fields: _Fields) -> str:
    old, new = fields.get("torch_dtype"), fields.get("dtype")
    value = new or old or "bfloat16"
    if value not in _DTYPES:
        raise ConfigError(f"dtype = {value!r} is not supported (one of {', '.join(_DTYPES)} is)")
    return value


def _validate(config: Config) -> None:
    """Relations between fields that the forward pass relies on."""
    layers = config.num_hidden_layers
    for name, allowed in (("layer_types", (FULL, SLIDING)), ("mlp_layer_types", (DENSE, SPARSE))):
        values = getattr(config, name)
        if len(values) != layers:
            raise ConfigError(f"{name} has {len(values)} entries, num_hidden_layers is {layers}")
        for layer, value in enumerate(values):
            if value not in allowed:
                raise ConfigError(f"{name}[{layer}] = {value!r} is not supported (only {' and '.join(allowed)} are)")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads ({config.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_key_value_heads})"
        )
    if config.head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary pairs, found {config.head_dim}")
    if config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"num_experts_per_tok ({config.num_experts_per_tok}) exceeds num_experts ({config.num_experts})"
        )
    if config.expert_selection_fn not in ("sigmoid", "softmax"):
        raise ConfigError(f"expert_selection_fn = {config.expert_selection_fn!r} is not supported (sigmoid, softmax)")
    if config.norm_type not in ("rms", "layer"):
        raise ConfigError(f"norm_type = {config.norm_type!r} is not supported (rms, layer)")
    if not config.norm_eps > 0 or not config.rope_theta > 0:
        raise ConfigError(f"norm_eps ({config.norm_eps}) and rope_theta ({config.rope_theta}) must be positive")
    for name in ("bos_token_id", "pad_token_id"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < config.vocab_size:
            raise ConfigError(f"{name} = {value} lies outside the vocabulary of {config.vocab_size}")
    for value in config.eos_token_id:
        if not 0 <= value < config.vocab_size:
            raise ConfigError(f"eos_token_id = {value} lies outside the vocabulary of {config.vocab_size}")
