"""The plan of a GPU's memory, for GPUs that are not here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.kv_cache import cache_bytes
from serve import loading, server
from serve.engine import memory as cache_memory
from serve.engine.memory import MemoryPlanError
from serve.memory import MemoryPlan, plan_memory
from serve.options import parse_options

CONFIG = Config.from_json(NORTH)
H100, H200 = 85.5e9, 150.7e9  # bytes of these GPUs


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_memory, "_platform", lambda: "gpu")


def plan(device: float, share: float = 0.92, **sizes: int | None) -> MemoryPlan:
    asked = {"slots": 8, "max_context": None, **sizes}
    return plan_memory(CONFIG, "bfloat16", backend="megakernel", share=share, available=int(device * share), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "context", "tokens", "chunk"), [(H200, 500_000, 2e6, 8192), (H100, 300_000, 3e5, 2048)]
)
@pytest.mark.parametrize("slots", [1, 8])
def test_what_fits(device: float, context: int, tokens: float, chunk: int, slots: int) -> None:
    """Weights of 61 GB, workspace and pages within what there is; with the context that this leaves."""
    found = plan(device, slots=slots)
    assert found.weights == 2 * 30_484_303_872
    assert found.available is not None
    assert found.weights + found.workspace + found.cache.bytes <= found.available
    assert found.cache.max_context >= context
    assert found.cache.chunk >= chunk
    if slots == 8:
        assert found.cache.full_tokens >= tokens
        assert found.available - found.weights - found.workspace - found.cache.bytes < 50e6
    pages = {"full_pages": found.cache.full_pages, "sliding_pages": found.cache.sliding_pages}
    assert found.cache.bytes == cache_bytes(CONFIG, **pages, itemsize=2)


def test_the_table_adds_up() -> None:
    lines = plan(H200).table().splitlines()
    sizes = {line[2:12].strip(): float(line[12:].split(" GB")[0]) for line in lines[1:]}
    assert list(sizes) == ["weights", "KV pages", "workspace", "unused", "together"]
    *parts, together = sizes.values()
    assert sum(parts) == pytest.approx(together, abs=0.03)
    assert "--memory-share 0.92" in lines[-1]


def test_too_little_is_refused_with_the_numbers() -> None:
    with pytest.raises(MemoryPlanError, match=r"60\.97 GB of weights takes 64\.19 GB; this process may use 44\.16 GB"):
        plan(48e9)
    with pytest.raises(MemoryPlanError, match=r"60\.97 GB of weights and [\d.]+ GB of workspace one request") as caught:
        plan(H100, share=0.76)
    assert "this process may use 64.98 GB (--memory-share 0.76)" in str(caught.value)
    with pytest.raises(MemoryPlanError, match="one request of 500000 positions with 8 slots needs"):
        plan(H100, max_context=500_000)


def test_long_chunks_give_way_to_slots() -> None:
    assert plan(H100, slots=32).cache.chunk < plan(H100, slots=8).cache.chunk < plan(H200, slots=8).cache.chunk
    assert plan(H100, slots=8, chunk=256).cache.chunk == 256


def test_a_start_is_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text_checkpoint: Path, tmp_path: Path
) -> None:
    for file in text_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(NORTH.read_text())
    monkeypatch.setattr(loading, "device_memory", lambda: int(48e9))
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("weights were loaded"))
    arguments = ["--model", str(tmp_path), "--random-weights", "--port", "0", "--no-compilation-cache"]
    assert server.run(parse_options(arguments)) == 1
    assert re.fullmatch(r"error: loading 60\.97 GB of weights [^\n]*\n", capfd.readouterr().err)
    assert server.run(parse_options([*arguments, "--backend", "megakernel", "--slots", "99"])) == 1
    assert "at most 32 slots together, not 99" in capfd.readouterr().err
