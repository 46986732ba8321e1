"""Measurements: `python -m north_jax.bench COMMAND --help` says what one does and takes."""

from __future__ import annotations

import argparse
import importlib

# Command → module with `add_arguments(parser)` and `run(options)`, whose first line is the command's help.
COMMANDS = {
    "decode": "decode",
    "prefill": "prefill",
    "serve": "serving",
    "random_model": "random_model",
    "moe": "moe",
    "grouped_matmul": "grouped_matmul",
    "cold_start": "cold_start",
    "agreement": "agreement",
    "operations": "operations",
    "properties": "properties",
    "soak": "soak",
    "mesh": "mesh",
    "trace": "trace",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m north_jax.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(f"north_jax.bench.{module_name}")
        command = commands.add_parser(
            name,
            help=(module.__doc__ or "").partition("\n")[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
