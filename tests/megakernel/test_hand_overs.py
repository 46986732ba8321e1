"""The table of hand-overs: its barriers exist, a page lists them, and racecheck's findings are held against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hand_overs import HAND_OVERS, explained, races

ROOT = Path(__file__).parents[2]

SAID = """
========= Error: Race reported between Write access at a::b::bulk_copy_once(unsigned int)+0x13f90 in b.cuh:69
=========     and Read access at a::b::load_matrices(unsigned int)+0x18570 in tensor.cuh:26 [1890560 hazards]
=========     and Write access at a::b::clear_shared(unsigned int)+0x1be20 in tensor.cuh:54 [256 hazards]
=========
========= Error: Race reported between Write access at a::<unnamed>::decode_kernel(a::Plan, a::Words)+0x7ea0
=========     and Read access at T1 * a::Common::buffer<float>(a::Field) const+0xe740 in role.cuh:135 [768 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_findings_are_read_from_what_racecheck_says():
    assert races(SAID) == {
        ("bulk_copy_once", "load_matrices"),
        ("bulk_copy_once", "clear_shared"),
        ("decode_kernel", "buffer"),
    }


@pytest.mark.parametrize(
    ("writer", "reader", "regions"),
    [
        ("bulk_copy_once", "load_matrices", ["pages"]),
        ("bulk_copy", "field", ["tasks"]),
        ("hand_over", "load_matrices", []),
        ("fold", "hand_over", []),
    ],
)
def test_accesses_are_explained_by_the_regions_that_both_are_to(writer, reader, regions):
    assert [each.region for each in explained(writer, reader)] == regions


@pytest.mark.parametrize("hand_over", HAND_OVERS, ids=lambda each: each.region)
def test_the_page_has_the_regions_and_their_barriers(hand_over):
    page = (ROOT / "docs" / "memory_order.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| ") and f"`{hand_over.region}`" in line)
    shared = (ROOT / "csrc" / "megakernel" / "pipeline" / "shared.cuh").read_text()
    for barrier in {hand_over.filled, hand_over.freed}:
        team = barrier.startswith("team")
        assert (f"named barrier {barrier[5:]}" if team else f"`{barrier}`") in row
        assert team or f" {barrier}" in shared
