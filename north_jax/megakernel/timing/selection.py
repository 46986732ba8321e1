"""Which schedule to run for which batch, as the model ranks them: `python -m north_jax.megakernel.timing`.

The model's errors between orders are 2–4% (see `calibration`), so it tells few schedules apart:

- The router's tiles go first: with them last, everybody waits longer for the experts (1–3%).
- Few rows, or short contexts: attention goes directly after QKV. Its pages need no experts and stream while those are
  chosen: 4% over two rounds of up before it at one row, 1% at two.
- Many rows and long contexts: attention after one round of up, down before the attention output: 1%.
- One norm a SM costs a hop less than one a row for all, but loads that grow with the batch: 4% better at one row, equal
  at four, 1% worse at eight.

128 or 132 SMs and where dealing begins change less than 1%.
"""

from __future__ import annotations

from .search import Choice, Form

_FEW_ROWS = 4
_SHORT_CONTEXT = 2048


def select(live_rows: int, longest_context: int) -> Choice:
    """The schedule predicted to be fastest for these rows on an H200, or within 1% of it."""
    shared_norm = live_rows > _FEW_ROWS
    if live_rows < _FEW_ROWS or longest_context <= _SHORT_CONTEXT:
        return Form(rounds=0, shared_norm=shared_norm).choice
    return Form(rounds=1, down_first=True, shared_norm=shared_norm).choice
