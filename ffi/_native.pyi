# The compiled module (ffi/*.cc), but for its submodule `division`, which is for tests.

from collections.abc import Sequence

import numpy as np

cuda_architectures: str  # such as "sm_90a", separated by spaces; "" without CUDA kernels

def handlers() -> dict[str, dict[str, object]]: ...  # platform, as jax.ffi spells it -> target -> capsule
def warp_decode_calls() -> int: ...  # handlers of warp decode that the host has called, in this process
def abi_constants() -> dict[str, int | dict[str, int]]: ...  # of csrc/megakernel/abi.h and channel.h
def abi_operations() -> list[
    tuple[str, int, bool, bool, bool, int]
]: ...  # name, lane, routed, claims, optional, fields; by opcode

class Geometry:  # north_jax::megakernel::Geometry (csrc/megakernel/plan.h); all 0 at first
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_width: int
    dense_width: int
    experts: int
    top_k: int
    vocabulary: int
    norm_eps: float
    logit_scale: float
    layer_norm: bool
    softmax_router: bool
    renormalise: bool

class DecodeEngine:  # ffi/decode_engine.h
    def __init__(
        self,
        *,
        platform: str,  # "cpu", or "cuda" where its kernels are compiled
        dtype: str,  # "float32" or "bfloat16"
        geometry: Geometry,
        weights: Sequence[tuple[int, int, int]],  # address, rows, columns; (0, 0, 0) where a layer has no such weight
        frequencies: Sequence[float],  # [d/2]
        owner: object,  # keeps the memory of the weights; kept as long as the engine
    ) -> None: ...
    @property
    def id(self) -> int: ...  # the attribute of its calls
    def add_schedule(
        self,
        *,
        batch: int,
        tasks: np.ndarray,  # [n, 32] int32
        begin: np.ndarray,  # [SMs + 1] int32
        counter_needs: np.ndarray,  # [counters] int32
        counter_names: Sequence[str],
        queue_names: Sequence[str],
        buffers: Sequence[tuple[int, int, int, int]],  # offset, plane_bytes, planes, size of the first axis; by Buffer
        workspace_bytes: int,
    ) -> int: ...
    def queue(
        self,
        schedule: int,
        steps: int,
        *,
        threads: int = 1,
        seed: int = 0,
        timeout_s: float = 10.0,
        counter_origin: int = 0,
    ) -> int: ...
    def not_pipelined(self, schedule: int) -> str: ...
    def drop_queued(self) -> None: ...
    def stop(self) -> None: ...
    def cancel(self, row: int, quantum: int) -> None: ...
    def take_entries(
        self,
        quantum: int,
        timeout_s: float,
        # quantum, step, slot, token, finish; log-probability of the token and (token, log-probability) of alternatives
    ) -> list[tuple[int, int, int, int, int, tuple[float, list[tuple[int, float]]] | None]]: ...
    def finished(self) -> int: ...
    def error(self, quantum: int) -> str: ...

# In builds with NORTH_JAX_TRACE alone.
def trace_begin(step: int, events: int) -> None: ...
def trace_end(sms: int, events: int) -> bytes: ...
def trace_warps() -> list[str]: ...
def trace_barriers() -> list[str]: ...
