"""The parts of a comparison: differences, near ties, partings, colours."""

from __future__ import annotations

import numpy as np
import pytest

from north_jax.compare.compiled_pass import chosen_experts
from north_jax.compare.heat_map import colour
from north_jax.compare.measures import Difference
from north_jax.compare.passes import Pass
from north_jax.compare.routing import Routing, routing, yardsticks
from north_jax.compare.tables import where
from north_jax.compare.texts import parting, rounding
from tests.support import tiny_config


def test_differences():
    exact = np.array([[3.0, 4.0], [0.0, 2.0]], np.float32)
    same = Difference.of(exact, exact)
    assert (same.error, same.median, same.maximum) == (0, 0, 0) and same.cosine == pytest.approx(1)
    off = Difference.of(exact + np.array([[0, 0.5], [0, 0]], np.float32), exact)
    assert off.error == pytest.approx(0.5 / 29**0.5)
    assert off.median == pytest.approx(0.05)  # between 0.1 and 0
    assert off.maximum == 0.5
    assert Difference.of(np.zeros((2, 2)), np.zeros((2, 2))).cosine == 1
    assert np.isnan(Difference.of(np.full((2, 2), np.nan), exact).error)
    assert Difference.of(exact, np.zeros((2, 2))).error == np.inf
    with pytest.raises(ValueError, match="shape"):
        Difference.of(exact[0], exact)


def of_logits(logits: np.ndarray) -> Pass:
    config = tiny_config(num_experts_per_tok=2)
    experts = chosen_experts(config, logits)
    return Pass([{}, {"router_logits": logits}], [None, experts], np.zeros((len(logits), 3), np.float32))


def test_near_ties_are_told_from_mistakes():
    exact = np.array([[4, 3, 2.99, 0], [4, 3, 1, 0], [4, 3, 1, 0], [4, 3, 1, 0]], np.float32)
    theirs = exact + np.float32(0.01) * np.array([1, -1, 1, -1], np.float32)
    assert yardsticks(of_logits(exact), of_logits(theirs)) == [0.0, pytest.approx(0.01, rel=1e-3)]
    found = exact.copy()
    found[0, 2] = 3.5  # a near tie falls the other way
    found[2, 2] = 3.5  # what was clear does too
    [none, layer] = routing(of_logits(exact), of_logits(found), [0.0, 0.01])
    assert none is None
    assert layer == Routing(choices=4, same=2, near_ties=1, changed_near=1)
    assert layer.changed_clear == 1


def test_experts_of_equal_logits_are_the_first():
    experts = chosen_experts(tiny_config(num_experts_per_tok=2), np.array([[1, 5, 5, 5], [0, 0, 0, 1.0]]))
    assert experts is not None
    assert experts.tolist() == [[1, 2], [0, 3]]


def test_where_texts_part():
    exact = np.array([[0, 1, 0], [0, 0, 1], [0.9, 0, 1]], np.float32)
    moved = rounding(exact, exact + np.float32(0.05))
    assert parting([1, 2, 2], None, exact, moved) is None and where(None) == "nowhere"
    near = parting([1, 2, 0], None, exact, moved)
    assert near is not None
    assert (near.position, near.token, near.other, near.near_tie) == (2, 0, 2, True)
    assert near.margin == pytest.approx(0.1)
    clear = parting([1, 1, 0], [1, 2, 0], exact, moved)
    assert clear is not None
    assert (clear.position, clear.near_tie) == (1, False)
    assert where(clear) == "at 1, margin 1 (clear)"


def test_colours_follow_the_error():
    brightness = [sum(bytes.fromhex(colour(10.0**exponent)[1:])) for exponent in range(-6, 1)]
    assert brightness == sorted(brightness)
    assert colour(0) == colour(1e-12) and colour(1) == colour(np.inf)
    assert colour(np.nan) not in (colour(0), colour(1))
