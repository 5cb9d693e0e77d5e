"""One limit for the whole run, shared out to its phases."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

PHASE_OVERHEAD_S = 1.5
"""A new scheduler, drawing the load, the steps that end a phase."""


def process_age_s() -> float:
    """Seconds since this process began: importing vLLM counts too."""
    return time.time() - psutil.Process().create_time()


@dataclass(frozen=True, slots=True)
class Share:
    """How long a phase may be, in seconds."""

    least_s: float = 10.0
    most_s: float = 60.0

    def of(self, left_s: float, num_phases: int) -> float | None:
        """The length of the next of `num_phases` with `left_s` for all; None: there is no time.

        An equal share, or that of as many phases as fit: then the last ones lack.
        """
        num_fitting = min(num_phases, int(left_s / (self.least_s + PHASE_OVERHEAD_S)))
        if num_fitting <= 0:
            return None
        return min(self.most_s, left_s / num_fitting - PHASE_OVERHEAD_S)
