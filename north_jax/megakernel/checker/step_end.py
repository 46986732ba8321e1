"""Whether a step ends after everything in it, and a row's parameters change after everybody has read them.

So nothing has to be proven across steps: the next begins after END_STEP.
"""

from __future__ import annotations

import numpy as np

from ..abi import Opcode
from .clocks import Clocks
from .faults import Report


def check_step_end(clocks: Clocks, report: Report) -> None:
    """Reports tasks that may run after END_STEP, or read a row's parameters after SAMPLE_DRAW has changed them."""
    view = clocks.view
    for opcode, later in (
        (Opcode.SAMPLE_DRAW, (Opcode.SAMPLE_DRAW, Opcode.END_STEP)),
        (Opcode.END_STEP, (Opcode.END_STEP,)),
    ):
        others = np.flatnonzero(~np.isin(view.opcode, later))
        others = others[np.argsort(view.place[others], kind="stable")]
        chain, last = np.unique(view.chain[others][::-1], return_index=True)
        last = others[::-1][last]  # of each chain
        for task in view.select(opcode).tolist():
            late = clocks.store[task][chain] < view.place[last]
            if late.any():
                other = report.describe(int(last[late.argmax()]))
                report.add("end of the step", f"{report.describe(task)} may run before {other} has ended", task=task)
