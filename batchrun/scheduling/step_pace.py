"""How long steps may be beside calls, beyond when their next tokens are due.

Two things that no single call shows: the KV that calls hold the longer, the longer steps are, and
how well the step-time model knows steps of the length that calls will want.
"""

from __future__ import annotations

import math

from batchrun.estimator.step_load import StepLoad
from batchrun.scheduling.view import EngineView

KV_SHARE = 0.43
"""Share of all blocks that calls may hold before steps beside them become shorter."""
KV_MEMORY_S = 10.0
"""So far back the mean step looks: answers are longer than that, so the pace settles."""
LONGEST_GAP_S = 1.0
"""A longer time between two plans is a pause, not a step."""
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


class KvPace:
    """How long steps may take so that calls do not outgrow their share of the KV cache.

    By Little's law calls that come at one rate hold KV in proportion to how long they stay, which
    is in proportion to the time between two of their tokens. So the mean step of late, times the
    share over what they hold and wait for, is a step that brings them to that share.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._last_at_s = -math.inf

    def most_s(self, view: EngineView) -> float:
        """The longest the step after those in flight should take; once a step."""
        if not any(request.is_decode for request in view.online_running):
            self._last_at_s = -math.inf
            return math.inf
        self._note(view.now_s)
        if not self._mean_s:
            return math.inf
        waiting = sum([view.blocks_for(request.num_tokens) for request in view.online_waiting])
        share_blocks = KV_SHARE * view.total_blocks
        return self._mean_s * share_blocks / max(view.online_blocks + waiting, 1)

    def _note(self, now_s: float) -> None:
        step_s = now_s - self._last_at_s
        self._last_at_s = now_s
        if step_s < LONGEST_GAP_S:
            weight = -math.expm1(-step_s / KV_MEMORY_S) if self._mean_s else 1.0
            self._mean_s += weight * (step_s - self._mean_s)


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
