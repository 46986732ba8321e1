"""The binary interface: the header in the tree, and what the compiled module was built from, are north_jax's."""

from __future__ import annotations

import enum
import importlib
from pathlib import Path

import pytest

import ffi
from north_jax.megakernel import abi

needs_compiled = pytest.mark.skipif(not ffi.build_info().cpu, reason=str(ffi.build_info()))
HEADER = Path(__file__).parents[2] / "csrc" / "megakernel" / "abi.h"


def compiled():
    return importlib.import_module("ffi._native")


def members(kind: type[enum.IntEnum]) -> dict[str, int]:
    return {member.name: member.value for member in kind}


def test_the_header_in_the_tree_is_generated():
    assert HEADER.read_text(encoding="utf-8") == abi.header(), "run python -m north_jax.megakernel.abi > " + str(HEADER)


def test_every_opcode_has_an_operation_of_known_fields():
    assert set(abi.OPERATIONS) == set(abi.Opcode)
    assert min(abi.Opcode) == 1  # zeroed memory is no task
    assert all(abi.Field.LAYER in op.fields for code, op in abi.OPERATIONS.items() if code is not abi.Opcode.END_STEP)
    assert max(abi.Field) < abi.DESCRIPTOR_FIELDS
    assert abi.Row.STOP + abi.STOP_TOKENS <= abi.Row.BIAS_COUNT
    assert abi.Row.TOP_TOKEN + abi.MAX_LOGPROBS <= abi.Row.TOP_LOGPROB
    assert abi.Row.TOP_LOGPROB + abi.MAX_LOGPROBS <= abi.ROW_FIELDS


@needs_compiled
def test_compiled_constants_are_those_of_python():
    expected = {name: value for name, value in vars(abi).items() if name.isupper() and isinstance(value, int)}
    expected |= {
        kind.__name__: members(kind) for kind in (abi.Lane, abi.Field, abi.Buffer, abi.Weight, abi.Row, abi.Finish)
    }
    found = compiled().abi_constants()
    ring = found.pop("RING_ENTRIES")  # of channel.h
    assert found == expected
    assert ring & (ring - 1) == 0


@needs_compiled
def test_compiled_operations_are_those_of_python():
    none, *found = compiled().abi_operations()
    assert none == ("no operation", 0, False, False, False, 0)
    assert found == [
        (code.name, op.lane, op.routed, op.claims, op.optional, sum(1 << field for field in op.fields))
        for code, op in sorted(abi.OPERATIONS.items())
    ]
