"""Which schedule runs: by the rows that are live and the longest of their contexts.

The choices are those that the timing model ranks best on an H200 (`python -m north_jax.megakernel.timing`), where they
differ by more than the model's own error between orders:

- The router's tiles go before those of QKV: with them last, everybody waits longer for the experts.
- With few rows attention follows QKV at once: its pages need no experts, so they stream while the experts are chosen.
- From four rows on, one norm a row beats one an SM, whose loads grow with the batch. Beyond short contexts, a round of
  expert tiles covers the way of the queries, and the down projection goes before the attention output.
"""

from __future__ import annotations

from .orders import Order, down_first, router_first, shared_norm, streamed

_SHORT = 2048  # positions
_FEW = router_first(streamed(0))
_MANY_SHORT = shared_norm(_FEW)
_MANY_LONG = shared_norm(router_first(down_first(1)))


def choices(batch: int) -> tuple[tuple[int | None, Order], ...]:
    """The orders of a batch size, each with the longest context that it is for; None for any."""
    if batch == 1:
        return ((None, _FEW),)
    if batch < 4:
        return ((None, _MANY_SHORT),)
    return ((_SHORT, _MANY_SHORT), (None, _MANY_LONG))


def select(batch: int, longest_context: int) -> Order:
    """The order for a batch size and the longest context of its rows, in positions."""
    return next(order for limit, order in choices(batch) if limit is None or longest_context <= limit)
