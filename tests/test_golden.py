"""Agreement with Transformers on the checkpoints of tests/golden, whose variants.py says what they vary.

In float32 everything agrees to `TOLERANCE` by the measure `golden.compare.error`. Rounding cannot change which experts
run or which token is greedy: make_golden.py chose seeds that keep both far from a tie.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import north_jax
from north_jax.config import Config
from north_jax.forward_pass import forward, forward_with_taps
from north_jax.generation import generate
from north_jax.inference import decode_step, prefill
from north_jax.kv_cache import PagedRows, init_cache
from tests.golden.compare import TOLERANCE, UNOPTIMISED, Golden, error, golden
from tests.golden.oracle import Layer, Model
from tests.golden.oracle import forward as oracle_forward
from tests.golden.variants import GOLDEN, VARIANTS

NAMES = [variant.name for variant in VARIANTS]
# Prefill and decode compile for seconds: `make test` walks variants that differ in attention, `make test-full` all.
QUICK_PAGED = {"north", "irregular", "long"}
PAGED = [name if name in QUICK_PAGED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
BF16 = ("north", "softmax", "layer_norm")


@functools.cache
def whole_sequence(name: str) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits and intermediates; not jitted, because eagerly the variants share compiled operations."""
    g = golden(name)
    return forward_with_taps(g.config, g.params, g.tokens)


