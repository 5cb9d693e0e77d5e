"""How long a step may take before an online promise breaks (Echo, section 5.1; design 6.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchrun.scheduling.view import EngineView, RequestView

TARGET_SHARE = 0.985
"""Share of the smallest TPOT that a step with offline work aims at: room for prediction errors."""
ERROR_MARGIN = 1.0
MAX_MARGIN_SHARE = 0.4
"""Offline work leaves every online request ahead of its deadlines by so many times the mean error
of predictions, at most by this share of TPOT: the last steps of a request cannot be made up for."""
LATE_SHARE = 0.5
"""Share of TPOT granted to a step when a request is late already, so that it catches up."""
IDLE_SHARE = 0.18
"""Share of the TTFT for a step without online work: an arrival waits for the rest of a step, a
whole one more, and its own prefill."""
UNUSED_SHARE = 0.4
"""The same where no online request came lately. On a GPU a full step is shorter: it costs nothing
there, and on a slow engine the first call after a pause finds no step of a second before it."""
PREFILL_SHARE = 0.12
"""Share of the TTFT for a step that holds online prefills but no online decode."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The longest a step may take, in seconds: for online work, and with offline work in it."""

    online_s: float
    offline_s: float


def deadline_s(request: RequestView) -> float:
    """When the next token of an online request is due.

    The smaller of arrival + TTFT + i * TPOT (the paper's) and first token + i * TPOT, so that
    credit from an early first token is not spent on slow ones.
    """
    index = request.num_output_tokens
    due_s = request.arrival_at_s + request.slo_ttft_s + index * request.slo_tpot_s
    if request.first_token_at_s is not None:
        due_s = min(due_s, request.first_token_at_s + index * request.slo_tpot_s)
    return due_s


def step_limits(view: EngineView, *, was_online_lately: bool) -> StepLimits:
    """The limits for the step after those in flight.

    Without any online request lately it is so long that full steps fit: no SLO tax on an idle
    endpoint.
    """
    start_s = view.now_s + view.rest_s
    slack_s, tpot_s = math.inf, math.inf
    for request in view.online_running:
        if request.is_decode:
            slack_s = min(slack_s, deadline_s(request) - start_s)
            tpot_s = min(tpot_s, request.slo_tpot_s)
    if math.isinf(tpot_s):
        return StepLimits(
            math.inf, _limit_without_decodes(view, was_online_lately=was_online_lately)
        )
    least_s = LATE_SHARE * tpot_s
    margin_s = min(ERROR_MARGIN * view.error_share, MAX_MARGIN_SHARE) * tpot_s
    offline_s = min(max(slack_s - margin_s, least_s), TARGET_SHARE * tpot_s)
    return StepLimits(max(slack_s, least_s), offline_s)


def _limit_without_decodes(view: EngineView, *, was_online_lately: bool) -> float:
    if view.online_running or view.online_waiting:
        return PREFILL_SHARE * view.online_slo_ttft_s
    return (IDLE_SHARE if was_online_lately else UNUSED_SHARE) * view.online_slo_ttft_s
