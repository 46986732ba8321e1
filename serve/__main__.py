"""`python -m serve`."""

import sys

from .options import parse_options


def main() -> int:
    options = parse_options()
    from .server import run  # JAX takes a second to import: not for --help, not for a wrong option

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
