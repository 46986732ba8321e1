"""Run one text through every backend and see, layer by layer and tensor by tensor, how far each is from float32.

    python -m north_jax.compare
    python -m north_jax.compare --model DIR --tokens 4096 --steps 64
    python -m north_jax.compare --random-weights config.json --backends jax warp cuda

JAX writes a greedy text in the weights' type; all backends are given its tokens, and are compared with JAX in float32
on the same weights at the positions that the tokens are drawn from: queries, keys, values, what attention and MLP add,
the layer's output, router logits, logits. Then each writes a greedy text of its own. A choice of experts, or a place
where texts part, is a near tie if float32's margin is below four times what rounding to the weights' type moves it by.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..model_options import ChosenModel, add_model, answer, at_least, chosen_model
from ..provenance import provenance
from .backends import LABELS, subjects
from .comparison import compare
from .heat_map import heat_map
from .passes import TENSORS
from .tables import tables

_TEXT = Path(__file__).parents[1] / "layers.py"  # the prompt where none is given: Python that is always there


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m north_jax.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(made)
    made.add_argument(
        "--backends", nargs="+", metavar="NAME", help=f"of {', '.join(LABELS)} (default: what works here)"
    )
    made.add_argument("--prompt", type=Path, metavar="FILE", help="its text (default: Python source; random: tokens)")
    made.add_argument(
        "--tokens", type=at_least(1), default=256, help="of the prompt, from its beginning (default: %(default)s)"
    )
    made.add_argument("--steps", type=at_least(1), default=32, help="tokens that are compared (default: %(default)s)")
    made.add_argument(
        "--out",
        type=Path,
        default=Path("compare"),
        metavar="STEM",
        help="where results go: STEM.json and STEM.svg (default: %(default)s)",
    )
    return made


def prompt_of(options: argparse.Namespace, model: ChosenModel) -> list[int]:
    """The tokens. Raises ValueError where there are none."""
    if model.tokenizer is None:
        if options.prompt is not None:
            raise ValueError("--prompt: random weights have no tokenizer")
        rng = np.random.default_rng(0)
        return rng.integers(0, model.config.vocab_size, options.tokens).tolist()
    text = (options.prompt or _TEXT).read_text(encoding="utf-8")
    tokens = model.tokenizer.encode_text(text)
    if not tokens:
        raise ValueError(f"{options.prompt}: no text")
    start = [] if model.tokenizer.bos_id is None else [model.tokenizer.bos_id]
    return [*start, *tokens][: options.tokens]


def run(options: argparse.Namespace) -> None:
    """Compares, prints the tables, writes the files.

    Raises one of `model_options.MISTAKES` for arguments that do not fit.
    """
    model = chosen_model(options)
    prompt = prompt_of(options, model)
    taken, left_out = subjects(model.config, model.params, options.backends)
    for name, reason in left_out.items():
        print(f"{LABELS[name]}: left out, {reason}")
    results = compare(
        model.config,
        model.params,
        taken,
        prompt,
        options.steps,
        progress=lambda line: print(f"… {line}", file=sys.stderr, flush=True),
    )
    print("\n".join(tables(results)))
    whole: dict[str, Any] = {
        "provenance": provenance("north_jax.compare"),
        "model": model.title,
        "dtype": model.params["embed"].dtype.name,
        "prompt_tokens": len(prompt),
        "steps": options.steps,
        "tensors": TENSORS,
        "left_out": left_out,
        "backends": [result.as_row() for result in results],
    }
    title = f"{model.title}, {whole['dtype']}, {options.steps} positions after {len(prompt)} tokens"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    files = options.out.with_name(options.out.name + ".json"), options.out.with_name(options.out.name + ".svg")
    files[0].write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    files[1].write_text(heat_map(results, title), encoding="utf-8")
    print(f"\nwritten: {files[0]}, {files[1]}")


def main() -> None:
    answer(parser(), run)


if __name__ == "__main__":
    main()
