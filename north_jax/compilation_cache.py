"""XLA's persistent compilation cache: what was compiled once is there at the next start. Imports nothing slow."""

from __future__ import annotations

import os

_LEAST_SECONDS = 0.1  # of compilation, for a program to be worth a file


def default_directory() -> str:
    """A directory of ours among the user's caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "north_jax", "compiled")


def use(directory: str) -> None:
    """Makes XLA keep compiled programs in a directory, from now on, and take them from there.

    Programs are known by what they compute, the versions of JAX and XLA, and the device, so one directory serves all.

    Raises:
      OSError: the directory can't be made.
    """
    import jax

    os.makedirs(directory, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
