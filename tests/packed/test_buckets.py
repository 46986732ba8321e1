"""Chunk sizes: few, and padded by less than 15% on mixes of prompts like those that servers get."""

from __future__ import annotations

import numpy as np
import pytest

from north_jax.packed.buckets import LEAST, bucket_of, buckets, chunks_of
from north_jax.packed.packing import packed_length

CHUNK, BUSY_CHUNK, ROWS = 8192, 2048, 8  # the server's on a GPU

# Median tokens and the deviation of their logarithm: chat and code completion as in published traces, the new tokens of
# an agent's turn whose history the prefix cache holds, and documents.
MIXES = {"chat": (250, 1.0), "code": (1500, 1.0), "agent": (700, 0.8), "documents": (8000, 0.7)}


def lengths(mix: str) -> list[int]:
    median, deviation = MIXES[mix]
    drawn = np.random.default_rng(0).lognormal(np.log(median), deviation, 3000)
    return np.clip(drawn, 16, 131072).astype(int).tolist()


@pytest.mark.parametrize("mix", MIXES)
def test_padding_of_prompts_alone(mix):
    prompts, sizes = lengths(mix), buckets(CHUNK)
    computed = sum(bucket_of(sizes, piece) for prompt in prompts for piece in chunks_of(prompt, CHUNK))
    assert computed / sum(prompts) < 1.15


@pytest.mark.parametrize("chunk", [CHUNK, BUSY_CHUNK])
@pytest.mark.parametrize("mix", MIXES)
def test_padding_of_a_queue_of_prompts(mix, chunk):
    """Chunks are filled as the scheduler fills them: from the first prompts, up to ROWS of them."""
    queue, sizes, computed = lengths(mix), buckets(CHUNK), 0
    total = sum(queue)
    while queue:
        pieces: list[int] = []
        while queue and len(pieces) < ROWS and (room := chunk - packed_length(pieces, following=True)) > 0:
            pieces.append(min(queue[0], room))
            queue[0] -= pieces[-1]
            if not queue[0]:
                queue.pop(0)
        computed += bucket_of(sizes, packed_length(pieces))
    assert computed / total < 1.15


@pytest.mark.parametrize("most", [64, 192, 256, 8192, 32768])
def test_they_are_few_and_reach_the_longest_chunk(most):
    sizes = buckets(most)
    assert sizes[0] == LEAST and sizes[-1] == most and list(sizes) == sorted(set(sizes))
    assert all(size % LEAST == 0 for size in sizes)
    assert len(sizes) <= 26
    assert [bucket_of(sizes, tokens) for tokens in (1, LEAST, most)] == [LEAST, LEAST, most]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        buckets(100)
    with pytest.raises(ValueError, match="257 tokens exceed"):
        bucket_of(buckets(256), 257)


def test_chunks_of_a_prompt():
    assert chunks_of(5, 8) == [5]
    assert chunks_of(16, 8) == [8, 8]
    assert chunks_of(17, 8) == [8, 8, 1]
