"""How long steps may be so that calls find room for their KV later on, not only now.

By Little's law calls that come at one rate hold KV in proportion to how long they stay, and they
stay as many steps as their answers have tokens. Half a minute of long steps is felt for as long as
those calls live, so what they will hold is looked at before it is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchrun.estimator.call_history import EDGES_TOKENS
from batchrun.estimator.least_squares import FloatArray
from batchrun.estimator.step_load import StepLoad
from batchrun.scheduling.view import EngineView

PLAN_EVERY_S = 0.5
"""A plan holds so long. One costs 0.2 ms with 50 calls, 0.35 ms with 256."""
HOLD_S = 45.0
"""A step is short enough if steps of that length for so long, and of calls alone after them, leave
calls room at all times."""
NEAR_S, NEAR_STRETCH = 60.0, 1.25
"""Steps up to so many times as long as those of calls alone need leave room for what is expected;
only for so long for what is likely: by then most calls that they kept longer have ended, and later
plans see what came."""
AFTER_S: FloatArray = np.array([0, 5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 360], np.float64)
"""The times that are looked at."""
SIGMAS = 2.0
"""Room is left for so many standard deviations of what calls hold."""
MOST_SHARE = 0.85
"""Calls are to hold no more than this share of all blocks: more come at once than ever before."""
FULL_SHARE = 0.8
"""Calls alone are taken to have steps as long as when they hold this share of all blocks."""
MOST_TPOTS = 2.0
"""The longest step that is looked at, as a multiple of the TPOT bound."""
NUM_CHOICES = 9


class KvPlan:
    """The longest steps beside calls that leave them room for their KV."""

    def __init__(self) -> None:
        self._made_at_s = -math.inf
        self._most_s = math.inf

    def most_s(self, view: EngineView) -> float:
        """The longest the step after those in flight should take with rows in it; once a step."""
        if not any(request.is_decode for request in view.online_running):
            return math.inf
        if view.now_s - self._made_at_s >= PLAN_EVERY_S:
            self._made_at_s = view.now_s
            self._most_s = longest_step_s(view)
        return self._most_s


def longest_step_s(view: EngineView) -> float:
    """The longest step that leaves running calls and those to come room for their KV.

    Infinity where any does, 0 where calls have too little room without rows: these then wait.
    """
    generated = [call.num_output_tokens for call in view.online_running]
    longer = view.calls.longer_shares(generated)
    growth_tokens = _growth_tokens(view, longer)
    # What a running call holds beside its answer, on average; shared blocks are counted once.
    held_tokens = view.online_blocks * growth_tokens
    prompt_tokens = max(0.0, held_tokens - sum(generated)) / len(generated)
    rate_per_s = view.calls.rate_per_s(view.now_s)
    pool_tokens = view.total_blocks * growth_tokens
    alone_s = _alone_s(view, prompt_tokens, rate_per_s, FULL_SHARE * pool_tokens)
    top_s = MOST_TPOTS * max(view.online_slo_tpot_s, alone_s)
    steps_s = np.geomspace(alone_s, top_s, NUM_CHOICES)
    waiting = [call.num_output_tokens for call in view.online_waiting]
    growths = _growths([*generated, *waiting], prompt_tokens, longer)
    mean, variance, most = [each.after(steps_s, alone_s, rate_per_s) for each in growths]
    variance[1] += (view.calls.rate_error() * mean[1]) ** 2
    expected, most_tokens = mean.sum(axis=0), MOST_SHARE * pool_tokens
    likely = expected + SIGMAS * np.sqrt(variance.sum(axis=0))
    if_none_ends = most.sum(axis=0) + SIGMAS * np.sqrt(variance[1])
    has_room = np.minimum(likely, if_none_ends) <= most_tokens
    later_plans_see = (AFTER_S > NEAR_S) & (expected <= most_tokens)
    short_s = min(_longest(steps_s, has_room | later_plans_see), NEAR_STRETCH * alone_s)
    return max(_longest(steps_s, has_room), short_s)


def _longest(steps_s: FloatArray, has_room: NDArray[np.bool_]) -> float:
    """The longest of the steps (rows) up to which there is room at all times (columns)."""
    is_good = has_room.all(axis=1)
    if is_good.all():
        return math.inf
    num_good = int(np.argmin(is_good))
    return float(steps_s[num_good - 1]) if num_good > 1 else 0.0


@dataclass(frozen=True, slots=True)
class _Growth:
    """What calls hold, its variance, or the most, by the tokens that each has generated from now
    on: one entry for each of `EDGES_TOKENS`.

    `present`: those that are here. `arrived`: those that came since then, if one came in the time
    of each token.
    """

    present: FloatArray
    arrived: FloatArray

    def after(self, steps_s: FloatArray, alone_s: float, rate_per_s: float) -> FloatArray:
        """That of those present, and of those that arrived, at each of `AFTER_S` (columns), with
        each of the steps (rows) for `HOLD_S` seconds."""
        alone_tokens = np.maximum(AFTER_S - HOLD_S, 0.0) / alone_s
        tokens = np.minimum(AFTER_S, HOLD_S) / steps_s[:, None] + alone_tokens
        late = np.interp(alone_tokens, EDGES_TOKENS, self.arrived)
        early = np.interp(tokens, EDGES_TOKENS, self.arrived) - late
        arrived = rate_per_s * (alone_s * late + steps_s[:, None] * early)
        return np.stack([np.interp(tokens, EDGES_TOKENS, self.present), arrived])


def _growth_tokens(view: EngineView, longer: FloatArray) -> float:
    """Tokens that a call generates for each block that it takes, over a usual answer: what calls
    hold is counted in these."""
    prompts = [call.num_prompt_tokens for call in view.online_running]
    usual_tokens = float((np.diff(EDGES_TOKENS) * (longer[1:] + longer[:-1]) / 2).sum())
    return view.law.growth_tokens(sum(prompts) // len(prompts), usual_tokens)


def _alone_s(
    view: EngineView, prompt_tokens: float, rate_per_s: float, full_tokens: float
) -> float:
    """How long a step takes without rows while calls hold much of the KV, `full_tokens`."""
    running = view.online_running
    context = sum([request.num_tokens for request in running]) / len(running)
    num_calls = max(1, round(full_tokens / context))
    load = StepLoad()
    load.add_decodes([round(full_tokens / num_calls)] * num_calls)
    step_s = view.model.predict_s(load)
    new_tokens = round(rate_per_s * prompt_tokens * step_s)
    if new_tokens:
        load.add(new_tokens, new_tokens)
        step_s = view.model.predict_s(load)
    return max(step_s, 1e-6)


def _growths(
    generated: Sequence[int], prompt_tokens: float, longer: FloatArray
) -> tuple[_Growth, _Growth, _Growth]:
    """Mean and variance of the tokens that calls will hold, and the mean if none that is here ends.
    Those that wait count as running: all have `generated` so many tokens."""
    ages = np.asarray(generated, np.float64)[:, None] + EDGES_TOKENS
    still = np.interp(ages, EDGES_TOKENS, longer)
    still /= np.maximum(still[:, :1], 1e-12)
    held = prompt_tokens + ages
    mids = prompt_tokens + (EDGES_TOKENS[1:] + EDGES_TOKENS[:-1]) / 2
    alive_tokens = np.diff(EDGES_TOKENS) * (longer[1:] + longer[:-1]) / 2
    mean = _Growth((held * still).sum(axis=0), _summed(alive_tokens * mids))
    variance = _Growth((held**2 * still * (1 - still)).sum(axis=0), _summed(alive_tokens * mids**2))
    return mean, variance, _Growth(held.sum(axis=0), mean.arrived)


def _summed(values: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(values)])
