"""What a Prometheus server can read at /metrics: docs/serving.md says what each means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from .engine.types import Engine

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_REQUEST_SECONDS = (0.005, 0.05, 0.25, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The figures of one server. The event loop updates them; the engine is asked when somebody reads them."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._first = Histogram(
            "north_time_to_first_token_seconds",
            "From a request's submission to its first token, time in the queue included",
            buckets=_FIRST_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._between = Histogram(
            "north_inter_token_seconds",
            "Between two tokens of one choice",
            buckets=_BETWEEN_TOKENS_SECONDS,
            registry=self._registry,
        )
        self._ends = Counter("north_choices", "Choices that have ended, by reason", ["reason"], registry=self._registry)
        self._requests = Counter(
            "north_http_requests", "HTTP requests answered", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "north_http_request_seconds",
            "From the end of a request to the end of its response",
            ["route"],
            buckets=_REQUEST_SECONDS,
            registry=self._registry,
        )

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def ended(self, reason: str) -> None:
        self._ends.labels(reason).inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """`route` is the pattern that matched, so that clients cannot make up new ones; "" for none."""
        self._requests.labels(method if route else "other", route or "none", str(status)).inc()
        self._seconds.labels(route or "none").observe(seconds)

    def text(self) -> bytes:
        """All figures in the Prometheus text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield GaugeMetricFamily("north_requests_queued", "Choices that wait for a slot", stats.queued)
        yield GaugeMetricFamily("north_requests_running", "Choices that own a slot", stats.running)
        pages = GaugeMetricFamily("north_kv_pages", "Pages of the KV cache, by state", labels=["state"])
        pages.add_metric(["used"], stats.pages_used)
        pages.add_metric(["cached"], stats.pages_cached)
        pages.add_metric(["free"], stats.pages_total - stats.pages_used - stats.pages_cached)
        yield pages
        prompt = CounterMetricFamily("north_prompt_tokens", "Prompt tokens, by where they came from", labels=["source"])
        prompt.add_metric(["computed"], stats.prompt_tokens)
        prompt.add_metric(["cache"], stats.cached_tokens)
        yield prompt
        yield CounterMetricFamily("north_generated_tokens", "Tokens drawn", stats.generated_tokens)
        yield CounterMetricFamily(
            "north_preemptions", "Times a running choice went back to the queue for want of pages", stats.preemptions
        )
        sizes = GaugeMetricFamily("north_prefill_sizes", "Sizes of prefill, by state", labels=["state"])
        sizes.add_metric(["compiled"], stats.prefill_compiled)
        sizes.add_metric(["pending"], stats.prefill_shapes - stats.prefill_compiled)
        yield sizes
        chunks = CounterMetricFamily(
            "north_prefill_chunks", "Chunks of prompts, by the size they ran in", labels=["tokens"]
        )
        for size, count in sorted(stats.chunks.items()):
            chunks.add_metric([str(size)], count)
        yield chunks
        seconds = CounterMetricFamily("north_engine_seconds", "The engine's time, by what it did", labels=["part"])
        for part, spent in stats.seconds.items():
            seconds.add_metric([part], spent)
        yield seconds
        yield GaugeMetricFamily("north_warm", "1 when nothing is left to compile ahead", float(stats.warm))
        memory = GaugeMetricFamily("north_memory_bytes", "Memory of the device and of the process", labels=["kind"])
        for kind, size in zip(("limit", "used", "peak"), stats.device_bytes or (), strict=False):
            memory.add_metric([kind], size)
        memory.add_metric(["resident"], _resident_bytes())
        yield memory
        yield GaugeMetricFamily("north_engine_up", "1 while the engine lives", float(stats.failure is None))


def _resident_bytes() -> int:
    """Of this process on the host; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
