"""Settings for every test: JAX on its default backend, and markers that pyproject.toml declares."""

import os
import shutil
import tempfile

import pytest

_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """The fast suite compiles more than it computes: on the CPU, XLA without optimisation takes half the time.

    What is compiled is kept while the suite runs, so that its processes compile nothing that another one has compiled.
    The long campaigns run the code as users do.
    """
    if config.option.markexpr != "not slow":
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.stash[_CACHE] = tempfile.mkdtemp(prefix="north_jax-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[_CACHE]
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes what was kept."""
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where JAX has none."""
    import jax  # after pytest_configure: XLA reads its flags once

    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
