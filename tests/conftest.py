"""Settings for every test: JAX on its default backend, and markers that pyproject.toml declares."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The fast suite compiles more than it computes: on the CPU, XLA without optimisation takes half the time.

    The long campaigns run the code as users do.
    """
    if config.option.markexpr != "not slow":
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where JAX has none."""
    import jax  # after pytest_configure: XLA reads its flags once

    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
