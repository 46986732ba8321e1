"""The list of models: one."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "north-jax"
    max_model_len: int  # an extension that clients of other open servers read: the context in tokens


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
