"""kv_write: the compiled form and the pure-JAX reference against a loop in NumPy, on JAX's default backend."""

import functools
import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ffi
from north_jax.native import kv_write, kv_write_reference

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "")
needs_compiled = pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))
FORMS = [pytest.param(kv_write, id="compiled", marks=needs_compiled), pytest.param(kv_write_reference, id="reference")]

# (num_pages, K, d, N, T, P): head rows of 256, 12, 8 and 2 bytes and up, odd counts, one page, decode and prefill
SHAPES = [(40, 4, 128, 5, 70, 3), (13, 1, 6, 3, 1, 4), (12, 3, 4, 2, 129, 3), (2, 2, 8, 1, 64, 1), (7, 2, 1, 3, 3, 2)]
DTYPES = [jnp.bfloat16, jnp.float32]


class Case(NamedTuple):
    pages: np.ndarray
    k: np.ndarray
    v: np.ndarray
    table: np.ndarray
    start: np.ndarray
    length: np.ndarray


def random_case(shape: tuple[int, ...], dtype: jnp.dtype, seed: int) -> Case:
    """Ragged rows with idle and full ones, starts far beyond the ring, and holes in the tables. All bit patterns
    occur, NaNs among them, so that a row which is converted instead of copied shows."""
    num_pages, kv_heads, head_dim, rows, tokens, entries = shape
    rng = np.random.default_rng(seed)

    def bits(*dims: int) -> np.ndarray:
        itemsize = jnp.dtype(dtype).itemsize
        return rng.integers(0, 256, (*dims, itemsize), np.uint8).view(dtype)[..., 0]

    table = rng.permutation(num_pages)[: rows * entries].reshape(rows, entries).astype(np.int32)
    table[rng.random(table.shape) < 0.2] = -1
    length = rng.integers(0, tokens + 1, rows).astype(np.int32)
    length[0], length[-1] = tokens, length[-1] if rows == 1 else 0
    start = rng.integers(0, 3 * 64 * entries, rows).astype(np.int32)
    chunk = (rows, tokens, kv_heads, head_dim)
    return Case(bits(num_pages, 2, kv_heads, 64, head_dim), bits(*chunk), bits(*chunk), table, start, length)


