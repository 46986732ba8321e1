"""What the server costs without a model: `python -m tests.serve.measure_overhead --help`.

Starts the scripted server as a process of its own on one core, where the system can pin it, and streams chat
completions over many connections. Gives tokens per second of the whole, first-byte times of single requests on an idle
server, the cost of idle connections, and whether memory stays what it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from north_jax.provenance import provenance
from tests.serve.server_thread import MODEL
from tests.support.cmd4 import NAMED, NANO_TEMPLATE, byte_level_backend

type Row = dict[str, float | str]

_BODY = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "Write add."}]}).encode()
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"  # the last event, and the end of the chunked body


@contextmanager
def scripted_server(*options: str) -> Iterator[tuple[int, int]]:
    """Gives the server's port and process id."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory)
        byte_level_backend().save(str(checkpoint / "tokenizer.json"))
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(NAMED))
        (checkpoint / "chat_template.jinja").write_text(NANO_TEMPLATE.read_text())
        command = [sys.executable, "-m", "tests.serve.scripted_server", directory, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            try:
                port = int(process.stdout.readline())
                if hasattr(os, "sched_setaffinity"):
                    os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
                yield port, process.pid
            finally:
                process.terminate()


async def _stream(port: int) -> tuple[int, float]:
    """One completion: its content events, and the seconds to its first byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(_REQUEST)
    data = await reader.read(65536)
    first = time.perf_counter() - began
    events = 0
    while True:
        events += data.count(b'"delta":{"content"')
        if data.endswith(_END):
            break
        tail = data[-len(_END) :]
        data = tail + await reader.read(1 << 20)
        events -= tail.count(b'"delta":{"content"')
    writer.close()
    return events, first


async def _throughput(port: int, process: int, connections: int) -> Row:
    began, cpu = time.perf_counter(), _cpu_seconds(process)
    results = await asyncio.gather(*(_stream(port) for _ in range(connections)))
    seconds, cpu = time.perf_counter() - began, _cpu_seconds(process) - cpu
    tokens = sum(events for events, _ in results)
    return {
        "connections": connections,
        "tokens": tokens,
        "tok_s": round(tokens / seconds),
        "us_of_processor_per_token": round(cpu / tokens * 1e6, 1),
    }


async def _first_byte(port: int) -> Row:
    """The quietest of ten rounds tells what the server takes; all of them together, what else the machine was doing."""
    rounds = [[(await _stream(port))[1] * 1e3 for _ in range(20)] for _ in range(10)]
    everything = sorted(ms for one in rounds for ms in one)
    return {
        "first_byte_median_ms": round(min(statistics.median(one) for one in rounds), 2),
        "first_byte_median_of_all_ms": round(statistics.median(everything), 2),
        "first_byte_worst_of_200_ms": round(everything[-1], 2),
    }


async def _idle(port: int, process: int, count: int) -> Row:
    before = _resident_kib(process)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    row = await _first_byte(port) | {
        "idle_connections": count,
        "kib_each": round((_resident_kib(process) - before) / count, 1),
    }
    for _, writer in held:
        writer.close()
    return row


async def _endurance(port: int, process: int, connections: int, seconds: float) -> Row:
    """Memory under load: each connection begins a new answer when the last one has ended."""
    end = time.monotonic() + seconds
    tokens = answers = 0
    resident: list[int] = []

    async def client() -> None:
        nonlocal tokens, answers
        while time.monotonic() < end:
            events, _ = await _stream(port)
            tokens, answers = tokens + events, answers + 1

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(5.0, seconds / 20))
            resident.append(_resident_kib(process))

    await asyncio.gather(watch(), *(client() for _ in range(connections)))
    warm = len(resident) // 10
    return {
        "connections": connections,
        "seconds": seconds,
        "answers": answers,
        "tokens": tokens,
        "resident_mib_after_a_tenth": round(resident[warm] / 1024, 1),
        "resident_mib_at_the_end": round(resident[-1] / 1024, 1),
        "resident_mib_highest": round(max(resident) / 1024, 1),
    }


def _cpu_seconds(process: int) -> float:
    """Processor time of the server: what it costs, also where other work shares the core."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_kib(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def throughput(tokens: int = 2000, step_ms: float = 0.0, connections: int = 32) -> Row:
    """An engine step each `step_ms` milliseconds gives every connection a token; 0: the engine never waits."""
    with scripted_server("--tokens", str(tokens), "--step-ms", str(step_ms)) as (port, process):
        return {"engine_step_ms": step_ms} | asyncio.run(_throughput(port, process, connections))


def first_byte() -> Row:
    """Of single requests on a server that has nothing else to do."""
    with scripted_server("--tokens", "20") as (port, _):
        return asyncio.run(_first_byte(port))


def idle(count: int = 1000) -> Row:
    """Of single requests while so many connections are held open."""
    with scripted_server("--tokens", "20") as (port, process):
        return asyncio.run(_idle(port, process, count))


def endurance(seconds: float, connections: int = 32) -> Row:
    """Answers of 200 tokens, an engine step each 4 ms."""
    with scripted_server("--tokens", "200", "--step-ms", "4") as (port, process):
        return asyncio.run(_endurance(port, process, connections, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0, help="of load, to see whether memory stays (default: none)")
    parser.add_argument("--out", type=Path, help="a JSON file to write the figures to")
    options = parser.parse_args()
    device = f"{os.cpu_count()} CPU cores, the server on one of them, shared with other work"
    # Before it all: the commit that runs, whatever happens to the checkout meanwhile.
    origin = provenance("tests.serve.measure_overhead", device) | {"devices": 0}
    rows = [throughput(step_ms=4), throughput(), first_byte(), idle()]
    if options.minutes:
        rows.append(endurance(options.minutes * 60))
    for row in rows:
        print(row)
    if options.out:
        kept = {"provenance": origin, "rows": rows}
        options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
