"""`python -m serve`."""

import os
import sys
import time

from .options import parse_options

_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def main() -> int:
    begun = time.monotonic()
    options = parse_options()
    # What JAX takes of a GPU is said before it is imported; whoever set the variable has the last word.
    if not any(os.environ.get(name) for name in _MEMORY_VARIABLES):
        os.environ[_MEMORY_VARIABLES[0]] = str(options.memory_share)
    from .server import run  # JAX takes a second to import: not for --help, not for a wrong option

    return run(options, begun=begun)


if __name__ == "__main__":
    sys.exit(main())
