"""A quantum of the pipelined kernel in a program of its own, emulated or on a GPU (tests/megakernel/warps)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.decoding import DecodeRow
from north_jax.layers import Params
from north_jax.megakernel import binding
from north_jax.megakernel.abi import MAX_LOGPROBS, ROW_FIELDS
from north_jax.megakernel.batch import pack_rows, tables_of
from north_jax.megakernel.build import build
from north_jax.megakernel.orders import Order
from north_jax.megakernel.schedule import Schedule
from north_jax.megakernel.selection import select

from . import tiny_params
from .programs import buffer_places, sizes_of, weight_arrays, write_arrays
from .quantum import Start, start

SMS = 2
SHARED_MEMORY = 227 * 1024  # of an H200's SM
ENTRY = np.dtype(  # csrc/megakernel/channel.h
    [
        *((name, np.int32) for name in ("quantum", "step", "slot", "token", "finish", "alternatives")),
        ("logprob", np.float32),
        ("top_token", np.int32, MAX_LOGPROBS),
        ("top_logprob", np.float32, MAX_LOGPROBS),
    ]
)
FAULT = np.dtype([(n, np.int32) for n in ("kind", "sm", "role", "task", "counter", "needed", "seen", "step")])
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,  # a full one, dense, and a sliding one with experts
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 128,
    "prefix_dense_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 1031,
}


@dataclasses.dataclass
class Result:
    """What a quantum leaves."""

    rows: np.ndarray
    logits: np.ndarray
    entries: np.ndarray
    fault: np.ndarray
    pages: list[np.ndarray]


@dataclasses.dataclass
class KernelProgram:
    """The program, a model and the folder of the files."""

    program: Path
    folder: Path
    config: Config
    params: Params

    def run(
        self,
        batch: Start,
        rows: Sequence[DecodeRow],
        steps: int,
        *,
        seed: int = 1,
        sms: int = SMS,
        schedule: Schedule | None = None,
        order: Order | None = None,
        timeout_ns: int = 10**10,
        size: int | None = None,
        shared_memory: int = SHARED_MEMORY,
        stop: bool = False,
        counter_origin: int = 0,
        mistake: str = "",
    ) -> Result:
        """One quantum of a batch of `size` rows, those after `rows` idle; `mistake` is one of warps/fibers.h."""
        config, size = self.config, size or len(rows)
        if schedule is None:
            order = order or select(size, max(row.position for row in rows) + 1)
            schedule = build(config, batch=size, sms=sms, dtype=jnp.bfloat16, order=order)
        options = (
            *(size, steps, seed, timeout_ns, shared_memory),
            *(len(schedule.queue_names), schedule.workspace.bytes, stop, counter_origin),
        )
        arrays = [
            np.array(sizes_of(config), np.int32),
            np.array([config.norm_eps, config.logit_scale], np.float32),
            np.array(options, np.int64),
            schedule.tasks,
            schedule.begin,
            schedule.counter_needs,
            buffer_places(schedule),
            pack_rows(rows, size),
            *tables_of(rows, batch.tables, size),
            binding._frequencies(config),
            *weight_arrays(config, self.params),
            *batch.host_cache,
        ]
        write_arrays(self.folder / "in", arrays)
        command = [self.program, self.folder / "in", self.folder / "out", *([mistake] if mistake else [])]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300)
        sys.stderr.write(done.stderr)
        done.check_returncode()
        data, place, values = (self.folder / "out").read_bytes(), 0, []
        types = [
            (np.dtype(np.int32), (size, ROW_FIELDS)),
            (np.dtype(np.float32), (size, config.vocab_size)),
            (ENTRY, (-1,)),
            (FAULT, (-1,)),
            *((pages.dtype, pages.shape) for pages in batch.host_cache),
        ]
        for dtype, shape in types:
            bytes_ = int(np.frombuffer(data, np.int64, 1, place)[0])
            values.append(np.frombuffer(data[place + 8 : place + 8 + bytes_], dtype).reshape(shape))
            place += 8 + bytes_
        return Result(values[0], values[1], values[2], values[3][0], values[4:])


def params_of(config: Config) -> Params:
    """With an embedding so small that what the layers add decides."""
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_params(config, seed=1))
    return params | {"embed": params["embed"] / 64}


def batch_of(config: Config, positions: Sequence[int | None], **options) -> Start:
    return start(config, positions, room=8, seed=2, dtype=jnp.bfloat16, **options)
