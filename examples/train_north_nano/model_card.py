"""Write North Nano's model card from its files and the figures of training and evaluation.

python -m examples.train_north_nano.model_card --figures figures.json --corpus corpus.json --log log.jsonl
"""

import argparse
import json
import string
from pathlib import Path
from typing import Any

import jax

import north_jax.nano
from north_jax.config import FULL, Config
from north_jax.model import param_shapes

from .prepare import STREAMS
from .train import MIX

NANO = Path(north_jax.nano.__file__).parent
TEMPLATE = Path(__file__).parent / "model_card.template.md"


def architecture(config: Config) -> dict[str, Any]:
    """The placeholders that the configuration fills."""
    return {
        "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config))):,}",
        "layers": config.num_hidden_layers,
        "last": config.num_hidden_layers - 1,
        "full_layers": " and ".join(str(i) for i, kind in enumerate(config.layer_types) if kind == FULL),
        "nope_layers": ", ".join(str(i) for i, rope in enumerate(config.rope_layers) if not rope),
        "window": config.sliding_window,
        "theta": f"{config.rope_theta:.0f}",
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "dense_width": config.dense_intermediate_size,
        "experts": config.num_experts,
        "expert_width": config.intermediate_size,
        "top_k": config.num_experts_per_tok,
        "vocab": config.vocab_size,
        "context": config.max_position_embeddings,
        "bytes": f"{(NANO / 'model.safetensors').stat().st_size:,}",
    }


def evaluation(figures: dict[str, Any]) -> dict[str, Any]:
    """The placeholders that evaluate.py's figures fill."""
    bits = {name: f"{figures[name]:.2f}" for name in ("stream_model", "stream_xz", "files_model", "files_xz")}
    return bits | {
        "held_out_files": figures["files"],
        "held_out_bytes": f"{figures['bytes']:,}",
        "measured_context": figures["context"],
        "worst": f"{figures['files_model_worst_ratio']:.0%}",
        "positions": ", ".join(f"{nats:.2f}" for nats in figures["nats_by_position"]),
    }


def training(corpus: dict[str, Any], log: list[dict[str, Any]]) -> dict[str, Any]:
    """The placeholders that corpus.py's report and train.py's log fill."""
    start, end = log[0], log[-1]
    rows = (f"| {name} | {at['licence']} | {at['bytes']:,} |" for name, at in sorted(corpus["sources"].items()))
    return {
        "training_files": f"{corpus['training']['files']:,}",
        "training_bytes": f"{corpus['training']['bytes']:,}",
        "mix": ", ".join(f"{MIX[name]:.0%} {name}" for name in STREAMS),
        "tokens": f"{end['tokens'] / 1e6:,.0f} million",
        "steps": f"{end['step']:,}",
        "batch_tokens": f"{start['batch'] * start['context']:,}",
        "row": start["context"],
        "load_min": min(end["load_min"]),
        "load_max": max(end["load_max"]),
        "device": start["device"],
        "minutes": f"{end['seconds'] / 60:.1f}",
        "sources": "\n".join(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, required=True, help="what evaluate.py wrote")
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.json, as corpus.py wrote it")
    parser.add_argument("--log", type=Path, required=True, help="log.jsonl, as train.py wrote it")
    arguments = parser.parse_args()
    generation = json.loads((NANO / "generation_config.json").read_text())
    sampling = f"temperature {generation['temperature']}, top-p {generation['top_p']}"
    values = (
        architecture(Config.from_json(NANO))
        | evaluation(json.loads(arguments.figures.read_text()))
        | training(json.loads(arguments.corpus.read_text()), list(map(json.loads, arguments.log.open())))
        | {"sampling": sampling}
    )
    (NANO / "MODEL_CARD.md").write_text(string.Template(TEMPLATE.read_text()).substitute(values))


if __name__ == "__main__":
    main()
