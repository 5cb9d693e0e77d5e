"""How long a step may take before an online SLO breaks (Echo, arXiv 2504.03651, section 5.1), what
it takes without rows, and short steps that an engine without calls now and then tries."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchrun.estimator.step_load import StepLoad
from batchrun.scheduling.fill import LITTLE_MORE
from batchrun.scheduling.view import GROWTH_TOKENS, EngineView, RequestView

TARGET_SHARE = 0.985
"""Share of the smallest TPOT that a step with offline work aims at: room for prediction errors."""
LEAST_MARGIN_SHARE = 0.05
"""All prefills leave every online request ahead of its deadlines by this share of TPOT: the last
steps of a request cannot be made up for."""
MAX_MARGIN_SHARE = 0.4
"""Offline work leaves it by the mean error of predictions where that is more, at most by this."""
LATE_SHARE = 0.5
"""Share of TPOT granted to a step when a request is late already, so that it catches up."""
IDLE_SHARE = 0.1
"""Share of the TTFT for a step without online work: an arrival waits for the rest of it, and its
own prefill. No second step is in flight then."""
UNUSED_SHARE = 0.4
"""The same where no online request came lately. On a GPU a full step is shorter: it costs nothing
there, and on a slow engine the first call after a pause finds no step of a second before it."""
PREFILL_SHARE = 0.12
"""Share of the TTFT for a step that holds online prefills but no online decode."""
PREFILL_COST = 1.3
"""Such a step takes at most so many times as long as without offline work: their first tokens come
at its end."""
EARLY_IDLE_STEPS = 64
EARLY_PRACTICE_EVERY = 2
PRACTICE_EVERY = 16
PRACTICE_TPOTS = (0.5, 1.0, 2.0)
"""Lengths of the steps of practice, as multiples of the TPOT bound."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The longest a step may take, in seconds: for online work, and with offline work in it.

    With `is_one_in_flight` offline work waits until no step is in flight: the next call then finds
    one step before it, not two.
    """

    online_s: float
    offline_s: float
    is_one_in_flight: bool = False

    def are_sat_out(self, view: EngineView) -> bool:
        """Whether rows sit the step out for the one in flight."""
        return self.is_one_in_flight and view.rest_s > 0


def completion_pace_s(request: RequestView, now_s: float, likely_tokens: int) -> float:
    """Seconds per token after the first that bring the last one within the completion bound, if the
    answer has `likely_tokens`, or a little more than there are where these are as many. Infinity
    without a bound, and once it is broken.

    AccelGen (arXiv 2503.13737, "SLOs of offline applications") spreads the time that a completion
    bound leaves evenly over the iterations and carries what one of them saves or exceeds over to
    the next. Due times that lie this pace apart do the same: what the prefill or a token saved is
    slack of all that follow.
    """
    end_s = request.arrival_at_s + request.slo_jct_s
    if now_s >= end_s:
        return math.inf
    tokens = max(likely_tokens, request.num_output_tokens + GROWTH_TOKENS)
    return (end_s - _first_at_s(request)) / max(min(tokens, request.max_output_tokens) - 1, 1)


def deadline_s(request: RequestView, pace_s: float = math.inf, start_s: float = -math.inf) -> float:
    """When the next token of an online request is due.

    First token + i * TPOT, and arrival + TTFT + i * TPOT before there is one (the paper's, which
    goes on with it). So credit from an early first token is not spent on slow ones, and a late one,
    whose promise is lost, does not shorten the steps in which others could still come in time: one
    that is late and in flight is there at `start_s`.
    With a completion bound none is later than first token + i * `pace_s`.
    """
    index = request.num_output_tokens
    first_at_s = request.first_token_at_s
    if first_at_s is None:
        first_at_s = max(start_s, request.arrival_at_s + request.slo_ttft_s)
    due_s = first_at_s + index * request.slo_tpot_s
    if pace_s < math.inf:
        due_s = min(due_s, _first_at_s(request) + index * pace_s)
    return due_s


def step_limits(
    view: EngineView, *, was_online_lately: bool, least_ttft_s: float = math.inf
) -> StepLimits:
    """The limits for the step after those in flight.

    Without any online request lately it is so long that full steps fit: no SLO tax on an idle
    endpoint. `least_ttft_s` is the tightest TTFT bound among the online requests of late.
    """
    start_s = view.now_s + view.rest_s
    ttft_s = min(view.online_slo_ttft_s, least_ttft_s) * (1 - view.kept_back.first_share)
    first_due_s, tpot_s, inf = math.inf, math.inf, math.inf
    for request in view.online_running:
        # As `is_decode`, and where there is no end as `deadline_s`: this is the hot path.
        num_output = request.num_output_tokens
        if request.work_left_tokens > 1 or not num_output:
            continue
        pace_s = request.slo_tpot_s
        first_at_s = request.first_token_at_s
        if first_at_s is not None and request.slo_jct_s == inf:
            due_s = first_at_s + num_output * pace_s
        else:
            end_pace_s = inf
            if request.slo_jct_s < inf:
                likely = view.calls.likely_tokens(request.max_output_tokens, request.promise)
                end_pace_s = completion_pace_s(request, start_s, likely)
            due_s = deadline_s(request, end_pace_s, start_s)
            pace_s = min(pace_s, end_pace_s)
        if due_s < first_due_s:
            first_due_s = due_s
        if pace_s < tpot_s:
            tpot_s = pace_s
    if math.isinf(tpot_s):
        if view.online_running or view.online_waiting:
            most_s = min(PREFILL_SHARE * ttft_s, PREFILL_COST * alone_s(view))
            return StepLimits(math.inf, most_s)
        share = IDLE_SHARE if was_online_lately else UNUSED_SHARE
        most_s = max(share * ttft_s, LITTLE_MORE * _shortest_s(view))
        return StepLimits(math.inf, most_s, is_one_in_flight=was_online_lately)
    slack_s = first_due_s - start_s
    least_s = LATE_SHARE * tpot_s
    margin_s = min(max(view.error_share, LEAST_MARGIN_SHARE), MAX_MARGIN_SHARE) * tpot_s
    margin_s += view.kept_back.later_tpots * min(tpot_s, view.online_slo_tpot_s)
    most_s = min(
        TARGET_SHARE * tpot_s,
        _most_with_decodes_s(view, ttft_s, is_tight=least_ttft_s < view.online_slo_ttft_s),
    )
    online_s = max(slack_s - LEAST_MARGIN_SHARE * tpot_s, least_s)
    return StepLimits(online_s, min(max(slack_s - margin_s, least_s), most_s))


def _shortest_s(view: EngineView) -> float:
    """What a step takes in which the first row that runs, or a new one, gets one token."""
    context = next((row.num_computed_tokens for row in view.offline_running), 0) + 1
    return view.model.predict_s(StepLoad.of([(1, context, True)]))


def _first_at_s(request: RequestView) -> float:
    """When the first token was there, or is due."""
    if request.first_token_at_s is not None:
        return request.first_token_at_s
    return request.arrival_at_s + min(request.slo_ttft_s, request.slo_jct_s)


def _most_with_decodes_s(view: EngineView, ttft_s: float, *, is_tight: bool) -> float:
    """What an arrival can wait for while others decode: those of a class with a loose TPOT bound
    would allow longer steps than a call without a class, or one with a tight TTFT bound, survives.
    """
    arrival_s = PREFILL_SHARE * ttft_s
    if is_tight:
        return arrival_s
    return max(arrival_s, TARGET_SHARE * view.online_slo_tpot_s)


def alone_s(view: EngineView) -> float:
    """How long the next step would take without offline work; 0 where calls want nothing."""
    load, left = StepLoad(), view.token_budget
    for request in view.online_running:
        tokens = min(left, request.work_left_tokens)
        if tokens > 0:
            load.add(tokens, request.num_computed_tokens + tokens, is_decode=request.is_decode)
            left -= tokens
    for request in view.online_waiting:
        if left <= 0:
            break
        hit_tokens = view.look_up(request).num_tokens
        tokens = min(left, request.num_tokens - hit_tokens)
        load.add(tokens, hit_tokens + tokens)
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
