"""What a step takes without rows, and short steps that an engine without calls now tries."""

from __future__ import annotations

import math

from batchrun.estimator.step_load import StepLoad
from batchrun.scheduling.view import EngineView

EARLY_IDLE_STEPS = 64
EARLY_PRACTICE_EVERY = 2
PRACTICE_EVERY = 16
PRACTICE_TPOTS = (0.5, 1.0, 2.0)
"""Lengths of the steps of practice, as multiples of the TPOT bound."""


def alone_s(view: EngineView) -> float:
    """How long the next step would take without offline work; 0 where calls want nothing."""
    load, left = StepLoad(), view.token_budget
    for request in (*view.online_running, *view.online_waiting):
        tokens = min(left, request.work_left_tokens or request.num_tokens)
        if tokens > 0:
            load.add(tokens, request.num_computed_tokens + tokens, is_decode=request.is_decode)
            left -= tokens
    return view.model.predict_s(load) if load.num_requests else 0.0


class Practice:
    """Now and then a short step while no call runs, so that the step-time model knows such steps
    before a call depends on them: an engine that saw full steps alone mistakes a short one."""

    def __init__(self) -> None:
        self._num_idle_steps = 0

    def most_s(self, view: EngineView) -> float:
        """The longest the next step without calls should take; once for each."""
        self._num_idle_steps += 1
        is_early = self._num_idle_steps <= EARLY_IDLE_STEPS
        number, rest = divmod(
            self._num_idle_steps, EARLY_PRACTICE_EVERY if is_early else PRACTICE_EVERY
        )
        if rest:
            return math.inf
        return PRACTICE_TPOTS[number % len(PRACTICE_TPOTS)] * view.online_slo_tpot_s
