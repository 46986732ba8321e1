"""What wave builders share: tasks under construction, counters, tile sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ..config import Config
from .abi import Field, Opcode
from .orders import Order

type Task = dict[Field, int]  # fields that are not named are 0

F = Field
TILE_ROWS = 16  # output rows of a tensor-core tile


@dataclasses.dataclass(frozen=True, slots=True)
class Dealt:
    """The tasks of a wave. Fixed: tasks[s] are those of SM s; otherwise each entry is one task for any SM."""

    tasks: list[list[Task]]
    fixed: bool


def anywhere(tasks: Iterable[Task]) -> Dealt:
    """Tasks for any SM."""
    return Dealt([[task] for task in tasks], fixed=False)


def tiles(rows: int, size: int = TILE_ROWS) -> Iterator[Task]:
    """ROW fields of the tiles of `rows` rows; the last may be smaller."""
    for begin in range(0, rows, size):
        yield {F.ROW_BEGIN: begin, F.ROW_COUNT: min(size, rows - begin)}


def shares(runs: Sequence[tuple[int, int, int]], sms: int, unit: int) -> list[list[tuple[int, int, int]]]:
    """Deals runs of rows, (begin, end, name), evenly: gives the parts of each SM, which keep their names.

    The runs count as one that is cut into `sms` shares, each a multiple of `unit` rows and none more than a unit larger
    than another; a share that crosses from one run to the next is in parts.
    """
    total = sum(end - begin for begin, end, _ in runs) // unit
    cuts = [sm * total // sms * unit for sm in range(sms + 1)]
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(sms)]
    before = 0  # rows of the runs before
    for begin, end, name in runs:
        for sm, (first, last) in enumerate(pairwise(cuts)):
            low, high = max(first - before, 0), min(last - before, end - begin)
            if low < high:
                parts[sm].append((begin + low, begin + high, name))
        before += end - begin
    return parts


class Counters:
    """Counters of a schedule under construction, and the arrivals that each gets in a step."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.needs: list[int] = []

    def new(self, name: str) -> int:
        """A counter."""
        self.names.append(name)
        self.needs.append(0)
        return len(self.names) - 1

    def several(self, names: Iterable[str]) -> int:
        """Consecutive counters; gives the first."""
        first = len(self.names)
        for name in names:
            self.new(name)
        return first

    def arrive(self, counter: int, count: int = 1) -> Task:
        """The fields of a task that arrives at a counter `count` times."""
        self.needs[counter] += count
        return {F.ARRIVE: counter, F.ARRIVE_COUNT: count}

    def arrive_items(self, first: int, counters: int, each: int) -> Task:
        """The fields of tasks whose items bring `each` arrivals to every one of `counters` counters."""
        for counter in range(first, first + counters):
            self.needs[counter] = each
        return {F.ARRIVE: first, F.ARRIVE_COUNT: 1}


def wait(counter: int) -> Task:
    """The fields of a task that waits for a counter; `build` fills in the need."""
    return {F.WAIT: counter, F.WAIT_COUNT: 1}


def qkv_rows(config: Config) -> int:
    """Rows of which the parts of QKV_PROJ are multiples: they lie within one head."""
    return math.gcd(TILE_ROWS // 2, config.head_dim)


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of tiles, chosen from the geometry so that no tile lies across a boundary that somebody waits at."""

    router_rows: int  # so that every SM has as many, or one less
    dense_units: int  # hidden units of a tile: as many gate rows and as many up rows
    dense_slice: int  # hidden units that FFN_DOWN waits for together
    expert_units: int
    combine_heads: int  # query heads of one ATTN_COMBINE task
    splits: int  # slices of O_PROJ's input

    @classmethod
    def of(cls, config: Config, batch: int, sms: int, splits: int) -> Tiling:
        """The tiling of a model. Raises ValueError where `splits` does not divide the KV heads."""
        if config.num_key_value_heads % splits:
            raise ValueError(f"splits={splits} does not divide {config.num_key_value_heads} KV heads")
        width, group = config.dense_intermediate_size, config.queries_per_kv_head
        units = math.gcd(TILE_ROWS // 2, width)
        slices = max(n for n in range(1, 5) if width % (n * units) == 0)
        heads = [n for n in range(1, group) if group % n == 0 and batch * config.num_attention_heads <= n * sms]
        return cls(
            router_rows=min(TILE_ROWS, -(-config.num_experts // sms)),
            dense_units=units,
            dense_slice=width // slices,
            expert_units=math.gcd(TILE_ROWS // 2, config.intermediate_size),
            combine_heads=heads[0] if heads else group,
            splits=splits,
        )


class Draft:
    """A schedule under construction: what every wave needs to know."""

    def __init__(self, config: Config, order: Order, tiling: Tiling, batch: int, sms: int) -> None:
        self.config, self.order, self.tiling = config, order, tiling
        self.batch, self.sms = batch, sms
        self.counters = Counters()
        self.queues: list[str] = []

    def queue(self, name: str) -> Task:
        """The field of tasks that claim from a new queue."""
        self.queues.append(name)
        return {F.QUEUE: len(self.queues) - 1}

    def task(self, opcode: Opcode, layer: int, **fields: int) -> Task:
        """A task for all rows of the batch; keywords are names of fields in lower case."""
        named = {Field[name.upper()]: value for name, value in fields.items()}
        return {F.OPCODE: opcode, F.LAYER: layer, F.BATCH_COUNT: self.batch} | named
