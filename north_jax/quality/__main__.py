"""Score a checkpoint through JAX and through the megakernel: bits per byte of held-out code, and a small code task.

    python -m north_jax.quality
    python -m north_jax.quality --model DIR --out quality.json

Every seed draws excerpts of the held-out files (Python that North Nano never saw, from CPython 3.13.0) and functions of
them, whose bodies the model writes. A body is valid if the function parses and does something, and sensible if it also
reads a parameter; it is parsed, never run. Both backends get the same excerpts, prompts and random numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..model_options import ChosenModel, add_model, answer, at_least, chosen_model
from ..provenance import provenance
from .held_out import HELD_OUT, held_out_texts
from .measure import Completions, Plan, Spread, Texts, bits_per_byte, completions
from .scorer import Scorer

BACKENDS = ("jax", "warp", "megakernel")
_TITLES = {"bits_per_byte": "bits per byte", "valid": "valid bodies", "sensible": "sensible bodies"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m north_jax.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(made)
    plan = Plan()
    made.add_argument("--backends", nargs="+", choices=BACKENDS, default=["jax", "megakernel"], help="(default: both)")
    made.add_argument("--seeds", type=at_least(1), default=7, help="(default: %(default)s)")
    made.add_argument(
        "--held-out",
        type=Path,
        default=HELD_OUT,
        metavar="PATH",
        help="a folder of Python files, or JSON lines with path and text in xz (default: those of the package)",
    )
    for name, text in (
        ("excerpts", "pieces of held-out text of a seed"),
        ("length", "tokens of each"),
        ("functions", "completions of a seed"),
        ("prompt", "most tokens before one"),
        ("written", "most tokens of one"),
        ("rows", "texts computed together"),
    ):
        least = 2 if name in ("length", "prompt") else 1
        made.add_argument(
            f"--{name}", type=at_least(least), default=getattr(plan, name), help=f"{text} (default: %(default)s)"
        )
    made.add_argument("--temperature", type=float, default=plan.temperature, help="(default: %(default)s)")
    made.add_argument("--top-p", type=float, default=plan.top_p, help="(default: %(default)s)")
    made.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the figures")
    return made


def measure(model: ChosenModel, backend: Any, texts: Texts, plan: Plan, seeds: int) -> dict[str, Any]:
    """All seeds of one backend: measure → Spread, and "texts", the completions of each seed."""
    scorer = Scorer(model.config, model.params, backend=backend, rows=plan.rows, max_context=plan.context)
    assert model.tokenizer is not None
    bits: list[float] = []
    written: list[Completions] = []
    for seed in range(seeds):
        print(f"… {backend}: seed {seed}", file=sys.stderr, flush=True)
        bits.append(bits_per_byte(scorer, model.tokenizer, texts, plan, seed))
        written.append(completions(scorer, model.tokenizer, texts, plan, seed))
    return {
        "bits_per_byte": Spread.of(bits),
        "valid": Spread.of([one.valid for one in written]),
        "sensible": Spread.of([one.sensible for one in written]),
        "texts": [one.texts for one in written],
    }


def table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A column a backend, and one for the difference of each from the first, seed by seed."""
    first, *others = found
    yield f"| | {' | '.join([*found, *(f'{name} − {first}' for name in others)])} |"
    yield f"| --- |{' ---: |' * (len(found) + len(others))}"
    for measure, title in _TITLES.items():
        spreads = [str(of[measure]) for of in found.values()]
        spreads += [str(difference(found[name][measure], found[first][measure])) for name in others]
        yield f"| {title} | {' | '.join(spreads)} |"


def difference(ours: Spread, theirs: Spread) -> Spread:
    """Of the same seeds."""
    return Spread.of([a - b for a, b in zip(ours.values, theirs.values, strict=True)])


def same_texts(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of every backend but the first: the share of its completions that are the first one's, token by token."""
    first, *others = found
    theirs = [text for seed in found[first]["texts"] for text in seed]
    shares = {}
    for name in others:
        own = [text for seed in found[name]["texts"] for text in seed]
        shares[name] = sum(a == b for a, b in zip(own, theirs, strict=True)) / len(own)
    return shares


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints the table, writes the file.

    Raises one of `model_options.MISTAKES` for arguments that do not fit.
    """
    plan = Plan(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Plan)})
    texts = held_out_texts(options.held_out)
    model = chosen_model(options, needs_text=True)
    plan.check(model.config)
    found = {name: measure(model, name, texts, plan, options.seeds) for name in dict.fromkeys(options.backends)}
    print(f"{model.title}, {model.params['embed'].dtype.name}, {options.seeds} seeds, mean ± deviation")
    print("\n".join(table(found)))
    same = same_texts(found)
    for name, share in same.items():
        print(f"{share:.0%} of the completions of {name} are those of {options.backends[0]}, token by token")
    whole = {
        "provenance": provenance("north_jax.quality"),
        "model": model.title,
        "dtype": model.params["embed"].dtype.name,
        "plan": dataclasses.asdict(plan),
        "backends": {
            name: {measure: dataclasses.asdict(of[measure]) for measure in _TITLES} for name, of in found.items()
        },
        "same_completions": same,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.out}")
    return whole


def main() -> None:
    answer(parser(), run)


if __name__ == "__main__":
    main()
