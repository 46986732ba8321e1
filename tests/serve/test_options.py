from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from serve.options import API_KEY_VARIABLE, parse_options


def test_defaults() -> None:
    options = parse_options([])
    assert (options.model, options.served_model_name) == ("north-nano", "north-nano")
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.max_context is None
    assert options.backend == "auto"
    assert (options.chunk, options.busy_chunk) == (None, None)


@pytest.mark.parametrize(
    ("model", "name"),
    [("/models/North-1.0", "North-1.0"), ("/models/North-1.0/", "North-1.0"), ("north-nano", "north-nano")],
)
def test_the_served_name_is_the_model_s_unless_given(model: str, name: str) -> None:
    assert parse_options(["--model", model]).served_model_name == name
    assert parse_options(["--model", model, "--served-model-name", "north"]).served_model_name == "north"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "x"],
        ["--port", "65536"],
        ["--port", "-1"],
        ["--slots", "0"],
        ["--max-queue", "1.5"],
        ["--max-context", "0"],
        ["--chunk", "0"],
        ["--busy-chunk", "-5"],
        ["--drain-seconds", "-1"],
        ["--drain-seconds", "nan"],
        ["--dtype", "int8"],
        ["--temperature", "2.1"],
        ["--top-p", "x"],
        ["--min-p", "nan"],
        ["--top-k", "-1"],
        ["--backend", "torch"],
        ["--log-level", "loud"],
        ["--unknown"],
    ],
)
def test_wrong_values_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_help_is_quick() -> None:
    """Processor time rather than the clock, which other work on the machine slows; the best of three."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run([sys.executable, "-m", "serve", "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "--served-model-name" in shown.stdout
    assert min(times) < 0.3


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys, serve.__main__ as m\n"
        "try: sys.argv = ['serve', '--help']; m.main()\n"
        "except SystemExit: print(*sorted({'jax', 'numpy', 'msgspec', 'asyncio'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_the_api_key_comes_from_the_environment_or_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_options([]).api_key is None
    monkeypatch.setenv(API_KEY_VARIABLE, "from the environment")
    assert parse_options([]).api_key == "from the environment"
    assert parse_options(["--api-key", "given"]).api_key == "given"


def test_sampling_defaults_are_options() -> None:
    options = parse_options(["--temperature", "0", "--top-p", "0.5", "--top-k", "7"])
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0, 0.5, 7, None)


def test_where_compiled_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert parse_options([]).compilation_cache == "/caches/north_jax/compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert parse_options([]).compilation_cache == "/home/somebody/.cache/north_jax/compiled"
    assert parse_options(["--compilation-cache", "/elsewhere"]).compilation_cache == "/elsewhere"
    assert parse_options(["--no-compilation-cache"]).compilation_cache is None
