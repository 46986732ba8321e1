"""Which tensors of a Hugging Face checkpoint make up which parameter.

Reading, writing and random checkpoints all walk the same table: a parameter is an array of the params tree, and a piece
is one tensor on disk that fills a block of it.

D hidden, H query heads, K KV heads, d head_dim, E experts, I expert width, F dense width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from ..config import DENSE, Config

ParamPath = tuple[str | int, ...]
"""Keys from the root of the params tree, e.g. `("layers", 3, "mlp", "gate_up")`."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class ExpertForm(Enum):
    """How the experts of a layer lie on disk. `PER_EXPERT` is the published form and the one that is written."""

    PER_EXPERT = "mlp.experts.{e}.{gate,up,down}_proj.weight"
    STACKED = "mlp.experts.{gate_up,down}_proj"
    SWITCH = "mlp.switch_mlp.{gate,up,down}_proj.weight"


@dataclass(frozen=True)
class Piece:
    """One tensor on disk: its name and shape, and the block `[start, start + block)` of the parameter that it fills.

    `block` is `shape` with leading ones added up to the parameter's rank.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def block(self) -> tuple[int, ...]:
        return (1,) * (len(self.start) - len(self.shape)) + self.shape


@dataclass(frozen=True)
class Parameter:
    """One array of the params tree and the pieces that fill it exactly once."""

    path: ParamPath
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """The path in words, e.g. `layers.3.mlp.gate_up`."""
        return ".".join(map(str, self.path))


def parameters(config: Config, names: Collection[str] = ()) -> Iterator[Parameter]:
    """All parameters in the order of the forward pass.

    Args:
      config: the model's geometry.
      names: the tensors at hand, which decide in which form a layer's experts are expected.
    """
    D, V = config.hidden_size, config.vocab_size
    forms = _expert_forms(names)
    yield _whole(("embed",), EMBEDDING, (V, D))
    for layer, mlp_type in enumerate(config.mlp_layer_types):
        yield from _attention(config, layer)
        if mlp_type == DENSE:
            yield from _dense_mlp(config, layer)
        else:
            yield from _sparse_mlp(config, layer, forms.get(layer, ExpertForm.PER_EXPERT))
    yield _whole(("final_norm",), "model.norm.weight", (D,))


def expert_biases(config: Config) -> dict[str, tuple[int, ...]]:
    """Name → shape of per-expert biases. The model has none; some checkpoints carry them, filled with zeros."""
    D, I = config.hidden_size, config.intermediate_size  # noqa: E741
    return {
        f"model.layers.{layer}.mlp.experts.{e}.{kind}_proj.bias": (width,)
        for layer, mlp_type in enumerate(config.mlp_layer_types)
        if mlp_type != DENSE
        for e in range(config.num_experts)
        for kind, width in (("gate", I), ("up", I), ("down", D))
    }


def _whole(path: ParamPath, name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(path, shape, (Piece(name, shape, (0,) * len(shape)),))


def _rows(path: ParamPath, columns: int, parts: list[tuple[str, int]]) -> Parameter:
    """A matrix [sum of rows, columns] of tensors (name, rows) below one another."""
    pieces, row = [], 0
    for name, rows in parts:
        pieces.append(Piece(name, (rows, columns), (row, 0)))
        row += rows
    return Parameter(path, (row, columns), tuple(pieces))


def _attention(config: Config, layer: int) -> Iterator[Parameter]:
    D, d = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
    at: ParamPath = ("layers", layer)
    prefix = f"model.layers.{layer}"
    yield _whole((*at, "norm"), f"{prefix}.input_layernorm.weight", (D,))
    attention = f"{prefix}.self_attn"
    parts = [(f"{attention}.{kind}_proj.weight", rows) for kind, rows in (("q", queries), ("k", keys), ("v", keys))]
    yield _rows((*at, "qkv"), D, parts)  # [(H + 2K)·d, D]
    yield _whole((*at, "o"), f"{attention}.o_proj.weight", (D, queries))


def _dense_mlp(config: Config, layer: int) -> Iterator[Parameter]:
    D, F = config.hidden_size, config.dense_intermediate_size
    at: ParamPath = ("layers", layer, "mlp")
    prefix = f"model.layers.{layer}.mlp"
    yield _rows((*at, "gate_up"), D, [(f"{prefix}.gate_proj.weight", F), (f"{prefix}.up_proj.weight", F)])  # [2F, D]
    yield _whole((*at, "down"), f"{prefix}.down_proj.weight", (D, F))


def _sparse_mlp(config: Config, layer: int, form: ExpertForm) -> Iterator[Parameter]:
    D, I, E = config.hidden_size, config.intermediate_size, config.num_experts  # noqa: E741
    at: ParamPath = ("layers", layer, "mlp")
    prefix = f"model.layers.{layer}.mlp"
    gate_up, down = ((*at, "gate_up"), (E, 2 * I, D)), ((*at, "down"), (E, D, I))
    yield _whole((*at, "router"), f"{prefix}.gate.weight", (E, D))
    match form:
        case ExpertForm.PER_EXPERT:
            experts = f"{prefix}.experts"
            halves = (("gate", 0), ("up", I))
            yield Parameter(
                *gate_up,
                tuple(
                    Piece(f"{experts}.{e}.{kind}_proj.weight", (I, D), (e, row, 0))
                    for e in range(E)
                    for kind, row in halves
                ),
            )
            yield Parameter(*down, tuple(Piece(f"{experts}.{e}.down_proj.weight", (D, I), (e, 0, 0)) for e in range(E)))
        case ExpertForm.STACKED:
            yield Parameter(*gate_up, (Piece(f"{prefix}.experts.gate_up_proj", (E, 2 * I, D), (0, 0, 0)),))
            yield Parameter(*down, (Piece(f"{prefix}.experts.down_proj", (E, D, I), (0, 0, 0)),))
        case ExpertForm.SWITCH:
            stack = f"{prefix}.switch_mlp"
            gate = Piece(f"{stack}.gate_proj.weight", (E, I, D), (0, 0, 0))
            up = Piece(f"{stack}.up_proj.weight", (E, I, D), (0, I, 0))
            yield Parameter(*gate_up, (gate, up))
            yield Parameter(*down, (Piece(f"{stack}.down_proj.weight", (E, D, I), (0, 0, 0)),))


def _expert_forms(names: Collection[str]) -> dict[int, ExpertForm]:
    """Layer → the form its experts have among `names`; where forms are mixed, one wins and the rest is surplus."""
    forms: dict[int, ExpertForm] = {}
    for name in names:
        match name.split("."):
            case ["model", "layers", layer, "mlp", "switch_mlp", *_] if layer.isdecimal():
                forms.setdefault(int(layer), ExpertForm.SWITCH)
            case ["model", "layers", layer, "mlp", "experts", "gate_up_proj" | "down_proj"] if layer.isdecimal():
                forms.setdefault(int(layer), ExpertForm.STACKED)
    return forms
