"""What the server costs without a model, held to figures that leave a real engine its time."""

from __future__ import annotations

import pytest

from tests.serve import measure_overhead

pytestmark = pytest.mark.slow


def test_streaming_costs_little(record_property: pytest.RecordProperty) -> None:
    row = measure_overhead.throughput(connections=32)
    record_property("throughput", row)
    print(row)
    assert row["tok_s"] >= 5000
    assert row["us_of_processor_per_token"] <= 200  # which is 5,000 a second on one core


def test_the_first_byte_comes_at_once_also_with_a_thousand_idle_connections(
    record_property: pytest.RecordProperty,
) -> None:
    for row in (measure_overhead.first_byte(), measure_overhead.idle(1000)):
        record_property("first_byte", row)
        print(row)
        assert row["first_byte_median_ms"] < 5


def test_memory_is_flat_over_ten_minutes_of_load(record_property: pytest.RecordProperty) -> None:
    row = measure_overhead.endurance(600)
    record_property("endurance", row)
    print(row)
    assert row["resident_mib_at_the_end"] - row["resident_mib_after_a_tenth"] < 8
