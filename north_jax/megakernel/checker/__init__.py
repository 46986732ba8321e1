"""Proves a schedule before anything runs it, or says in words what is wrong with it.

The proof is of the lists, for every instance: whatever lengths, live rows and routing a step meets, whoever claims
which item, and in whatever order SMs and the roles inside them come to their tasks. It is made of rules, each a module:

  lists, form    every descriptor is well formed, and says of its layer what the configuration says
  groups         what is dealt or claimed is run once
  arrivals       each wait names exactly the arrivals that its counter gets in a step
  graph          nobody waits for itself in the end
  coverage       every element of every buffer is written once in a layer
  clocks, races  nothing is read before it was written or overwritten before it was last read
  step_end       END_STEP comes after everything
  instances      for one instance: every item is run once, and brings the arrivals that the lists count on
  budget         what an SM keeps in shared memory fits

A rule relies on those above it, so the check ends with the first that finds faults. Pages of the KV cache need no rule
of their own: a step writes only the position that it takes from the QKV buffer, and each layer has its own pages.
"""

from __future__ import annotations

from ..schedule import Schedule
from ..shared_memory import Capacities
from .accesses import find_accesses
from .arrivals import check_arrivals
from .budget import check_budget
from .clocks import Clocks
from .coverage import Values, check_coverage
from .faults import Fault, Report, ScheduleError
from .form import check_form
from .graph import check_deadlock
from .groups import find_groups
from .instances import Instance, check_instance, instances
from .lists import check_lists, check_workspace, sizes_of
from .races import check_races
from .step_end import check_step_end
from .view import View

__all__ = ["Fault", "Instance", "ScheduleError", "check", "check_or_raise", "instances"]


def check(schedule: Schedule, instance: Instance | None = None, *, capacities: Capacities | None = None) -> list[Fault]:
    """Proves a schedule.

    Args:
      schedule: the lists of one step.
      instance: a step to go through item by item besides: lengths, live rows, routing.
      capacities: what an SM's shared memory holds; `Capacities()` by default.

    Returns:
      what is wrong; nothing for a schedule that may run.
    """
    report = Report(schedule)
    _run(schedule, instance, capacities or Capacities(), report)
    return report.faults()


def check_or_raise(
    schedule: Schedule, instance: Instance | None = None, *, capacities: Capacities | None = None
) -> None:
    """As `check`; raises ScheduleError with all that is wrong."""
    if faults := check(schedule, instance, capacities=capacities):
        raise ScheduleError(faults)


def _run(schedule: Schedule, instance: Instance | None, capacities: Capacities, report: Report) -> None:
    check_lists(schedule, report)
    if report:
        return
    check_workspace(schedule, report)
    view, sizes = View(schedule), sizes_of(schedule)
    check_form(view, sizes, report)
    if report:
        return
    check_budget(schedule, capacities, report)
    groups = find_groups(view, sizes, report)
    if report:
        return
    check_arrivals(view, sizes, groups, report)
    accesses = find_accesses(view, sizes, groups)
    values = Values.among(accesses)
    check_coverage(view, sizes, accesses, values, report)
    if instance is not None:
        check_instance(view, sizes, groups, instance, report)
    levels = check_deadlock(view, sizes, groups, report)
    if report or levels is None:
        return
    clocks = Clocks(view, sizes, groups, levels)
    check_races(clocks, accesses, values, report)
    check_step_end(clocks, report)
