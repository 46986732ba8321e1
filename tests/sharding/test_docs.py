"""The arithmetic of docs/scaling.md."""

from __future__ import annotations

import re
from pathlib import Path

import jax
from support import RAW_CONFIG

from north_jax.config import Config
from north_jax.kv_cache import PAGE_SIZE, cache_bytes
from north_jax.model import model_tensors
from north_jax.sharding import make_mesh
from north_jax.sharding.rules import RULES

PAGE = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
# North Mini Code's geometry.
CONFIG = Config.from_dict(
    RAW_CONFIG
    | {"vocab_size": 262144, "hidden_size": 2048, "num_hidden_layers": 49, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 768, "prefix_dense_intermediate_size": 3072}
    | {"num_experts": 128, "num_experts_per_tok": 8, "sliding_window": 4096, "sliding_window_pattern": 4}
    | {"eos_token_id": 255001}
)


def rows(heading: str) -> list[list[str]]:
    table = PAGE.split(heading)[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def parameters(tensor: int, expert: int) -> int:
    """Values on each device, by the table of rules."""
    sizes = {"tensor": tensor, "expert": expert, "data": 1}
    total = 0
    tensors = jax.tree.leaves(model_tensors(CONFIG), is_leaf=lambda node: isinstance(node, tuple))
    for shape, axes in tensors:
        count = 1
        for size, name in zip(shape, axes, strict=True):
            for axis in RULES[name] if name else ():
                size //= sizes[axis]
            count *= size
        total += count
    return total


def test_what_fits() -> None:
    weights = 2 * parameters(1, 1)
    assert round(weights / 1e9, 2) == 60.97
    for context, gigabytes, *gpus in rows("| rows of … tokens "):
        full, sliding = (min(int(context.replace(",", "")), limit) // PAGE_SIZE for limit in (1 << 30, 4096))
        row = cache_bytes(CONFIG, full_pages=full, sliding_pages=sliding, itemsize=2)
        assert gigabytes == f"{row / 1e9:.2f}"
        for memory, count in zip((80e9, 141e9, 180e9), gpus, strict=True):
            assert int(count) == (memory - weights - 4e9) // row


def test_what_devices_hold() -> None:
    for mesh, *cells in rows("| mesh "):
        sizes = {name: int(size) for name, size in re.findall(r"(tensor|expert) (\d+)", mesh)}
        count = parameters(sizes.get("tensor", 1), sizes.get("expert", 1))
        assert cells == [f"{count * width / 1e9:.1f}" for width in (2, 4, 12)], mesh


def test_a_mesh_of_one_device() -> None:
    assert dict(make_mesh().shape) == {"data": 1, "expert": 1, "tensor": 1}
