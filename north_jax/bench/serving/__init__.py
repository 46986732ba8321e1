"""The server under load, through HTTP: throughput, times to the first token and between tokens, prefix hits.

    python -m north_jax.bench serve --server "--model DIR --random-weights" --scenario throughput-1k single
    python -m north_jax.bench serve --url http://127.0.0.1:8000 --prompt 512-2048 --output 64-256 --rate 4

Without --url a server is started as a child process, with the arguments of --server, and stopped in the end. Any other
endpoint that speaks OpenAI's completions can be named instead, so that a peer is measured by the same client. Prompts
are token ids, all different, so that a prefix cache finds nothing but what --prefix-share says; answers run to their
full length where the server takes `ignore_eos`. The same seed gives the same requests and times of arrival, so a second
run against a running server needs another one, or finds what the first has left in its prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..record import Results
from .child import Server, ServerError, is_warm, metrics, server, until_warm
from .endpoint import Answer, Endpoint
from .figures import table
from .plot import svg
from .presets import Preset, overridden, presets, summary_of
from .spent import spent
from .workload import Lengths, Prompts, requests

_SHOWN = (
    "output_tok_s",
    "decode_tok_s",
    "decode_only_tok_s",
    "of_kernel",
    "ttft_ms",
    "inter_token_ms",
    "prefix_hit_rate",
    "decode_share",
    "engine_s",
    "chunks",
    "padding",
    "warm",
)
_WARMING = 8  # tokens of the requests that go first and do not count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {preset.about}" for name, preset in presets().items())
    parser.add_argument("--scenario", nargs="+", default=["custom"], choices=[*presets()], metavar="NAME", help=names)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="an endpoint that runs already, such as http://127.0.0.1:8000")
    where.add_argument("--server", default="", metavar="ARGS", help="arguments of the server that is started")
    parser.add_argument("--server-log", type=Path, metavar="FILE", help="for what it says on standard error")
    parser.add_argument("--start-seconds", type=float, default=900.0, help="until it must be ready (default: 900)")
    parser.add_argument(
        "--wait-warm",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="to wait until a server of ours has compiled everything; the rows say whether it had (default: 300)",
    )
    parser.add_argument("--scenario-seconds", type=float, default=3600.0, help="that one may take (default: 3600)")
    parser.add_argument("--model", metavar="NAME", help="its name there (default: the first that it lists)")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--openai-only", action="store_true", help="send OpenAI's fields alone, without ignore_eos")
    parser.add_argument("--text", action="store_true", help="prompts are words instead of token ids")
    parser.add_argument("--vocabulary", type=int, default=262144, help="token ids are drawn below (default: 262144)")
    parser.add_argument("--prompt", type=_lengths, metavar="N or LOW-HIGH", help="tokens of a prompt")
    parser.add_argument("--output", type=_lengths, metavar="N or LOW-HIGH", help="tokens of an answer")
    parser.add_argument("--requests", type=int, dest="count", help="how many")
    parser.add_argument("--concurrency", type=int, help="requests on their way at once (closed loop)")
    parser.add_argument("--rate", type=float, help="requests a second, as a Poisson process (open loop)")
    parser.add_argument("--prefix-share", type=float, help="part of each prompt that all share (default: 0)")
    parser.add_argument("--temperature", type=float, help="of the draws (default: 0, of a soak 0.8)")
    parser.add_argument("--long", type=int, help="tokens of the long prompt, or of the shared prefix")
    parser.add_argument("--minutes", type=float, help="of a soak's load")
    parser.add_argument("--compared", type=int, help="answers of a soak to ask for again")
    parser.add_argument("--tie", type=float, help="lead of a token below which another one is a near-tie, in nats")
    parser.add_argument("--seed", type=int, help="of requests and arrivals (default: 0)")
    parser.add_argument("--kernel", type=Path, metavar="FILE", help="of bench decode: what a single stream is held to")
    parser.add_argument("--out", type=Path, help="JSON file, written after every scenario")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="for a picture (SVG) of each scenario")


def run(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, _leave)  # so that the server's end is not left out
    try:
        with _serving(options) as (running, url):
            device = running.device if running else f"at {url}"
            results = Results(options.out, ("kind", "scenario"), device=device)
            rows = asyncio.run(_scenarios(options, url, running, results))
    except (OSError, ServerError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(table(rows))
    if any(row.get("met") is False or row["errors"] for row in rows):
        sys.exit(3)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def _serving(options: argparse.Namespace) -> Iterator[tuple[Server | None, str]]:
    """The server that is started, if one is, and the address."""
    if options.url is not None:
        yield None, options.url
        return
    with server(shlex.split(options.server), log=options.server_log, timeout_s=options.start_seconds) as running:
        print("\n".join(running.lines), flush=True)
        yield running, running.url


async def _scenarios(
    options: argparse.Namespace, url: str, running: Server | None, results: Results
) -> list[dict[str, Any]]:
    endpoint = await Endpoint.find(url, model=options.model, key=options.api_key, extras=not options.openai_only)
    begun = time.monotonic()
    warm = await until_warm(endpoint, options.wait_warm)
    waited = time.monotonic() - begun
    print(f"{'warm' if warm else 'not everything is compiled yet'} after {waited:.1f} s more", flush=True)
    rows = []
    for name in options.scenario:
        preset = presets()[name]
        warm = await is_warm(endpoint)
        try:
            async with asyncio.timeout(options.scenario_seconds):
                row, answers = await _measure(options, endpoint, preset)
        except TimeoutError:
            print(f"{name}: no end within {options.scenario_seconds:g} s", flush=True)
            row, answers = {"requests": 0, "errors": 1, "timed_out": True}, []
        row = {"kind": "serve", "scenario": name, **row, "warm": warm}
        if running is not None:
            row |= {"server": running.lines, "start_s": running.start_s, "warm_s": round(running.start_s + waited, 1)}
        rows.append(results.add(row))
        print(f"{name}: {summary_of(row, _SHOWN)}", flush=True)
        for error in sorted({answer.error for answer in answers if answer.error})[:5]:
            print(f"  error: {error}", flush=True)
        if options.plot is not None:
            options.plot.mkdir(parents=True, exist_ok=True)
            (options.plot / f"{name}.svg").write_text(svg(f"{name}: {preset.about}", answers))
    return rows


async def _measure(
    options: argparse.Namespace, endpoint: Endpoint, preset: Preset
) -> tuple[dict[str, Any], list[Answer]]:
    names = ("prompt", "output", "count", "concurrency", "rate", "prefix_share", "temperature", "long", "minutes")
    changes = {name: getattr(options, name) for name in (*names, "compared", "tie")}
    if options.kernel is not None:
        changes["kernel_tok_s"] = kernel_tok_s(options.kernel)
    # A seed of its own for each scenario: what one has left in a prefix cache, no other one finds.
    changes["seed"] = (options.seed or 0) << 32 | zlib.crc32(preset.about.encode())
    settings = overridden(preset.settings, changes)
    prompts = Prompts(options.vocabulary, text=options.text)
    first = overridden(settings, {"output": Lengths(_WARMING, _WARMING)})
    warming = requests(first.mix, prompts, min(settings.concurrency or 1, 2), seed=settings.seed + 1000)
    await asyncio.gather(*(endpoint.ask(request) for request in warming))
    before = await metrics(endpoint)
    row, answers = await preset.run(endpoint, prompts, settings, _Progress())
    return row | spent(before, await metrics(endpoint)), answers


def kernel_tok_s(file: Path) -> float | None:
    """What `bench decode` measured for one row with uniform routing in its shortest context; None if it did not."""
    rows = [row for row in json.loads(file.read_text())["rows"] if row.get("kind") == "decode" and row["batch"] == 1]
    rows = [row for row in rows if row["routing"] == "uniform"]
    return min(rows, key=lambda row: row["context"])["tok_s"] if rows else None


class _Progress:
    """A line on a terminal."""

    def __init__(self) -> None:
        self._answers = self._tokens = 0

    def __call__(self, answer: Answer) -> None:
        self._answers += 1
        self._tokens += answer.completion_tokens
        if sys.stderr.isatty():
            print(f"\r{self._answers} answers, {self._tokens} tokens", end="", file=sys.stderr, flush=True)


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
