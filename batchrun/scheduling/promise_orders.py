"""The order of AccelGen (arXiv 2503.13737, section 4), by the time that remains of a promise; and
what orders know of promises: when a first token is due, how long a prompt takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import pivot_tokens
from batchrun.scheduling.draft import Draft
from batchrun.scheduling.online_queue import ArrivalOrder, admit_call, fill_in_order, go_on
from batchrun.scheduling.view import EngineView, RequestView
from batchrun.scheduling.worth import Victims


def left_tokens(request: RequestView) -> int:
    """Tokens of the prompt, and of a preempted answer, that are to be computed; what may be cached
    is not known of a waiting call."""
    return request.prefill_left_tokens or request.num_tokens


def lone_s(view: EngineView, new_tokens: int, context_tokens: int) -> float:
    """What a chunk adds to a step of one token."""
    model = view.model
    with_it = model.predict_s(StepLoad.of([(new_tokens, context_tokens, False)]))
    return max(with_it - model.predict_s(StepLoad.of([(1, 1, False)])), 1e-6)


FIRST_SHARE = 1 / 3
"""So much of its own bound a first token has, whatever the answer is likely to take: steps follow a
completion bound that asks for a faster pace."""


def first_due_s(view: EngineView, request: RequestView, pace_s: float) -> float:
    """When the first token of a call must be there: by its bound, and so that what its answer is
    likely to take, at `pace_s` a token, ends by the completion bound."""
    bound_s = request.slo_ttft_s
    if request.slo_jct_s < math.inf:
        answer = view.calls.likely_tokens(request.max_output_tokens, request.promise)
        left_s = request.slo_jct_s - answer * min(pace_s, request.slo_tpot_s)
        bound_s = min(bound_s, max(left_s, FIRST_SHARE * bound_s))
    return request.arrival_at_s + bound_s


def tightest_pace_s(view: EngineView) -> float:
    """The tightest TPOT bound of the calls that run: no step lasts much longer."""
    return min([request.slo_tpot_s for request in view.online_running], default=math.inf)


LONG_PROMPT_TOKENS = 4_096
"""Of prompts with more left than this one at a time is computed (AccelGen, section 4.2)."""
HEAD_S = 0.75
"""Calls that remain for so much longer than the first may go before it (gamma)."""
MOST_CHOSEN_FROM = 64
STEP_MEMORY_S = 60.0
CHUNK_MEMORY = 0.05
FIRST_CHUNK_TOKENS = 512.0


@dataclass(frozen=True, slots=True)
class SlackOptions:
    """Which of AccelGen's parts are as printed.

    `is_printed`: what is late goes first, and a call with a completion bound has what that leaves
    for each of its steps instead of a due time. `has_pivot_budget`: a step computes the pivot's
    tokens times the tightest TPOT bound over the pivot's time (Eq. 6), else what the step-time
    model fits into the tightest bound. `is_euclid`: calls that remain about as long as the first
    are taken by how well tokens and blocks that are left fit them (Alg. 2).
    """

    is_printed: bool = False
    has_pivot_budget: bool = False
    is_euclid: bool = False


class SlackOrder(ArrivalOrder):
    """AccelGen: the least remaining time first, T_r = bound - waited - chunks left * longest step.

    Calls with T_r up to the longest step are urgent: they are let in before a long prompt is begun
    beside another. Those that are late (T_r below 0) go last, by arrival, unless it is as printed.
    """

    def __init__(self, options: SlackOptions = SlackOptions()) -> None:
        super().__init__()
        self._options = options
        self._chunk_tokens = FIRST_CHUNK_TOKENS
        self._pace_s = math.inf
        self._longest_s = [0.0, 0.0]
        self._turned_at_s = 0.0

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """By vLLM's priority, then by remaining time, answers that go on before all; late ones by
        arrival."""
        self._pace_s = tightest_pace_s(view)
        keys: list[tuple[int, bool, float, float, RequestView]] = []
        for call in (*begun, *view.online_waiting):
            remains_s = self._remains_s(view, call)
            is_late = self._is_late(remains_s)
            key = call.arrival_at_s if is_late else remains_s
            keys.append((call.priority, is_late, key, call.arrival_at_s, call))
        keys.sort(key=itemgetter(0, 1, 2, 3))
        return [call for *_, call in keys]

    def fill(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        """In that order, one long prompt at a time but for urgent ones."""
        view, options = draft.view, self._options
        num_before, draft.is_strict = draft.load.num_tokens, True
        if options.has_pivot_budget:
            draft.tokens_left = min(draft.tokens_left, self._pivot_budget(draft))
            limit_s = math.inf
        prompts = self._one_long(view, prompts)
        if options.is_euclid:
            has_room = self._fill_by_fit(draft, prompts, limit_s, victims)
        else:
            has_room = fill_in_order(draft, prompts, limit_s, victims)
        self._learn(draft, prompts, draft.load.num_tokens - num_before)
        return has_room

    def _is_late(self, remains_s: float) -> bool:
        return -math.inf < remains_s < 0 and not self._options.is_printed

    def _remains_s(self, view: EngineView, call: RequestView) -> float:
        if call.first_token_at_s is not None:
            return -math.inf
        num_chunks = math.ceil(left_tokens(call) / self._chunk_tokens)
        step_s = max(self._longest_s)
        if self._options.is_printed and call.slo_jct_s < math.inf:
            answer = view.calls.likely_tokens(call.max_output_tokens, call.promise)
            prompt_s = num_chunks * step_s
            return (call.slo_jct_s - prompt_s - answer * step_s) / (num_chunks + answer)
        return first_due_s(view, call, self._pace_s) - view.now_s - num_chunks * step_s

    def _one_long(self, view: EngineView, prompts: Sequence[RequestView]) -> Sequence[RequestView]:
        """Without the long prompts that would begin beside another one and are not urgent."""
        running = {id(call) for call in view.online_running}
        num_long = sum(
            id(call) in running and left_tokens(call) >= LONG_PROMPT_TOKENS for call in prompts
        )
        chosen: list[RequestView] = []
        for call in prompts:
            if id(call) not in running and left_tokens(call) >= LONG_PROMPT_TOKENS:
                remains_s = self._remains_s(view, call)
                is_urgent = not self._is_late(remains_s) and remains_s <= max(self._longest_s)
                if num_long and not is_urgent:
                    continue
                num_long += 1
            chosen.append(call)
        return chosen

    def _pivot_budget(self, draft: Draft) -> int:
        """Tokens of prompts in the step, by Eq. 6 less its decodes; the tightest TPOT bound of all
        calls that generate counts."""
        view = draft.view
        decodes, _ = view.online_by_kind()
        if not decodes:
            return view.token_budget
        pivot = pivot_tokens(view.model, view.token_budget)
        pivot_s = view.model.predict_s(StepLoad.of([(pivot, pivot, False)]))
        least_s = min(request.slo_tpot_s for request in decodes)
        return max(1, int(pivot * least_s / pivot_s) - len(decodes))

    def _fill_by_fit(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        """Of those that remain about as long as the first, or are late as it is, the one that
        leaves least of tokens and blocks, each as a share of all; until the rest waits for adapters
        that calls hold."""
        left, has_room = list(prompts), True
        running, view = set(map(id, draft.view.online_running)), draft.view
        able = {id(c) for c in prompts if id(c) in running or victims.may_have_adapter(c)}
        while able:
            near = self._near(view, left)
            call = min(near, key=lambda each: self._distance(draft, each))
            left.remove(call)
            able.discard(id(call))
            if id(call) in running:
                go_on(draft, call, limit_s)
            elif has_room:
                has_room = admit_call(draft, victims, call, limit_s)
            if draft.tokens_left <= 0 or not has_room:
                break
        for call in left:
            if id(call) in running:
                go_on(draft, call, limit_s)
        return has_room and (not left or draft.tokens_left > 0)

    def _near(self, view: EngineView, left: Sequence[RequestView]) -> list[RequestView]:
        first_s, level = self._remains_s(view, left[0]), left[0].priority
        is_late, near = self._is_late(first_s), []
        for call in left[:MOST_CHOSEN_FROM]:
            remains_s = self._remains_s(view, call)
            is_alike = self._is_late(remains_s) == is_late and call.priority == level
            if is_alike and remains_s <= first_s + HEAD_S:
                near.append(call)
        return near

    def _distance(self, draft: Draft, call: RequestView) -> float:
        view, left = draft.view, left_tokens(call)
        tokens = max(0, draft.tokens_left - left) / view.token_budget
        free = draft.free_blocks - draft.promised_blocks
        return math.hypot(tokens, max(0, free - view.blocks_for(left)) / view.total_blocks)

    def _learn(self, draft: Draft, prompts: Sequence[RequestView], num_tokens: int) -> None:
        """The mean chunk of late, and the longest step of the last minute or two."""
        view = draft.view
        num = sum(draft.caps.get(call.request_id, 0) > 0 for call in prompts)
        if num:
            mean = num_tokens / num
            self._chunk_tokens += CHUNK_MEMORY * (max(1.0, mean) - self._chunk_tokens)
        if view.now_s - self._turned_at_s > STEP_MEMORY_S:
            self._turned_at_s = view.now_s
            self._longest_s = [0.0, self._longest_s[0]]
        if draft.load.num_requests:
            step_s = view.model.predict_s(draft.load)
            self._longest_s[0] = max(self._longest_s[0], step_s)
