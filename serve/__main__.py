"""`python -m serve`."""

import sys
import time

from .options import claim_memory, parse_options


def main() -> int:
    begun = time.monotonic()
    options = parse_options()
    claim_memory(options)
    from .server import run  # JAX takes a second to import: not for --help, not for a wrong option

    return run(options, begun=begun)


if __name__ == "__main__":
    sys.exit(main())