def oracle(case: Case) -> np.ndarray:
    pages = case.pages.copy()
    for i, t in itertools.product(*map(range, case.k.shape[:2])):
        position = int(case.start[i]) + t
        page = case.table[i, position // 64 % case.table.shape[1]]
        if t < case.length[i] and case.start[i] >= 0 and 0 <= page < len(pages):
            pages[page, 0, :, position % 64] = case.k[i, t]
            pages[page, 1, :, position % 64] = case.v[i, t]
    return pages


def assert_same_bits(actual: jax.Array, expected: np.ndarray) -> None:
    integers = {2: np.uint16, 4: np.uint32}[expected.dtype.itemsize]
    np.testing.assert_array_equal(np.asarray(actual).view(integers), expected.view(integers))


@functools.cache
def jitted(form):
    return jax.jit(form, donate_argnums=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_oracle_bit_for_bit(form, dtype, shape):
    changed = 0
    for seed in range(4):
        case = random_case(shape, dtype, seed)
        expected = oracle(case)
        changed += np.count_nonzero(expected.view(np.uint8) != case.pages.view(np.uint8))
        assert_same_bits(jitted(form)(*map(jnp.array, case)), expected)
    assert changed


@pytest.mark.parametrize("form", FORMS)
def test_drops_pages_that_do_not_exist(form):
    case = random_case(SHAPES[0], jnp.float32, 0)
    case.table[:] = np.resize(np.array([-1, -2, 40, 2**31 - 1, -(2**31)], np.int32), case.table.shape)
    assert_same_bits(jitted(form)(*map(jnp.array, case)), case.pages)


@pytest.mark.parametrize("form", FORMS)
def test_drops_a_row_that_starts_before_zero(form):
    case = random_case(SHAPES[0], jnp.float32, 0)
    case.table[:] = np.arange(case.table.size).reshape(case.table.shape)
    case.start[:] = -1
    assert_same_bits(jitted(form)(*map(jnp.array, case)), case.pages)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("empty", [(3, 0), (0, 5)])
def test_takes_no_rows_and_no_tokens(form, empty):
    rows, tokens = empty
    case = random_case((6, 2, 8, 3, 5, 2), jnp.bfloat16, 0)
    case = Case(case.pages, case.k[:rows, :tokens], case.v[:rows, :tokens], *(x[:rows] for x in case[3:]))
    assert_same_bits(jitted(form)(*map(jnp.array, case)), case.pages)


def test_without_donation_the_operand_keeps_its_bits():
    case = random_case(SHAPES[0], jnp.bfloat16, 0)
    operands = [jnp.array(x) for x in case]
    assert_same_bits(jax.jit(kv_write)(*operands), oracle(case))
    assert_same_bits(operands[0], case.pages)
    assert_same_bits(kv_write(*operands), oracle(case))  # outside jit


def two_layers(pages, k, v, table, start, length):
    """A caller that writes, reads what it wrote, and writes again."""
    first = kv_write(pages[0], k, v, table, start, length)
    k = k + first[0, 0, :, 0].astype(k.dtype)
    return first, kv_write(pages[1], k, v, table, start, length)


@needs_compiled
def test_donated_pages_keep_their_buffers_and_are_never_copied():
    case = random_case(SHAPES[0], jnp.bfloat16, 0)
    rest = [jnp.array(x) for x in case[1:]]
    pages = (jnp.array(case.pages), jnp.array(case.pages))
    step = jax.jit(two_layers, donate_argnums=0).lower(pages, *rest).compile()
    addresses = [x.unsafe_buffer_pointer() for x in pages]
    for _ in range(3):
        pages = step(pages, *rest)
        assert [x.unsafe_buffer_pointer() for x in pages] == addresses
    shape = re.escape(f"bf16[{','.join(map(str, case.pages.shape))}]")
    hlo = step.as_text()
    assert hlo.count('custom_call_target="north_jax.kv_write"') == 2
    assert not re.search(rf"= {shape}\S* copy(-start)?\(", hlo), hlo


WRONG = {
    "pages": lambda case: case._replace(pages=case.pages[:, :, :, :32]),
    "k": lambda case: case._replace(k=case.k[..., :64]),
    "v": lambda case: case._replace(v=case.v.astype(jnp.float16)),
    "table": lambda case: case._replace(table=case.table.astype(np.float32)),
    "start": lambda case: case._replace(start=case.start[:, None]),
    "length": lambda case: case._replace(length=case.length[1:]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_operand_is_named(name):
    case = WRONG[name](random_case(SHAPES[0], jnp.bfloat16, 0))
    with pytest.raises(ValueError, match=f"kv_write: {name} is .*, expected "):
        jax.eval_shape(kv_write, *case)


@needs_compiled
@pytest.mark.parametrize("name", WRONG)
def test_the_handler_names_a_wrong_operand_too(name):
    case = WRONG[name](random_case(SHAPES[0], jnp.bfloat16, 0))
    result = jax.ShapeDtypeStruct(case.pages.shape, case.pages.dtype)
    call = jax.ffi.ffi_call("north_jax.kv_write", result, input_output_aliases={0: 0})
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"kv_write: {name} is .*, expected "):
        jax.block_until_ready(call(*case))


@needs_compiled
def test_the_handler_refuses_a_result_of_its_own():
    case = random_case(SHAPES[0], jnp.bfloat16, 0)
    call = jax.ffi.ffi_call("north_jax.kv_write", jax.ShapeDtypeStruct(case.pages.shape, case.pages.dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the result does not share the buffer of pages"):
        jax.block_until_ready(call(*case))
