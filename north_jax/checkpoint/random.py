"""Checkpoints of random weights, of any size, in the Hugging Face layout: for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config
from .huggingface_writer import write_directory
from .layout import EMBEDDING, parameters
from .safetensors_file import weight_dtype

_BLOCK = 1 << 20  # elements


def write_random_checkpoint(
    path: str | Path,
    config: Config,
    seed: int = 0,
    dtype: Any = "bfloat16",
    *,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint of `config` with normally distributed weights, one tensor at a time.

    Projections have deviation fan_in^-½, so activations keep their scale; the embedding 2·D^-½, so logits have
    deviation about 2; norms are 1 ± 0.1. The same arguments give the same bytes.

    Args:
      path: the directory to write.
      config: the model's geometry; its `dtype` is replaced by `dtype`.
      seed: of the random generator.
      dtype: bfloat16, float16 or float32.
      max_shard_bytes, overwrite: as for `export`.

    Raises:
      CheckpointError: `path` exists, or `dtype` is none of these.
    """
    kind = weight_dtype(dtype)
    shapes = {piece.name: piece.shape for parameter in parameters(config) for piece in parameter.pieces}
    number = {name: i for i, name in enumerate(shapes)}

    def values(names: Iterable[str]) -> Iterator[np.ndarray]:
        for name in names:
            rng = np.random.default_rng([seed, number[name]])
            yield _normal(rng, *_mean_and_deviation(name, shapes[name]), shapes[name], kind)

    write_directory(
        path,
        dataclasses.replace(config, dtype=kind.name),
        {name: (kind, shape) for name, shape in shapes.items()},
        values,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def _mean_and_deviation(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if len(shape) == 1:
        return 1.0, 0.1
    return 0.0, (2.0 if name == EMBEDDING else 1.0) / math.sqrt(shape[-1])


def _normal(
    rng: np.random.Generator, mean: float, deviation: float, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """A normal array, drawn in blocks so that little is held in float32."""
    values = np.empty(math.prod(shape), dtype)
    for begin in range(0, values.size, _BLOCK):
        block = values[begin : begin + _BLOCK]
        block[:] = rng.standard_normal(block.size, np.float32) * np.float32(deviation) + np.float32(mean)
    return values.reshape(shape)
