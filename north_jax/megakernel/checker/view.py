"""A schedule's tasks as columns: fields, lanes and places, for rules that look at many tasks at once."""

from __future__ import annotations

import numpy as np

from ..abi import OPERATIONS, Field, Lane, Opcode
from ..schedule import Schedule


def _by_opcode(values: dict[Opcode, int], default: int) -> np.ndarray:
    table = np.full(max(Opcode) + 1, default)
    for opcode, value in values.items():
        table[opcode] = value
    return table


_LANES = _by_opcode({opcode: operation.lane for opcode, operation in OPERATIONS.items()}, -1)
_ROUTED = _by_opcode({opcode: operation.routed for opcode, operation in OPERATIONS.items()}, 0)


class View:
    """Columns of a schedule whose opcodes are known.

    A chain is what one SM does in one order: SM s has the chains s (its LOADER tasks), SMs + s (the stores of its
    MATRIX tasks) and 2 · SMs + s (its SIDE tasks).

    Attributes:
      schedule: the schedule.
      fields: [DESCRIPTOR_FIELDS, n] int64.
      opcode, layer, sm, lane, routed: [n] of each task.
      chain: [n], the chain in which the task ends.
      place: [n], its place in that chain, from 1: after it so many tasks of the chain have ended.
      chains: number of chains.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.fields = schedule.tasks.T.astype(np.int64)
        self.opcode = self[Field.OPCODE]
        self.layer = self[Field.LAYER]
        sms = schedule.sms
        self.sm = np.repeat(np.arange(sms), np.diff(schedule.begin))
        self.lane = _LANES[self.opcode]
        self.routed = _ROUTED[self.opcode].astype(bool)
        kind = np.choose(self.lane, [1, 0, 2])  # MATRIX, LOADER, SIDE
        self.chain = kind * sms + self.sm
        self.chains = 3 * sms
        self.place = _places(self.chain)
        order = np.argsort(self.opcode, kind="stable")
        self._of_opcode = np.split(order, np.searchsorted(self.opcode[order], np.arange(1, max(Opcode) + 1)))

    def __getitem__(self, field: Field) -> np.ndarray:
        return self.fields[field]

    def __len__(self) -> int:
        return len(self.opcode)

    def select(self, *opcodes: Opcode) -> np.ndarray:
        """Numbers of the tasks with one of the opcodes, ascending."""
        return np.sort(np.concatenate([self._of_opcode[opcode] for opcode in opcodes]))

    def reading(self, field: Field) -> np.ndarray:
        """Numbers of the tasks whose operation reads a field."""
        return self.select(*(opcode for opcode, operation in OPERATIONS.items() if field in operation.fields))

    def ends(self, tasks: np.ndarray) -> np.ndarray:
        """[chains], how many tasks of each chain have ended once all of `tasks` have."""
        ends = np.zeros(self.chains, np.int64)
        np.maximum.at(ends, self.chain[tasks], self.place[tasks])
        return ends


def _places(chain: np.ndarray) -> np.ndarray:
    """[n], the place of each task among those of its chain before it and itself."""
    order = np.argsort(chain, kind="stable")
    ordered = chain[order]
    first = np.searchsorted(ordered, ordered, side="left")
    places = np.empty(len(chain), np.int64)
    places[order] = np.arange(len(chain)) - first + 1
    return places


def ranges(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of many ranges: (index of the range, number), range by range."""
    index = np.repeat(np.arange(len(first)), count)
    start = np.cumsum(count) - count
    return index, np.arange(len(index)) - start[index] + first[index]


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct columns of keys [k, n], ascending, and which of them each column is."""
    if not keys.shape[1]:
        return keys, np.zeros(0, np.int64)
    low = keys.min(axis=1, keepdims=True)
    shape = tuple((keys - low).max(axis=1) + 1)
    flat, which = np.unique(np.ravel_multi_index(tuple(keys - low), shape), return_inverse=True)
    return np.stack(np.unravel_index(flat, shape)) + low, which


MATRIX, LOADER, SIDE = int(Lane.MATRIX), int(Lane.LOADER), int(Lane.SIDE)
