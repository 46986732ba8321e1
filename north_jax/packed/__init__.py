"""Prefill of packed prompts: several in one chunk of a few compiled sizes, layer by layer, over the paged KV cache."""

from __future__ import annotations

from .buckets import bucket_of as bucket_of
from .buckets import buckets as buckets
from .packing import Packed as Packed
from .packing import Piece as Piece
from .packing import pack as pack
from .packing import packed_length as packed_length
from .prefill import PackedPrefill as PackedPrefill
