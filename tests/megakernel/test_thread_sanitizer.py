"""ThreadSanitizer over the CPU executor: the counters of a schedule order every access, and a missing wait shows.

The executor orders the tasks of different SMs by their counters alone, so that what ThreadSanitizer finds, or does not
find, is a statement about the lists.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params
from support.programs import buffer_places, sizes_of, weight_arrays, write_arrays

from north_jax.config import Config
from north_jax.kv_cache import PagedRows, init_cache
from north_jax.layers import Params
from north_jax.megakernel.abi import ROW_FIELDS, STOP_TOKENS, Field, Opcode, Row
from north_jax.megakernel.build import build
from north_jax.megakernel.orders import ORDERS
from north_jax.megakernel.schedule import Schedule

ROOT = Path(__file__).parents[2]
SOURCES = (
    *sorted((ROOT / "csrc/reference").glob("**/*.cc")),
    Path(__file__).with_name("tsan_main.cc"),
)
FLAGS = ("-std=c++20", "-O0", "-g1", "-fsanitize=thread", f"-I{ROOT}")
SMS = THREADS = 4  # an SM a thread: what one thread does is in order for ThreadSanitizer
STEPS = 2
POSITIONS = (5, 70, 0, 140)
LIVE = (True, True, False, True)


pytestmark = pytest.mark.slow  # the instrumented build takes most of a minute


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tsan_main, built with ThreadSanitizer."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("tsan")
    empty = folder / "empty.cc"
    empty.write_text("int main() { return 0; }\n")
    probe = folder / "probe"
    if subprocess.run([compiler, "-fsanitize=thread", empty, "-o", probe], capture_output=True).returncode:
        pytest.skip("needs libtsan")
    if subprocess.run([probe], capture_output=True).returncode:
        pytest.skip("ThreadSanitizer does not start on this machine")

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        subprocess.run([compiler, *FLAGS, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, SOURCES))
    program = folder / "tsan_main"
    subprocess.run([compiler, *FLAGS, *objects, "-o", program], check=True)
    return program


@pytest.mark.parametrize("order", ["streamed-2", "tuned"])
def test_counters_order_every_access(program: Path, tmp_path: Path, order: str) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, *_model(), _schedule(order))
    result = run(program, plan, seeds=4)
    assert result.returncode == 0, result.stderr


def test_a_missing_wait_is_a_race(program: Path, tmp_path: Path) -> None:
    schedule = _schedule("streamed-2")
    tasks = schedule.tasks.copy()
    combine = tasks[:, Field.OPCODE] == Opcode.ATTN_COMBINE
    tasks[np.ix_(combine, [Field.WAIT, Field.WAIT_NEED, Field.WAIT_COUNT])] = 0
    plan = tmp_path / "plan"
    write_plan(plan, *_model(), schedule, tasks)
    result = run(program, plan, seeds=4)
    assert "ThreadSanitizer: data race" in result.stderr
    assert "combine_head" in result.stderr


def run(program: Path, plan: Path, *, seeds: int) -> subprocess.CompletedProcess[str]:
    """Runs a plan with this many seeds."""
    return subprocess.run(
        [program, plan, str(THREADS), str(seeds)], capture_output=True, text=True, timeout=120, check=False
    )


def _model() -> tuple[Config, Params]:
    config = tiny_config(num_hidden_layers=3, vocab_size=1300)
    return config, tiny_params(config)


def _schedule(order: str) -> Schedule:
    config, _ = _model()
    return build(config, batch=len(POSITIONS), sms=SMS, dtype="float32", order=ORDERS[order], planes=2)


def write_plan(path: Path, config: Config, params: Params, schedule: Schedule, tasks: np.ndarray | None = None) -> None:
    """Writes what tsan_main.cc reads: a float32 model, the lists (with other descriptors where given) and a batch."""
    rows, full, sliding, pools = _batch(config)
    arrays = [
        np.array([*sizes_of(config), 0, schedule.batch, STEPS], np.int32),
        np.array([config.norm_eps, config.logit_scale], np.float32),
        np.asarray(1 / config.rope_theta ** (np.arange(0, config.head_dim, 2) / config.head_dim), np.float32),
        *weight_arrays(config, params),
        schedule.tasks if tasks is None else tasks,
        schedule.begin,
        schedule.counter_needs,
        np.frombuffer("\n".join(schedule.counter_names).encode(), np.uint8),
        np.frombuffer("\n".join(schedule.queue_names).encode(), np.uint8),
        np.append(buffer_places(schedule).reshape(-1), schedule.workspace.bytes),
        rows,
        full,
        sliding,
        np.array([len(pool) for pool in pools], np.int32),
        *pools,
    ]
    write_arrays(path, arrays)


def _batch(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Rows, both page tables, and pages with random contents."""
    paged = PagedRows(config, rows=len(POSITIONS), max_context=192, max_chunk=192, full_pages=16, sliding_pages=16)
    rows = np.zeros((len(POSITIONS), ROW_FIELDS), np.int32)
    rows[:, Row.STOP : Row.STOP + STOP_TOKENS] = -1
    for row, (position, live) in enumerate(zip(POSITIONS, LIVE, strict=True)):
        rows[row, [Row.TOKEN, Row.POSITION, Row.REMAINING]] = row, position, live * 100
        rows[row, Row.TEMPERATURE] = np.float32(row % 2).view(np.int32)
        rows[row, Row.TOP_P] = np.float32(0.9).view(np.int32)
        rows[row, [Row.TOP_K, Row.LOGPROBS]] = 50 * (row == 3), 6  # all passes of the search, and a report
        if live:
            paged.grow(row, 0, position + STEPS)
    tables = paged.snapshot()
    cache = init_cache(config, full_pages=16, sliding_pages=16, dtype=jnp.float32)
    keys = jax.random.split(jax.random.key(1), len(cache))
    pools = [np.asarray(jax.random.normal(key, pages.shape)) for key, pages in zip(keys, cache, strict=True)]
    return rows, np.asarray(tables.full), np.asarray(tables.sliding), pools
