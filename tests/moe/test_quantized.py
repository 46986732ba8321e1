"""Experts in eight bits: what the formats hold, and how far quantisation goes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from north_jax import moe
from north_jax.moe.quantized import scales_shape

quantize = jax.jit(moe.quantize, static_argnames=("scheme", "parts"))
dequantize = jax.jit(moe.dequantize, static_argnums=1)
some_of = jax.jit(lambda quantised, index: quantised[index])

SHAPES = [(3, 192, 160, 2), (2, 64, 32, 1), (1, 256, 384, 1), (2, 640, 96, 2)]  # E, rows, columns, parts


def random_weights(experts, rows, columns, spread=4.0):
    """Normal, rows of very different sizes."""
    rng = np.random.default_rng(rows)
    sizes = np.exp2(rng.uniform(-spread, spread, (experts, rows, 1)))
    return jnp.asarray(rng.standard_normal((experts, rows, columns)) * sizes, jnp.bfloat16)


def scale_by_hand(quantised, scales, expert, row, column) -> float:
    """The scale of one value, as the docstrings of the formats say; scales are those in float32."""
    match quantised.scheme:
        case "fp8_channel":
            return scales[expert, row]
        case "fp8_block":
            part = quantised.shape[1] // quantised.parts
            return scales[expert, row // part * -(-part // 128) + row % part // 128, column // 128]
        case _:
            return scales[expert, row, column // 32]


@pytest.mark.parametrize("scheme", moe.SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantised_values_are_values_times_their_scales(scheme, shape):
    *dims, parts = shape
    quantised = quantize(random_weights(*dims), scheme, parts=parts)
    assert quantised.scheme == scheme and quantised.shape == tuple(dims)
    assert quantised.scales.shape == scales_shape(scheme, tuple(dims), parts)
    whole = np.asarray(dequantize(quantised, jnp.float32))
    values = np.asarray(quantised.values.astype(jnp.float32))
    scales = np.asarray(quantised.scales).astype(np.float32)
    rng = np.random.default_rng(0)
    for expert, row, column in zip(*(rng.integers(0, size, 200) for size in dims), strict=True):
        expected = values[expert, row, column] * scale_by_hand(quantised, scales, expert, row, column)
        assert whole[expert, row, column] == np.float32(expected)
    index = jnp.asarray([dims[0] - 1, 0])
    np.testing.assert_array_equal(some_of(quantised, index), whole[np.asarray(index)])


@pytest.mark.parametrize("scheme", moe.SCHEMES)
def test_values_are_rounded_to_the_nearest_and_none_is_lost(scheme):
    """Half a unit of e4m3's three bits, or half the smallest subnormal of the scale."""
    weights = random_weights(1, 160, 160, spread=0.5)
    quantised = quantize(weights, scheme)
    wide, found = (np.asarray(w.astype(jnp.float32)) for w in (weights, dequantize(quantised, jnp.float32)))
    scales = np.asarray(quantised.scales).astype(np.float32)
    scale = np.vectorize(lambda *at: scale_by_hand(quantised, scales, *at))(*np.indices(wide.shape))
    np.testing.assert_array_less(np.abs(found - wide), np.maximum(np.abs(wide) / 16, scale * 2**-10) * 1.001 + 1e-30)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("scheme", moe.SCHEMES)
def test_rows_of_zeros_stay_zeros(scheme):
    weights = random_weights(2, 64, 64).at[1].set(0)
    found = dequantize(quantize(weights, scheme))
    assert not np.asarray(found[1]).any() and np.asarray(found[0]).all(axis=-1).any()


def test_mxfp8_scales_are_the_least_powers_of_two_that_keep_the_range():
    largest = jnp.asarray([448.0, 449.0, 896.0, 1.0, 0.875, 2.0**-120, 3e38])
    weights = jnp.zeros((7, 1, 32)).at[:, 0, 5].set(largest)
    scales = quantize(weights, "mxfp8").scales.astype(jnp.float32)[:, 0, 0]
    expected = [1.0, 2.0, 2.0, 2.0**-8, 2.0**-9, 2.0**-126, 2.0**120]
    np.testing.assert_array_equal(scales, np.array(expected, np.float32))


def test_a_container_passes_through_jit_and_keeps_its_parts():
    quantised = quantize(random_weights(2, 64, 32), "mxfp8", parts=2)
    again = jax.jit(lambda q: q)(quantised)
    assert again.parts == 2 and again.scheme == "mxfp8"
    assert quantised.nbytes == 2 * 64 * 32 + 2 * 64 * 4


@pytest.mark.parametrize(("shape", "parts"), [((2, 64, 40), 1), ((2, 65, 64), 2), ((64, 64), 1)])
def test_shapes_that_do_not_fit_are_named(shape, parts):
    with pytest.raises(ValueError, match=r"quantize: weights is \["):
        moe.quantize(jnp.zeros(shape), "mxfp8", parts=parts)


def test_an_unknown_scheme_is_named():
    with pytest.raises(ValueError, match="scheme is 'int8', expected one of fp8_channel, fp8_block, mxfp8"):
        moe.quantize(jnp.zeros((1, 32, 32)), "int8")
