"""Editing of a schedule's lists, to plant faults in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from north_jax.megakernel.abi import DESCRIPTOR_FIELDS, Field, Opcode
from north_jax.megakernel.schedule import Schedule


class Task:
    """One descriptor that may move. Equal only to itself."""

    def __init__(self, fields: np.ndarray) -> None:
        self.fields = fields.copy()

    def __getitem__(self, field: Field) -> int:
        return int(self.fields[field])

    def __setitem__(self, field: Field, value: int) -> None:
        self.fields[field] = value

    def set(self, **fields: int) -> Task:
        """Sets fields by their names in lower case."""
        for name, value in fields.items():
            self[Field[name.upper()]] = value
        return self

    def copy(self) -> Task:
        """Another task of the same fields."""
        return Task(self.fields)


class Edit:
    """A schedule's lists; `changes` are other fields of the edited schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.original = schedule
        self.lists = [[Task(row) for row in schedule.list_of(sm)] for sm in range(schedule.sms)]
        self.needs = schedule.counter_needs.copy()
        self.changes: dict[str, object] = {}
        self.renumber = True

    def tasks(self, opcode: Opcode, layer: int | None = None, **fields: int) -> Iterator[Task]:
        """The tasks with these fields, SM by SM."""
        wanted = {Field[name.upper()]: value for name, value in fields.items()} | {Field.OPCODE: opcode}
        if layer is not None:
            wanted[Field.LAYER] = layer
        for tasks in self.lists:
            yield from [task for task in tasks if all(task[field] == value for field, value in wanted.items())]

    def one(self, opcode: Opcode, layer: int | None = None, *, nth: int = 0, **fields: int) -> Task:
        """The nth of such tasks."""
        return list(self.tasks(opcode, layer, **fields))[nth]

    def place(self, task: Task) -> tuple[int, int]:
        """(SM, place in its list)."""
        return next((sm, tasks.index(task)) for sm, tasks in enumerate(self.lists) if task in tasks)

    def remove(self, task: Task) -> Task:
        """Takes a task out."""
        self.lists[self.place(task)[0]].remove(task)
        return task

    def insert_before(self, other: Task, task: Task) -> Task:
        """Puts a task before another."""
        sm, place = self.place(other)
        self.lists[sm].insert(place, task)
        return task

    def counter(self, name: str) -> int:
        """Number of a counter."""
        return self.original.counter_names.index(name)

    def schedule(self) -> Schedule:
        """The edited schedule."""
        flat = [task.fields for tasks in self.lists for task in tasks]
        array = np.array(flat, np.int32).reshape(-1, DESCRIPTOR_FIELDS)
        if self.renumber:
            array[:, Field.TASK] = np.arange(len(array))
        begin = np.cumsum([0, *map(len, self.lists)], dtype=np.int32)
        changes = {"tasks": array, "begin": begin, "counter_needs": self.needs} | self.changes
        return dataclasses.replace(self.original, **changes)  # type: ignore[arg-type]

    def name(self, task: Task) -> str:
        """A task as faults name it."""
        sm, place = self.place(task)
        return f"task {sum(map(len, self.lists[:sm])) + place} on SM {sm}:"


type Plant = Callable[[Edit], Sequence[str | Task]]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A kind of fault: plant(edit) plants it and gives what the checker must say, words and tasks, in one fault."""

    name: str
    rule: str
    base: str  # name of the schedule that it is planted in
    plant: Plant


class Table(list[Mutation]):
    """Mutations by decorator: @table("rule")."""

    def __call__(self, rule: str, base: str = "streamed") -> Callable[[Plant], Plant]:
        """Adds the decorated function, whose name says what it plants."""

        def add(plant: Plant) -> Plant:
            self.append(Mutation(plant.__name__.replace("_", " "), rule, base, plant))
            return plant

        return add
