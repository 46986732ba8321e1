"""Settings for every test: JAX on its default backend, and markers that pyproject.toml declares."""

import os

# Tests compile more than they compute: on the CPU, XLA without optimisation takes half the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where JAX has none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
