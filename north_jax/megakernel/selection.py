"""Which schedule runs: by the rows that are live and the longest of their contexts.

The choices are those that measured fastest on an H200 (bench/results/2026-11-30-h200-decode-orders.json):

- The router's tiles go before those of QKV: with them last, everybody waits longer for the experts.
- Attention follows QKV at once: its pages need no experts, so they stream while the experts are chosen. A round of
  expert tiles before it costs a tenth of the step with eight rows, where choosing takes longest.
- The down projection goes before the attention output, which is the last to be known.
- From three rows on, one norm a row beats one an SM, whose loads grow with the batch.
"""

from __future__ import annotations

from .orders import Order, down_first, router_first, shared_norm

_FEW = router_first(down_first(0))
_MANY = shared_norm(_FEW)


def choices(batch: int) -> tuple[tuple[int | None, Order], ...]:
    """The orders of a batch size, each with the longest context that it is for; None for any."""
    return ((None, _FEW if batch < 3 else _MANY),)


def select(batch: int, longest_context: int) -> Order:
    """The order for a batch size and the longest context of its rows, in positions."""
    return next(order for limit, order in choices(batch) if limit is None or longest_context <= limit)
