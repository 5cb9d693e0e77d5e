"""What offline work may cost calls in time: the one dial `online_cost`.

It says how much slower calls may be than the same calls alone (1.3: by 30 %). What they would be
alone is predicted, step by step, by the step-time model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel
from batchrun.scheduling.view import EngineView, RequestView

KEPT_BACK_SHARE = 0.02
"""Of what calls may be slower by, so much is not planned with: predictions are a little off."""
SPENT_AT_ONCE = 1.5
"""A step costs calls at most so many times what the dial allows on average, where earlier steps
cost less: a long one delays arrivals."""
MOST_OWED_STEPS = 32
"""Calls are owed no more than so many steps are granted: an engine that had no rows for a while
planned nothing, and kept no account."""
TRUSTED_ERROR_SHARE = 0.12
"""A model this far off on average is believed: steps vary as much. Of one that is worse, less."""
DISTRUST_SHARE = 0.2
"""A model so much worse yet is not believed at all: calls then run without rows."""
EARLY_STEPS = 256
EARLY_ALONE_EVERY = 2
ALONE_EVERY = 32
"""So often a step beside calls that generate has no offline work: an engine that sees rows in every
step does not know what calls take without them. More often at first."""
NUM_REMEMBERED = 64
"""Calls that tell what TTFT is alone, and how many of them find an engine without others."""
IDLE_STEP_WAITS = 1.5
"""A step without calls lasts so many times what a call may wait: it waits for half of one on
average, and a step may take longer than predicted."""
LEAST_IDLE_STEPS = 2.0
"""A step without calls may last so many times the shortest there is: less would leave offline work
nothing at all."""


def planned_cost(online_cost: float | None) -> float | None:
    """What steps are planned by so that calls are no slower than the dial says."""
    return None if online_cost is None else 1 + (online_cost - 1) * (1 - KEPT_BACK_SHARE)


class AloneStep(NamedTuple):
    """How long a step would take without offline work: its decodes only, and all of it."""

    decodes_s: float = 0.0
    whole_s: float = 0.0


def alone_step(
    model: StepTimeModel,
    decode_tokens: Sequence[int],
    prompts: Iterable[tuple[int, int]],
    stretch: float,
) -> AloneStep:
    """The prediction, from the contexts of the calls that generate, and (new tokens, context) of
    those whose prompts are computed.

    Calls that are `stretch` times as slow as alone are so many more at once (Little's law): alone,
    the others would have ended.
    """
    load = StepLoad()
    decodes_s = 0.0
    if decode_tokens:
        num = max(1, round(len(decode_tokens) / stretch))
        load.add_decodes([sum(decode_tokens) // len(decode_tokens)] * num)
        decodes_s = model.predict_s(load)
    for new_tokens, context_tokens in prompts:
        load.add(new_tokens, context_tokens)
    if load.num_requests == load.num_decodes:
        return AloneStep(decodes_s, decodes_s)
    return AloneStep(decodes_s, model.predict_s(load))


class OnlineCost:
    """How long the steps of one engine may take, by the dial. Remembers what its calls were spared.

    A call's time per token is a mean over its answer, so what one step leaves a later one may
    spend. The account is one number, what the steps so far might have taken less what they took;
    each call remembers where it stood at its first token, and the call with the least credit
    decides. Prompts of others come by the clock, not by the step, so a step that computes some is
    granted no more for them than they take.
    """

    def __init__(self) -> None:
        self._granted_s = 0.0
        self._account_at_first_s: dict[str, float] = {}
        self._num_steps = 0
        self._met: set[str] = set()
        self._ttft_alone_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._found_idle: deque[bool] = deque(maxlen=NUM_REMEMBERED)
        self._was_idle = True

    def most_s(self, view: EngineView) -> float:
        """The longest that the step after those in flight may take with offline work in it; once a
        step. Infinity where the dial is not set. O(calls)."""
        cost = view.online_cost
        if cost is None:
            return math.inf
        self._meet_arrivals(view)
        if not view.online_running and not view.online_waiting:
            return self._idle_s(view, cost)
        decodes, prefills = view.online_by_kind()
        alone = alone_step(
            view.alone_model,
            [request.num_computed_tokens + 1 for request in decodes],
            _prompts(view, prefills, view.token_budget - len(decodes)),
            cost,
        )
        granted_s = alone.whole_s + (cost - 1) * alone.decodes_s
        credit_s = self._credit_s(view, (cost - 1) * alone.decodes_s)
        self._granted_s += granted_s
        if not decodes:
            return alone.whole_s
        self._num_steps += 1
        is_early = self._num_steps <= EARLY_STEPS
        if self._num_steps % (EARLY_ALONE_EVERY if is_early else ALONE_EVERY) == 0:
            return 0.0
        extra_s = (cost - 1) * alone.decodes_s * _trust(view.error_share)
        if alone.whole_s > alone.decodes_s:
            return alone.whole_s + min(extra_s + credit_s, extra_s)
        return alone.whole_s + min(extra_s + credit_s, SPENT_AT_ONCE * extra_s)

    def _credit_s(self, view: EngineView, step_s: float) -> float:
        """What the call that was spared least has left, negative where it was spared too little;
        a step is granted `step_s`."""
        account_s = self._granted_s - view.now_s - view.rest_s
        most_s = account_s + MOST_OWED_STEPS * step_s
        before = self._account_at_first_s
        self._account_at_first_s = {
            request.request_id: min(before.get(request.request_id, account_s), most_s)
            for request in view.online_running
            if request.num_output_tokens
        }
        return account_s - max(self._account_at_first_s.values(), default=account_s)

    def _meet_arrivals(self, view: EngineView) -> None:
        """Note what the prompts of new calls take alone, and who found no other call."""
        calls = [*view.online_running, *view.online_waiting]
        for request in view.online_waiting:
            if request.request_id not in self._met:
                tokens = request.num_tokens
                prompt = tokens - view.look_up(request).num_tokens, tokens
                self._ttft_alone_s.append(alone_step(view.alone_model, (), [prompt], 1).whole_s)
                self._found_idle.append(self._was_idle)
        self._met = {request.request_id for request in calls}
        self._was_idle = not calls

    def _idle_s(self, view: EngineView, cost: float) -> float:
        """A step while no call runs. What a call in the middle may wait decides, where at least
        half of all find no other call; the fewer do, the longer."""
        if not self._ttft_alone_s:
            return math.inf
        waits_s = IDLE_STEP_WAITS * (cost - 1) * median(self._ttft_alone_s)
        share = min(1.0, max(2 * fmean(self._found_idle), 1 / NUM_REMEMBERED))
        shortest_s = alone_step(view.model, (1,), (), 1).decodes_s
        return max(waits_s / share, LEAST_IDLE_STEPS * shortest_s)


def _prompts(
    view: EngineView, prefills: Sequence[RequestView], left_tokens: int
) -> Iterable[tuple[int, int]]:
    """New tokens and context of the prompts that the next step would compute for calls alone."""
    for request in prefills:
        new = min(request.prefill_left_tokens, left_tokens)
        left_tokens -= new
        if new:
            yield new, request.num_computed_tokens + new
    for request in view.online_waiting:
        if left_tokens <= 0:
            return
        hit_tokens = view.look_up(request).num_tokens
        new = min(request.num_tokens - hit_tokens, left_tokens)
        left_tokens -= new
        if new:
            yield new, hit_tokens + new


def _trust(error_share: float) -> float:
    """How much of what is granted may be spent, by how far off predictions are: 0 to 1."""
    return min(1.0, max(0.0, 1 - (error_share - TRUSTED_ERROR_SHARE) / DISTRUST_SHARE))
