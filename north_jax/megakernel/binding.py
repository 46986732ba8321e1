"""A model and its schedules as the compiled decode engine takes them: addresses, sizes, task lists."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

import ffi

from ..config import Config
from ..decoding import BackendError
from ..layers import Params, rope_frequencies
from .abi import Buffer, Weight
from .layout import activation_type
from .schedule import Schedule

if TYPE_CHECKING:
    from ffi._native import DecodeEngine, Geometry

_NOWHERE = 1 << 12  # an address for weights that are never read


def make_engine(config: Config, params: Params) -> DecodeEngine:
    """Binds a compiled decode engine to a model's weights, by address; it keeps the arrays alive.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters": arrays of one type on one device.

    Raises:
      BackendError: the weights are not of one supported type, or not on one device: the message names one. Or nothing
        compiled decodes this model on that device.
    """
    weights = dict(_weights(config, params))
    arrays = {number: array for number, (_, array) in weights.items()}
    device = _check(list(weights.values()))
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    if not ffi.available(platform):
        raise BackendError(f"the megakernel needs compiled code for {platform}; this installation: {ffi.build_info()}")
    jax.block_until_ready(list(arrays.values()))
    matrices = {number: (array.unsafe_buffer_pointer(), *_sizes(array)) for number, array in arrays.items()}
    return _engine(config, platform, params["embed"].dtype.name, matrices, arrays)


def make_shape_engine(config: Config, shapes: Params) -> DecodeEngine:
    """An engine without weights, which can judge schedules and not run them.

    Args:
      config: the model's configuration.
      shapes: the parameters' tree with a `jax.ShapeDtypeStruct` at every leaf.

    Raises:
      BackendError: nothing is compiled, or nothing compiled decodes this model.
    """
    if not ffi.available("cpu"):
        raise BackendError(f"nothing is compiled that could judge a schedule; this installation: {ffi.build_info()}")
    matrices = {number: (_NOWHERE, *_sizes(array)) for number, (_, array) in _weights(config, shapes)}
    return _engine(config, "cpu", shapes["embed"].dtype.name, matrices, {})


def _engine(
    config: Config, platform: str, dtype: str, matrices: Mapping[int, tuple[int, int, int]], owner: object
) -> DecodeEngine:
    """Of matrices (address, rows, columns) by their number in the weight table."""
    numbers = range((config.num_hidden_layers + 1) * len(Weight))
    try:
        engine: DecodeEngine = importlib.import_module("ffi._native").DecodeEngine(
            platform=platform,
            dtype=dtype,
            geometry=_geometry(config),
            weights=[matrices.get(number, (0, 0, 0)) for number in numbers],
            frequencies=_frequencies(config).tolist(),
            owner=owner,
        )
    except ValueError as error:
        raise BackendError(str(error)) from error
    return engine


def add_schedule(engine: DecodeEngine, schedule: Schedule) -> int:
    """Gives a schedule to an engine of its model; returns the number to queue quanta with.

    Raises:
      ValueError: its lists do not fit the model or each other: the message names the task and the field.
    """
    places = [(0, 0, 0, 0)] * (max(Buffer) + 1)
    for name, spec in schedule.workspace.buffers.items():
        places[name] = (schedule.workspace.offsets[name], spec.plane_bytes, spec.planes, spec.shape[0])
    return engine.add_schedule(
        batch=schedule.batch,
        tasks=schedule.tasks,
        begin=schedule.begin,
        counter_needs=schedule.counter_needs,
        counter_names=schedule.counter_names,
        queue_names=schedule.queue_names,
        buffers=places,
        workspace_bytes=schedule.workspace.bytes,
    )


def _weights(config: Config, params: Params) -> Iterator[tuple[int, tuple[str, jax.Array]]]:
    """(number in the weight table, (name, array)) of every weight that the model has."""
    for number in range(config.num_hidden_layers):
        layer, base = params["layers"][number], number * len(Weight)
        for kind, name in ((Weight.NORM, "norm"), (Weight.QKV, "qkv"), (Weight.OUT, "o")):
            yield base + kind, (f"layers.{number}.{name}", layer[name])
        for kind, name in ((Weight.ROUTER, "router"), (Weight.GATE_UP, "gate_up"), (Weight.DOWN, "down")):
            if name in layer["mlp"]:
                yield base + kind, (f"layers.{number}.mlp.{name}", layer["mlp"][name])
    base = config.num_hidden_layers * len(Weight)
    yield base + Weight.EMBED, ("embed", params["embed"])
    yield base + Weight.FINAL_NORM, ("final_norm", params["final_norm"])


def _check(weights: Sequence[tuple[str, jax.Array]]) -> jax.Device:
    """The device that all weights are on."""
    for name, array in weights:
        if not isinstance(array, jax.Array):
            raise BackendError(f"{name} is a {type(array).__name__}, the megakernel takes arrays on a device")
    first_name, first = weights[0]
    try:
        activation_type(first.dtype)
    except ValueError as error:
        raise BackendError(f"{first_name}: {error}") from error
    for name, array in weights:
        if array.dtype != first.dtype:
            raise BackendError(f"{name} is {array.dtype}, {first_name} is {first.dtype}; the megakernel takes one type")
        if len(array.devices() | first.devices()) > 1:
            raise BackendError(f"the megakernel runs on one device, {name} has the sharding {array.sharding}")
    return next(iter(first.devices()))


def _sizes(array: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, int]:
    """Rows and columns."""
    return math.prod(array.shape[:-1]), array.shape[-1]


def _geometry(config: Config) -> Geometry:
    geometry: Geometry = importlib.import_module("ffi._native").Geometry()
    geometry.hidden, geometry.layers = config.hidden_size, config.num_hidden_layers
    geometry.heads, geometry.kv_heads = config.num_attention_heads, config.num_key_value_heads
    geometry.head_dim = config.head_dim
    geometry.expert_width, geometry.dense_width = config.intermediate_size, config.dense_intermediate_size
    geometry.experts, geometry.top_k = config.num_experts, config.num_experts_per_tok
    geometry.vocabulary = config.vocab_size
    geometry.norm_eps, geometry.logit_scale = config.norm_eps, config.logit_scale
    geometry.layer_norm = config.norm_type == "layer"
    geometry.softmax_router = config.expert_selection_fn == "softmax"
    geometry.renormalise = config.norm_topk_prob
    return geometry


def _frequencies(config: Config) -> np.ndarray:
    """[d/2] float32, computed under jit as the models' are: that may differ in the last bit from outside it."""
    return np.asarray(jax.jit(lambda: rope_frequencies(config))())
