"""The model that is served: what it will be, before its weights take minutes and memory; then the weights."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from north_jax.checkpoint import Checkpoint, load
from north_jax.checkpoint.huggingface import open_huggingface
from north_jax.checkpoint.layout import EMBEDDING
from north_jax.checkpoint.orbax import is_orbax
from north_jax.checkpoint.progress import Progress
from north_jax.checkpoint.safetensors_file import DTYPES
from north_jax.config import Config
from north_jax.model import param_shapes
from north_jax.random_weights.weights import random_params

from .options import Options

_LOG = logging.getLogger("serve")
_RANDOM_SEED = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """A model whose weights are not loaded yet."""

    config: Config  # with the type that the embedding will have
    weights: int  # bytes
    quantized: bool  # whether experts stay in eight bits


def look_at(directory: Path, options: Options) -> Outlook:
    """Reads configuration and headers.

    Raises ConfigError and CheckpointError as `north_jax.load` does, except for what only the values can show.
    """
    told = None if options.dtype == "auto" else options.dtype
    if options.random_weights or is_orbax(directory):
        config = Config.from_json(directory / "config.json")
        config = config if told is None else replace(config, dtype=told)
        return Outlook(config, _bytes_of(config), quantized=False)
    checkpoint = open_huggingface(directory)
    if checkpoint.strategy is not None:
        # Scales and what is multiplied out to 16 bits, all matrices but experts, are a small part beside these bytes.
        weights = sum(t.nbytes * (1 if ".experts." in t.name else 2) for t in checkpoint.tensors.values())
        return Outlook(checkpoint.config, weights, quantized=True)
    config = replace(checkpoint.config, dtype=told or DTYPES[checkpoint.tensors[EMBEDDING].dtype].name)
    weights = _bytes_of(config)
    if told is None:  # a type of its own for every tensor
        weights = max(weights, sum(tensor.nbytes for tensor in checkpoint.tensors.values()))
    return Outlook(config, weights, quantized=False)


def load_weights(outlook: Outlook, directory: Path, options: Options, progress: Progress | None) -> Checkpoint:
    """The weights on the device. Raises as `north_jax.load` does."""
    if options.random_weights:
        _LOG.warning("the weights are random: what is answered means nothing")
        return Checkpoint(outlook.config, random_params(outlook.config, seed=_RANDOM_SEED), directory)
    return load(options.model, dtype=None if options.dtype == "auto" else options.dtype, progress=progress)


def _bytes_of(config: Config) -> int:
    """Of all parameters in the configuration's type."""
    elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(config)))
    return elements * jnp.dtype(config.dtype).itemsize
