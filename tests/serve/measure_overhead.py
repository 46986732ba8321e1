"""What the server costs without a model: `python -m tests.serve.measure_overhead --help`.

Starts the scripted server as a process of its own on one core, where the system can pin it, and streams chat
completions over many connections. Prints tokens per second of the whole, first-byte times of single requests on an
idle server, and the cost of idle connections.
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

from tests.serve.server_thread import MODEL
from tests.support.cmd4 import NAMED, NANO_TEMPLATE, byte_level_backend

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


async def _throughput(port: int, process: int, connections: int) -> None:
    began, cpu = time.perf_counter(), _cpu_seconds(process)
    results = await asyncio.gather(*(_stream(port) for _ in range(connections)))
    seconds, cpu = time.perf_counter() - began, _cpu_seconds(process) - cpu
    tokens = sum(events for events, _ in results)
    rate, cost = tokens / seconds, cpu / tokens * 1e6
    print(f"{tokens} tokens over {connections} connections, {rate:.0f} tokens/s, {cost:.0f} µs of processor time each")


async def _first_byte(port: int) -> None:
    times = [(await _stream(port))[1] * 1e3 for _ in range(50)]
    print(f"first byte on an idle server: median {statistics.median(times):.2f} ms, worst of 50 {max(times):.2f} ms")


async def _idle(port: int, process: int, count: int) -> None:
    before = _resident_kib(process)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    await _first_byte(port)
    print(f"{count} idle connections held, {(_resident_kib(process) - before) / count:.1f} KiB each")
    for _, writer in held:
        writer.close()


def _cpu_seconds(process: int) -> float:
    """Processor time of the server: what it costs, also where other work shares the core."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_kib(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=4, help="a step gives every connection a token (default: 4)")
    options = parser.parse_args()
    for step_ms in (options.step_ms, 0):
        print(f"an engine step each {step_ms} ms:" if step_ms else "an engine that never waits:", end=" ")
        _measure_throughput(options.tokens, step_ms, options.connections)
    with scripted_server("--tokens", "20") as (port, process):
        asyncio.run(_first_byte(port))
        asyncio.run(_idle(port, process, 1000))


def _measure_throughput(tokens: int, step_ms: float, connections: int) -> None:
    with scripted_server("--tokens", str(tokens), "--step-ms", str(step_ms)) as (port, process):
        asyncio.run(_throughput(port, process, connections))


if __name__ == "__main__":
    main()