def test_the_folder_holds_the_table():
    """Each variant has its files, and nothing lies there that the table does not name."""
    for variant in VARIANTS:
        assert (variant.checkpoint / "model.safetensors").is_file()
        assert variant.outputs.is_file()
    assert {path.parent.name for path in GOLDEN.glob("*/config.json")} == set(NAMES)
    assert {path.name.removesuffix(".outputs.safetensors") for path in GOLDEN.glob("*.safetensors")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_layer(name):
    """The embedding and each layer's output, in order, so that the first failure is the layer at fault."""
    g = golden(name)
    _, taps = whole_sequence(name)
    positions = g.outputs["positions"]
    stages = ["embed", *(f"layers.{i}.output" for i in range(g.config.num_hidden_layers))]
    assert len(stages) == len(g.outputs["hidden"])
    for stage, expected in zip(stages, g.outputs["hidden"], strict=True):
        worst = error(taps[stage][0, positions], expected)
        assert worst < TOLERANCE, f"{stage}: error {worst:.1e}"


@pytest.mark.parametrize("name", NAMES)
def test_routing(name):
    """Router logits of every MoE layer, and the experts chosen."""
    g = golden(name)
    _, taps = whole_sequence(name)
    sparse = [i for i, kind in enumerate(g.config.mlp_layer_types) if kind == "sparse"]
    for layer, expected in zip(sparse, g.outputs["router_logits"], strict=True):
        worst = error(taps[f"layers.{layer}.router_logits"][0], expected)
        assert worst < TOLERANCE, f"layer {layer}: error {worst:.1e}"
        best = np.argsort(-expected, axis=-1)[:, : g.config.num_experts_per_tok]  # [T, k]
        np.testing.assert_array_equal(taps[f"layers.{layer}.experts"][0], best)


@pytest.mark.parametrize("name", NAMES)
def test_logits(name):
    """Against Transformers in float32 everywhere, and in float64 at the kept positions."""
    g = golden(name)
    logits, _ = whole_sequence(name)
    single = error(logits, g.outputs["logits"])
    double = error(logits[:, g.outputs["positions"]], g.outputs["logits_f64"])
    print(f"{name}: error against float32 {single:.1e}, against float64 {double:.1e}")
    assert max(single, double) < TOLERANCE


@pytest.mark.parametrize("method", ["gathered", "tiled"])
def test_other_ways_to_run_experts(method):
    """Models this small run all experts on all tokens, unless told otherwise."""
    g = golden("odd_vocab")
    assert error(forward(g.config, g.params, g.tokens, method=method), g.outputs["logits"]) < TOLERANCE


class Rows:
    """Rows that take the same golden sequence, each at its own pace, over one paged cache filled with NaN."""

    def __init__(self, g: Golden, count: int, chunk: int) -> None:
        length = g.tokens.shape[1]
        pages = {"full_pages": count * 5, "sliding_pages": count * 5}
        self.g, self.chunk = g, chunk
        self.paged = PagedRows(g.config, rows=count, max_context=length, max_chunk=chunk, **pages)
        self.cache = jax.tree.map(lambda p: p * np.nan, init_cache(g.config, **pages, dtype="float32"))
        self.position = np.zeros(count, np.int32)
        jit = functools.partial(jax.jit, static_argnums=0, donate_argnums=2, compiler_options=UNOPTIMISED)
        self.prefill, self.decode_step = jit(prefill), jit(decode_step)

    def feed(self, counts: list[int]) -> np.ndarray:
        """Appends the next counts[i] tokens to row i, by `decode_step` where none is above 1; the error of each row."""
        tokens = np.zeros((len(counts), self.chunk), np.int32)
        for row, (start, count) in enumerate(zip(self.position, counts, strict=True)):
            if count:
                self.paged.grow(row, start, start + count)
            tokens[row, :count] = self.g.tokens[0, start : start + count]
        start, length = self.position.copy(), np.array(counts, np.int32)
        arguments = self.g.config, self.g.params, self.cache, self.paged.snapshot()
        if max(counts) > 1:
            self.cache, logits = self.prefill(*arguments, tokens, start, length)
        else:
            self.cache, logits = self.decode_step(*arguments, tokens[:, 0], start, length > 0)
        self.position += length
        expected = self.g.outputs["logits"][0]
        return np.array(
            [error(logits[row], expected[self.position[row] - 1]) if count else 0 for row, count in enumerate(counts)]
        )


def chunks(length: int, most: int, ends: set[int]) -> list[int]:
    """Sizes of chunks of at most `most` tokens that together hold `length` and break at each of `ends`."""
    breaks = sorted({end for end in ends if 0 < end < length} | {length})
    sizes = []
    for first, end in zip([0, *breaks], breaks, strict=False):
        whole, rest = divmod(end - first, most)
        sizes += [most] * whole + [rest] * (rest > 0)
    return sizes


@pytest.mark.parametrize("name", PAGED)
def test_prefill_and_decode(name):
    """Chunked prefill, then token by token, past the window's edge and across pages.

    Row 0 takes the prompt in the largest chunks and decodes the rest. Row 1 takes everything by prefill, in chunks that
    break around the window's edge, the pages' edges and the prompt's end, and idles. Row 2 takes odd sizes up to just
    before its window is full and decodes from there.
    """
    g = golden(name)
    length, prompt, window = g.tokens.shape[1], g.variant.prompt_length, g.config.sliding_window
    edges = {edge + step for edge in (window, 64, 128, 192, prompt) for step in (-1, 0, 1)}
    early = min(window - 2, prompt)
    plans = [chunks(prompt, 48, set()), chunks(length, 48, edges), chunks(early, 48, {1, 3, 6, 11, 20, 33})]
    rows = Rows(g, len(plans), chunk=48)
    worst = np.zeros(len(plans))
    while any(plans):
        worst = np.maximum(worst, rows.feed([plan.pop(0) if plan else 0 for plan in plans]))
    while (rows.position < length).any():
        worst = np.maximum(worst, rows.feed([int(position < length) for position in rows.position]))
    print(f"{name}: worst error of a row {worst.max():.1e}")
    assert worst.max() < TOLERANCE, f"rows {worst}"


@pytest.mark.parametrize("name", NAMES)
def test_transformers_agrees_with_itself(name):
    """Its own cached decode gives what its full pass gives, so the rows above were compared with both."""
    outputs = golden(name).outputs
    assert error(outputs["decode_logits"], outputs["logits"][:, -outputs["decode_logits"].shape[1] :]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["north", "long"])
def test_greedy_continuation(name):
    """`generate` repeats the tokens that Transformers chose."""
    g = golden(name)
    prompt, expected = np.split(g.tokens[0], [g.variant.prompt_length])
    out = list(generate(g.config, g.params, prompt.tolist(), len(expected), stop_token_ids=()))
    assert out == expected.tolist()


@pytest.mark.parametrize("name", BF16)
def test_bfloat16(name):
    """Our bfloat16 is nearer to float32 than Transformers' bfloat16, which also rounds router logits and probabilities.

    Rounding may send a token to other experts, in either program, and then that position is far off; so medians over
    positions are compared, which a few such tokens do not move.
    """
    g = golden(name)
    model = north_jax.load(g.variant.checkpoint)
    assert model.config.dtype == "bfloat16"
    logits = np.asarray(forward(model.config, model.params, g.tokens))
    expected = g.outputs["logits"]
    ours = np.linalg.norm(logits - expected, axis=-1)[0] / np.linalg.norm(expected, axis=-1)[0]  # [T]
    theirs = g.outputs["bf16_error"]
    print(f"{name}: median error ours {np.median(ours):.1e}, Transformers' {np.median(theirs):.1e}")
    assert np.median(ours) < np.median(theirs)


@pytest.mark.parametrize("legacy", sorted(GOLDEN.glob("*/config_legacy.json")), ids=lambda path: path.parent.name)
def test_older_spelling_of_the_configuration(legacy):
    assert Config.from_json(legacy) == Config.from_json(legacy.parent)


def oracle_model(config: Config) -> Model:
    router = "softmax"
    if config.expert_selection_fn == "sigmoid":
        router = "sigmoid, normalised" if config.norm_topk_prob else "sigmoid"
    layers = [
        Layer(config.num_attention_heads, config.num_key_value_heads, rope, config.window(i))
        for i, rope in enumerate(config.rope_layers)
    ]
    return Model(
        layers,
        centred=config.norm_type == "layer",
        eps=config.norm_eps,
        theta=config.rope_theta,
        top_k=config.num_experts_per_tok,
        router=router,
        logit_scale=config.logit_scale,
    )


@pytest.mark.parametrize("name", NAMES)
def test_oracle(name):
    """The NumPy oracle is Transformers' model: both in float64, apart only by rounding."""
    g = golden(name)
    logits = oracle_forward(oracle_model(g.config), g.params, g.tokens[0])
    assert error(logits[g.outputs["positions"]], g.outputs["logits_f64"][0]) < 1e-12
