"""The params tree by paths: look-up, building, and the check that a tree is what a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ..config import Config
from ..layers import Params
from .errors import CheckpointError, enumerate_names
from .layout import ParamPath, parameters

Shardings = Sharding | Callable[[ParamPath, tuple[int, ...]], Sharding | None] | Mapping[Any, Any] | None
"""Where parameters go: one sharding for all, a function of path and shape, or a tree like the params tree.

None, at the top or for one parameter, means the default device.
"""


def leaves(tree: Mapping[Any, Any], path: ParamPath = ()) -> Iterator[tuple[ParamPath, Any]]:
    """Every leaf with its path."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def build(items: Mapping[ParamPath, Any]) -> Params:
    """The nested dict whose leaves are `items`."""
    tree: Params = {}
    for path, value in items.items():
        node: Any = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def sharding_of(shardings: Shardings, path: ParamPath, shape: tuple[int, ...]) -> Sharding | None:
    """The sharding of one parameter.

    Raises:
      CheckpointError: the sharding does not divide the shape, or the tree of shardings lacks the parameter.
    """
    name = ".".join(map(str, path))
    if shardings is None or isinstance(shardings, Sharding):
        sharding = shardings
    elif callable(shardings):
        sharding = shardings(path, shape)
    else:
        node: Any = shardings
        for key in path:
            if not isinstance(node, Mapping) or key not in node:
                raise CheckpointError(f"shardings has no entry for {name}")
            node = node[key]
        sharding = node
    if sharding is not None:
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            raise CheckpointError(f"{name} {list(shape)} cannot be laid out as {sharding}: {error}") from error
    return sharding


def check_params(config: Config, tree: Mapping[Any, Any], source: str) -> dict[ParamPath, Any]:
    """The leaves of `tree` (anything with a `shape`) by path, in the order of the forward pass.

    Raises:
      CheckpointError: a parameter is missing, unknown or has another shape than `config` asks for; all are named.
    """
    found = dict(leaves(tree))
    expected = {parameter.path: parameter for parameter in parameters(config)}
    report = mismatches(
        {parameter.name: parameter.shape for parameter in expected.values()},
        {".".join(map(str, path)): tuple(value.shape) for path, value in found.items()},
        "parameters",
    )
    if report:
        raise CheckpointError(f"{source}: {report}")
    return {path: found[path] for path in expected}


def mismatches(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], what: str) -> str:
    """What is missing, unexpected or of another shape, in one line; empty when nothing is."""
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    surplus = [f"{name} {list(shape)}" for name, shape in found.items() if name not in expected]
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    kinds = (("missing", missing), ("unexpected", surplus), ("mis-shaped", wrong))
    return "; ".join(f"{len(names)} {kind} {what}: {enumerate_names(names)}" for kind, names in kinds if names)


def host_copy(array: jax.Array | np.ndarray) -> np.ndarray:
    """The array in host memory, which is free again as soon as the result is dropped."""
    if isinstance(array, np.ndarray):
        return array
    on_one_cpu = len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"
    # JAX keeps the host copy of an array for as long as the array lives: fetch a short-lived device copy instead.
    return np.asarray(array if on_one_cpu else array.copy())
