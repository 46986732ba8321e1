"""Constants of the timing model, and how a kernel uses the machine. Times in µs, rates in bytes per µs (1e6 = 1 TB/s).

Sources: [M] measured on an H200 with the skeleton of the decode step (`calibration` lists its variants), [F] fitted on
three of them, [D] derived from the datasheet, [E] estimated from the instructions that run.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A GPU: memory as one queue that all SMs share, and what a page, a small access and a signal cost.

    A page is served by the queue at the streaming rate and lands `page_latency` later. A small access (a store, a poll
    or a batch of loads; in L2) takes `access_latency`, and `access_share` of the time in which memory streams the bytes
    that are in flight. These two sentences are the model; everything else is bookkeeping.
    """

    name: str
    datasheet: float  # bytes/µs [D]
    l2_bytes: int = 50_000_000  # [D]
    sm_port: float = 126e3  # bytes/µs into one SM: 64 B a clock at 1.98 GHz [D]
    shared_rate: float = 253e3  # bytes/µs that ldmatrix reads: 128 B a clock [D]
    # Streaming rate by the size of one bulk copy, as a share of the datasheet's: 2.34, 4.39, 4.60 of 4.8 TB/s [M].
    copy_rates: tuple[tuple[int, float], ...] = ((512, 0.4875), (1024, 0.9146), (2048, 0.9583))
    page_latency: float = 1.438  # from the producer's wait to landed, beside queueing and transfer [F]
    access_latency: float = 0.488  # on idle memory [F]
    access_share: float = 1.033  # about 1: small accesses wait behind everything in flight [F]
    poll_pause: float = 0.05  # between polls: __nanosleep(50) [M]
    fence: float = 1.9  # release fence after stores under load: 1.6–2.2 [M]
    loads_in_flight: int = 16384  # bytes: 128 threads × 8 × 16 B [E]
    consume_page: float = 0.1  # wake-up and first products of a page, beside reading it [E]
    consume_tile: float = 0.1  # partial sums to the epilogue, next descriptor [E]
    epilogue: float = 0.2  # fold of eight warps, stores [E]
    norm: float = 0.3  # sum of squares over 128 threads, scale, write to shared memory [E]
    side_task: float = 0.3  # a combine, a gather or a step of sampling [E]
    top_k: float = 0.4  # of one row by one warp [M]

    def stream_rate(self, copy_bytes: int) -> float:
        """Bytes/µs that all SMs together stream with copies of this size: log-linear between what was measured."""
        points = self.copy_rates
        size = min(max(copy_bytes, points[0][0]), points[-1][0])
        upper = next(n for n in range(1, len(points)) if size <= points[n][0])
        (low, slow), (high, fast) = points[upper - 1 : upper + 1]
        return self.datasheet * (slow + (fast - slow) * math.log(size / low) / math.log(high / low))


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """How the persistent kernel uses the machine. The defaults are the best that was measured."""

    ring_pages: int = 6
    window: int = 2  # pages that an SM has un-landed
    page_columns: int = 1024  # of a 16-row page; a row is one copy
    polls: int = 3  # in flight
    streams: bool = True  # False: the dependencies alone
    first_pages_only: bool = False  # one page of every item
    whole_phases: bool = False  # everybody waits for all slices, KV heads and ranks of a phase, as in the skeleton
    staged_ahead: bool = True  # by loader warps; False: consumers load when they come to it
    fences: bool = False  # a release fence before every signal
    prefetch_o: bool = False  # O-proj rows into L2 as soon as the producer waits for the router
    top_k_warps: int = 4  # rows whose experts are chosen at once
    bulk_staging: bool = False  # activations come as bulk copies, not as batches of loads
    sampling: bool = True  # False: a step ends with its logits
    search_passes: int = (
        0  # of SAMPLE_HISTOGRAM that rows ask for: 3 for top-k or top-p, 6 for both, 0 if all are greedy
    )
    vocabulary_scale: float = 1.0  # tokens that one of a shortened vocabulary stands for


H200 = Machine("H200", datasheet=4.8e6)
H100 = dataclasses.replace(H200, name="H100", datasheet=3.35e6)
MACHINES = {machine.name: machine for machine in (H200, H100)}
SKELETON = Kernel(whole_phases=True, sampling=False)
