"""Generation for research code: one prompt, one row, the same prefill and decoders that the server batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from .config import Config
from .decoding import (
    Backend,
    DecodeRow,
    Draw,
    Finish,
    Grammar,
    SlotSampler,
    TokenHistory,
    TokenRecord,
    check_draws,
    finish_of,
    make_decoder,
)
from .kv_cache import PAGE_SIZE, pages_for
from .layers import Params
from .logprobs import Logprobs
from .prompt_rows import PromptRows
from .sampling import SamplingParams

_QUANTUM = 8  # decode steps between yields: a start costs little beside them, and a reader who leaves wastes no more
_LEAST_PAGES = 8  # of a cache; a longer text takes the next power of two


def generate(
    config: Config,
    params: Params,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    stop_token_ids: Collection[int] | None = None,
    *,
    backend: Backend = "jax",
    grammar: Grammar | None = None,
) -> Iterator[int]:
    """Continues a prompt, token by token. The first token comes from the prompt; later ones are drawn a few at a time.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      prompt: token ids, at least one.
      max_tokens: most tokens to yield.
      sampling: greedy by default.
      stop_token_ids: tokens that end the text, not yielded; by default the configuration's eos tokens.
      backend: what decodes; see `decoding.make_decoder`.
      grammar: which tokens may come next; it has accepted none yet.

    Yields:
      token ids.

    Raises:
      BackendError: the backend cannot decode here.
      FloatingPointError: the logits are not finite, or the grammar allows no token.
      ValueError: the prompt is empty, holds a token outside the vocabulary, or leaves the model's context too short; or
        the bias names a token outside the vocabulary.
    """
    arguments = (config, params, prompt, max_tokens, sampling, stop_token_ids)
    for token, _ in generate_with_logprobs(*arguments, backend=backend, grammar=grammar):
        yield token


def generate_with_logprobs(
    config: Config,
    params: Params,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    stop_token_ids: Collection[int] | None = None,
    *,
    backend: Backend = "jax",
    grammar: Grammar | None = None,
) -> Iterator[tuple[int, Logprobs | None]]:
    """As `generate`, with each token's log-probabilities where `sampling.logprobs` asks for them."""
    if len(prompt) == 0:  # also of a NumPy array, which has no truth value
        raise ValueError("prompt is empty")
    outside = [token for token in prompt if not 0 <= token < config.vocab_size]
    if outside:
        raise ValueError(f"prompt holds token {outside[0]}, the vocabulary has {config.vocab_size}")
    total = len(prompt) + max_tokens
    if total > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(f"prompt ({len(prompt)}) and max_tokens ({max_tokens}) exceed the context of {limit}")
    if max_tokens < 1:
        return
    stops = frozenset(config.eos_token_id if stop_token_ids is None else stop_token_ids)
    sampling = sampling or SamplingParams(temperature=0)
    sampler = SlotSampler(1, config.vocab_size)
    history = TokenHistory(prompt)
    draw = Draw(len(prompt), sampling, history, grammar)
    check_draws({0: draw}, config.vocab_size)
    context = PAGE_SIZE * max(_LEAST_PAGES, 1 << (pages_for(total) - 1).bit_length())  # few shapes to compile
    rows = PromptRows(config, params, rows=1, max_context=context)
    decoder = make_decoder(config, params, backend=backend, slots=1, max_context=context)
    logits = rows.prefill([prompt])
    token, logprobs = sampler.draw(logits, {0: draw})[0]
    records = [TokenRecord(0, token, finish_of(token, max_tokens, stops), logprobs)]
    count = 0
    while True:
        for _, token, finish, logprobs in records:
            if finish is Finish.ERROR:
                raise FloatingPointError(f"the logits at position {len(prompt) + count} are not finite")
            if finish is Finish.STOP:
                return
            count += 1
            yield token, logprobs
            if finish is Finish.LENGTH:
                return
        if count == 1:  # not before the first token is out
            decoder.compile(rows.cache, rows.tables())
        row = DecodeRow(0, token, len(prompt) + count - 1, max_tokens - count, stops, sampling, history, grammar)
        rows.grow(0, row.position, row.position + min(_QUANTUM, row.remaining))
        records = []
        rows.cache = decoder.decode(rows.cache, rows.tables(), [row], _QUANTUM, records.extend)
