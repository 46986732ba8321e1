"""No access to a block's shared memory races with another, and every wait that says so is missed where it is left out.

The pipelined kernel's own code runs on a CPU (see warps/) under a detector of races that knows its barriers: it follows
what orders two accesses, not when they happened, so one run of each form of the lists shows what any interleaving
could. It knows proxy fences too. compute-sanitizer's racecheck follows no mbarrier (test_sanitized_kernel.py).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import tiny_config
from support.hand_overs import HAND_OVERS
from support.kernel_program import SIZES, KernelProgram, batch_of, params_of

from north_jax.megakernel.orders import down_first, router_first, shared_norm

pytestmark = pytest.mark.slow  # the instrumented build takes most of a minute
ROOT = Path(__file__).parents[2]
RACE, REFUSED = 8, 3  # statuses: of races.cc, and of fibers.h, which notices some mistakes by itself

SMALL: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 132}
EXPERTS = SMALL | {"first_k_dense_replace": 0, "num_experts": 8}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"sizes": SMALL, "positions": [130]},
    # Splits of three pages: the scores of one half of the consumers are used again within an item.
    "long": {"sizes": SMALL, "positions": [4300]},
    "experts": {"sizes": EXPERTS, "positions": [3]},
    "rows that end, two steps": {"sizes": EXPERTS, "positions": [130, 3, 64], "steps": 2},
    "four layers, a norm a row": {
        "sizes": EXPERTS | {"num_hidden_layers": 4, "hidden_size": 128},
        "positions": [3],
        "order": shared_norm(router_first(down_first(0))),
    },
    # Two SMs have neither output projection nor down projection: only the input's own barrier holds their loader back.
    "many SMs": {
        "sizes": EXPERTS | {"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 164},
        "positions": [3],
        "sms": 10,
    },
}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("races")
    warps, host = Path(__file__).with_name("warps"), ROOT / "csrc" / "megakernel" / "pipeline"
    options = ["-std=c++20", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-g1", f"-I{warps}", f"-I{ROOT}"]
    # Calls at every access, volatile ones apart; races.cc takes them, in the ThreadSanitizer's place.
    watched = ["-fsanitize=thread", "--param=tsan-distinguish-volatile=1"]
    objects = []
    for source, own in {
        warps / "pipeline.cc": ["-O1", *watched],
        warps / "races.cc": ["-O2"],
        host / "limits.cc": ["-O1"],
        host / "tasks.cc": ["-O1"],
    }.items():
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([compiler, *options, *own, "-c", source, "-o", objects[-1]], check=True)
    subprocess.run([compiler, *objects, "-o", folder / "races"], check=True)
    return folder / "races"


def run(program: Path, folder: Path, case: str, mistake: str = "") -> None:
    """Runs a case, with a wait left out; CalledProcessError where something was found."""
    sizes, positions = CASES[case]["sizes"], CASES[case]["positions"]
    config = tiny_config(**(SIZES | sizes))
    batch = batch_of(config, positions)
    options = {name: value for name, value in CASES[case].items() if name in ("sms", "order")}
    quantum = KernelProgram(program, folder, config, params_of(config))
    quantum.run(batch, batch.rows, CASES[case].get("steps", 1), mistake=mistake, **options)


@pytest.mark.parametrize("case", CASES)
def test_nothing_races(program, tmp_path, case):
    run(program, tmp_path, case)


# The case that needs a barrier, where "experts" does not.
NEEDED_BY = {"scores_empty": "long", "input_empty": "many SMs"}
# A routing table is used again two layers later, and the task ring keeps roles closer together than that: nothing
# shows that its own barrier is left out.
IMPLIED = {"routing_empty"}
BARRIERS = sorted({name for each in HAND_OVERS for name in (each.filled, each.freed)} - IMPLIED)


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_wait_that_is_left_out_is_a_race(program, tmp_path, barrier):
    with pytest.raises(subprocess.CalledProcessError) as found:
        run(program, tmp_path, NEEDED_BY.get(barrier, "experts"), barrier)
    text = found.value.stderr
    if found.value.returncode == REFUSED:
        assert "more arrivals at a barrier than it is for" in text
        return
    assert found.value.returncode == RACE
    region = text.partition("race in ")[2].partition(" of block")[0]
    held = {each.region for each in HAND_OVERS if barrier in (each.filled, each.freed)}
    parameters = {"rotation", "pages_of_rows", "splits", "attention_items", "live_rows", "ended", "step", "decision"}
    assert region in held | (parameters if barrier in ("step_begins", "team 1") else set()), text


def test_a_fence_that_is_left_out_is_a_race(program, tmp_path):
    """Values that a consumer has cleared lie where the producer's next copy goes."""
    with pytest.raises(subprocess.CalledProcessError) as found:
        run(program, tmp_path, "experts", "fence")
    assert found.value.returncode == RACE
    assert "race in pages" in found.value.stderr and "without a proxy fence" in found.value.stderr
