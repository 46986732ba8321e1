"""Wave orders: in which order the operations of a layer are dealt to the SMs, as data.

A wave is all tasks of one operation in one layer. An order is a sequence of groups of waves; the waves of a group are
dealt together, evenly. Names follow the measured and the published orders.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Wave:
    """One wave of a layer.

    Attributes:
      name: norm, qkv, router, topk, finalize, gather, attention, combine, up, down, moe_combine or o_proj. A dense
        layer has no router, topk, finalize, gather and moe_combine, and runs its MLP in up and down.
      drain: attention of full layers, up or down claim their items from a queue instead of being dealt them.
      rounds: up: the dealt rounds [first, end) that this wave runs; end None for all that are left.
    """

    name: str
    drain: bool = False
    rounds: tuple[int, int | None] = (0, None)


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """A wave order.

    Attributes:
      name: for tables and reports.
      groups: the waves of a layer.
      local_norm: every SM norms for itself (LOCAL_ buffers), instead of one task a row for all.
      round_robin: dealing goes on where the last group ended, instead of beginning at SM 0.
    """

    name: str
    groups: tuple[tuple[Wave, ...], ...]
    local_norm: bool = True
    round_robin: bool = False

    @property
    def routed_by_tables(self) -> bool:
        """Whether routing goes through TOPK, ROUTES and GATHERED, instead of every SM choosing for itself."""
        return any(wave.name == "finalize" for group in self.groups for wave in group)


def _each(*names: str | Wave) -> tuple[tuple[Wave, ...], ...]:
    return tuple((name if isinstance(name, Wave) else Wave(name),) for name in names)


def streamed(rounds: int) -> Order:
    """The measured order: `rounds` rounds of up run before attention, to cover the way of the queries."""
    up = (Wave("up", rounds=(0, rounds)), Wave("up", rounds=(rounds, None)))
    qkv = (Wave("qkv"), Wave("router"))
    first = ((up[0],),) if rounds else ()
    groups = (*_each("norm"), qkv, *first, *_each("attention", "combine", up[1], "o_proj", "down"))
    return Order(f"streamed-{rounds}", groups)


def down_first(rounds: int) -> Order:
    """`streamed` with the down projection before the attention output."""
    order = streamed(rounds)
    *head, o_proj, down = order.groups
    return dataclasses.replace(order, name=f"down-first-{rounds}", groups=(*head, down, o_proj))


def router_first(order: Order) -> Order:
    """The same with the router's tiles dealt before those of QKV."""
    groups = tuple(tuple(sorted(group, key=lambda wave: wave.name != "router")) for group in order.groups)
    return dataclasses.replace(order, name=f"{order.name}, router 1st", groups=groups)


def shared_norm(order: Order) -> Order:
    """The same with one norm a row for all SMs, instead of one an SM."""
    return dataclasses.replace(order, name=f"{order.name}, shared norm", local_norm=False)


_ROUTING = _each("norm", "qkv", "router", "topk", "finalize", "gather")
_ATTENTION = Wave("attention", drain=True)
_EXPERTS = (Wave("up", drain=True), Wave("down", drain=True))

# The orders of the published megakernel, with its queues and its round-robin placement.
TUNED = Order(
    "tuned",
    (*_ROUTING, *_each(_ATTENTION, "combine", *_EXPERTS, "moe_combine", "o_proj")),
    local_norm=False,
    round_robin=True,
)
INTERLEAVED = dataclasses.replace(
    TUNED,
    name="interleaved",
    groups=(*_ROUTING, *_each(_ATTENTION, *_EXPERTS, "combine", "moe_combine", "o_proj")),
)
ATTENTION_FIRST = dataclasses.replace(
    TUNED,
    name="attention-first",
    groups=(*_ROUTING, *_each(_ATTENTION, "combine", "o_proj", *_EXPERTS, "moe_combine")),
)
_AHEAD = router_first(streamed(0))
_DOWN_AHEAD = router_first(down_first(0))
ORDERS = {
    order.name: order
    for order in (
        *map(streamed, range(4)),
        *map(down_first, range(1, 4)),
        _AHEAD,
        shared_norm(_AHEAD),
        _DOWN_AHEAD,
        shared_norm(_DOWN_AHEAD),
        shared_norm(router_first(down_first(1))),
        TUNED,
        INTERLEAVED,
        ATTENTION_FIRST,
    )
}
