"""Where parameters lie."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ..config import Config
from .fused import kv_head_copies
from .rules import mesh_axes, partition


def shardings_of(config: Config, mesh: Mesh) -> dict[Any, Any]:
    """A `NamedSharding` a parameter, nested as the parameters: what `load`, `restore` and `jax.jit` take.

    Raises:
      ValueError: the mesh does not divide the heads or the experts; the message names them.
    """
    from ..model import model_tensors  # the model's code imports this package

    mesh_axes(mesh, "heads", config.num_attention_heads)
    kv_head_copies(mesh, config.num_key_value_heads)
    return jax.tree.map(
        lambda tensor: NamedSharding(mesh, partition(mesh, tensor[1], tensor[0])),
        model_tensors(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )
