"""Orders of the queue that know what each call was promised, and how long its prompt will take.

`OnTimeOrder` lets the largest set of calls go first that can all still keep their promise (Moore,
Management Science 15, 1968, for one machine). `SlackOrder` is that of AccelGen (arXiv 2503.13737,
section 4), by the time that remains.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from batchrun.estimator.least_squares import FloatArray
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import largest_chunk, pivot_tokens
from batchrun.scheduling.draft import Draft
from batchrun.scheduling.online_queue import (
    ArrivalOrder,
    admit_call,
    begun_ids,
    fill_in_order,
    go_on,
)
from batchrun.scheduling.slack import StepLimits
from batchrun.scheduling.view import BY_ARRIVAL, EngineView, RequestView
from batchrun.scheduling.worth import Victims

IntArray = npt.NDArray[np.int_]

AGED_BOUNDS = 1.5
"""A call that has waited so many times its bound for the first token is aged, unless there is more
work than calls can wait for."""
AGED_BACKLOGS = 1.5
"""Then one is aged that has waited so many times what all waiting prompts take: as long as in the
order of arrival, and half as long again."""
AGED_SHARE = 0.5
"""The oldest of the aged gets this share of the time that a step has for prompts."""

MOST_KNOWN_SHARE, MIN_KNOWN = 4, 64
"""What is remembered of calls is forgotten when it is so many times what waits."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a call asks for, as predicted when so many of its tokens were left: seconds of an engine
    that does nothing else, and when its first token is due by the bound on it alone."""

    left_tokens: int
    work_s: float
    due_s: float


class PromptWork:
    """How long prompts take, in seconds of an engine that does nothing else, and how many of these
    a second of the running engine has room for.

    From step to step the same calls wait but for a few, so what is known of them is kept in one
    piece while nobody comes or goes: `works_s` and `dues_s` of each, the sum of the former, the
    places of those with a completion bound (`bounded`), their priorities (`levels`) and values.
    """

    def __init__(self) -> None:
        self._known: dict[str, Need] = {}
        self._calls: Sequence[RequestView] = ()
        self._tokens: list[int] = []
        self.works_s, self.dues_s, self.sum_s = np.empty(0), np.empty(0), 0.0
        self.bounded: list[int] = []
        self.levels: set[int] = set()
        self.values: set[float] = set()

    def look(self, view: EngineView) -> None:
        """Know the calls that wait in the view; once a step. 3 us where they are the same."""
        calls = view.online_waiting
        tokens = [call.num_tokens for call in calls]
        if len(self._known) > MOST_KNOWN_SHARE * (len(calls) + MIN_KNOWN):
            self._known.clear()
        elif tokens == self._tokens and calls == self._calls:
            return
        needs = [self.need(view, call, left) for call, left in zip(calls, tokens, strict=True)]
        works_s = [need.work_s for need in needs]
        self._calls, self._tokens, self.sum_s = calls, tokens, sum(works_s)
        self.works_s, self.dues_s = np.array(works_s), np.array([need.due_s for need in needs])
        self.bounded = [at for at, call in enumerate(calls) if call.slo_jct_s < math.inf]
        self.levels = {call.priority for call in calls}
        self.values = {call.slo_value for call in calls}

    def need(self, view: EngineView, call: RequestView, left: int) -> Need:
        """What a call asks for that has so many tokens left."""
        need = self._known.get(call.request_id)
        if need is None or need.left_tokens != left:
            work_s = lone_s(view, left, call.num_tokens)
            need = Need(left, work_s, call.arrival_at_s + call.slo_ttft_s)
            self._known[call.request_id] = need
        return need

    @staticmethod
    def pace(view: EngineView, limit_s: float) -> tuple[float, float]:
        """Seconds of such work for each second, where steps last `limit_s` at most, and how long
        one then lasts."""
        load = view.online_decodes_load().totals()
        most = max(1, view.token_budget - load.num_decodes)
        tokens = max(1, largest_chunk(view.model, load, 0, limit_s, most))
        load.add(tokens, tokens)
        step_s = max(view.model.predict_s(load), 1e-6)
        return max(lone_s(view, tokens, tokens) / step_s, 1e-3), step_s


def left_tokens(request: RequestView) -> int:
    """Tokens of the prompt, and of a preempted answer, that are to be computed; what may be cached
    is not known of a waiting call."""
    return request.prefill_left_tokens or request.num_tokens


def lone_s(view: EngineView, new_tokens: int, context_tokens: int) -> float:
    """What a chunk adds to a step of one token."""
    model = view.model
    with_it = model.predict_s(StepLoad.of([(new_tokens, context_tokens, False)]))
    return max(with_it - model.predict_s(StepLoad.of([(1, 1, False)])), 1e-6)


def first_due_s(view: EngineView, request: RequestView, pace_s: float) -> float:
    """When the first token of a call must be there: by its bound, and so that what its answer is
    likely to take, at `pace_s` a token, ends by the completion bound."""
    bound_s = request.slo_ttft_s
    if request.slo_jct_s < math.inf:
        answer = view.calls.likely_tokens(request.max_output_tokens)
        bound_s = min(bound_s, request.slo_jct_s - answer * min(pace_s, request.slo_tpot_s))
    return request.arrival_at_s + bound_s


def tightest_pace_s(view: EngineView) -> float:
    """The tightest TPOT bound of the calls that run: no step lasts much longer."""
    return min([request.slo_tpot_s for request in view.online_running], default=math.inf)


class OnTimeOrder(ArrivalOrder):
    """On time before late: the largest set of calls whose first tokens can all still come in time,
    the most urgent first; the others by arrival in what steps have left.

    Among the calls due by an instant that take too long together, the longest prompt of the least
    value is left out. So that none waits for ever, the oldest call that is aged gets a share of
    each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work = PromptWork()
        self._limit_s = math.inf
        self._aged: RequestView | None = None

    def limits(self, view: EngineView) -> StepLimits:
        """Those of `ArrivalOrder`."""
        limits = super().limits(view)
        self._limit_s = limits.online_s
        return limits

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """On time by due time, then the others by arrival; vLLM's priority before both."""
        calls, work = [*view.online_waiting, *begun], self._work
        work.look(view)
        needs = [work.need(view, call, left_tokens(call)) for call in begun]
        pace, step_s = work.pace(view, self._limit_s)
        backlog_s = sum([need.work_s for need in needs], work.sum_s) / pace
        self._aged = _oldest_aged(view, calls, backlog_s)
        if self._aged is not None:
            pace *= 1 - AGED_SHARE
        # A first token comes at the end of a step, which others behind it may share.
        start_s = view.now_s + view.rest_s + min(step_s, backlog_s)
        works_s = np.append(work.works_s, [need.work_s for need in needs]) / pace
        dues_s = np.append(work.dues_s, [need.due_s for need in needs])
        self._bound_by_completion(view, calls, dues_s)
        values = work.values | {call.slo_value for call in begun}
        valued = [call.slo_value for call in calls] if len(values) > 1 else None
        line = _Line(calls, len(view.online_waiting), works_s, dues_s, valued)
        levels = work.levels | {call.priority for call in begun}
        self.num_left_out = 0
        if len(levels) == 1:
            return self._served(line, np.arange(len(calls)), start_s)
        ordered: list[RequestView] = []
        priorities = np.array([call.priority for call in calls])
        for level in sorted(levels):
            here = np.flatnonzero(priorities == level)
            ordered += self._served(line, here, start_s)
            start_s += float(works_s[here].sum())
        return ordered

    def _served(self, line: _Line, here: IntArray, start_s: float) -> list[RequestView]:
        first, late = line.ordered(here, start_s)
        self.num_left_out += len(late)
        return first + late

    def _bound_by_completion(
        self, view: EngineView, calls: Sequence[RequestView], dues_s: FloatArray
    ) -> None:
        """Write when those are due that have a completion bound; the begun are the last of
        `calls`."""
        num_waiting = len(view.online_waiting)
        begun = [
            place for place in range(num_waiting, len(calls)) if calls[place].slo_jct_s < math.inf
        ]
        if self._work.bounded or begun:
            pace_s = tightest_pace_s(view)
            for place in (*self._work.bounded, *begun):
                dues_s[place] = first_due_s(view, calls[place], pace_s)

    def fill(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        """The aged call up to its share of the time, then all in their order."""
        draft.is_strict = True
        aged = self._aged
        if aged is None or len(prompts) == 1:
            return fill_in_order(draft, prompts, limit_s, victims)
        spent_s = draft.view.model.predict_s(draft.load)
        share_s = spent_s + AGED_SHARE * max(0.0, limit_s - spent_s)
        if math.isinf(limit_s):
            share_s = self._work.pace(draft.view, limit_s)[1] * AGED_SHARE
        has_room = fill_in_order(draft, [aged], share_s, victims)
        others = [request for request in prompts if request is not aged]
        if has_room:
            return fill_in_order(draft, others, limit_s, victims)
        begun = begun_ids(draft.view)
        return fill_in_order(draft, [r for r in others if id(r) in begun], limit_s, victims)


def _oldest_aged(
    view: EngineView, calls: Sequence[RequestView], backlog_s: float
) -> RequestView | None:
    """Of the calls that have waited too long the first by arrival."""
    latest_s = view.now_s - AGED_BACKLOGS * backlog_s
    aged = [
        call
        for call in calls
        if call.arrival_at_s < latest_s
        and view.now_s - call.arrival_at_s > AGED_BOUNDS * call.slo_ttft_s
    ]
    return min(aged, key=BY_ARRIVAL, default=None)


@dataclass(frozen=True, slots=True)
class _Line:
    """The calls of a step: `num_waiting` that wait, by arrival, then those that are begun. How much
    work they are at the pace of the engine, when they are due, and their values (None: all the
    same)."""

    calls: Sequence[RequestView]
    num_waiting: int
    works_s: FloatArray
    dues_s: FloatArray
    values: Sequence[float] | None

    def ordered(
        self, here: IntArray, start_s: float
    ) -> tuple[list[RequestView], list[RequestView]]:
        """Those at the places `here`, where work begins at `start_s`: the largest set that can be
        on time, by due time, and the others by arrival."""
        calls = self.calls
        works_s, dues_s = self.works_s[here], self.dues_s[here]
        may = start_s + works_s <= dues_s
        jobs = zip(
            (dues_s[may] - start_s).tolist(), works_s[may].tolist(), here[may].tolist(), strict=True
        )
        if self.values is None:
            first = most_on_time(list(jobs))
        else:
            first = most_valued_on_time(list(jobs), self.values)
        is_late = np.zeros(len(calls), np.bool_)
        is_late[here] = True
        is_late[first] = False
        late = np.flatnonzero(is_late).tolist()
        num_waiting = bisect_left(late, self.num_waiting)
        begun, late = late[num_waiting:], late[:num_waiting]
        for place in begun:
            insort(late, place, key=lambda at: BY_ARRIVAL(calls[at]))
        return [calls[place] for place in first], [calls[place] for place in late]


Work = tuple[float, float, int]
"""A job of one machine: (due, seconds of work, place), in seconds from now."""


def most_on_time(jobs: Sequence[Work]) -> list[int]:
    """The places of the largest set of jobs that all end in time on one machine, by due time.

    Moore and Hodgson: go by due time, and whenever one would be late, leave out the longest so far.
    O(n log n).
    """
    return [place for *_, place in _most_beside(jobs, ())]


def most_valued_on_time(jobs: Sequence[Work], values: Sequence[float]) -> list[int]:
    """The same where the job at a place has a value: the largest set of the most valued, then of
    those of less value the largest set that makes none of them late."""
    kept: Sequence[Work] = ()
    for value in sorted({values[place] for *_, place in jobs}, reverse=True):
        kept = _most_beside([job for job in jobs if values[job[2]] == value], kept)
    return [place for *_, place in kept]


def _most_beside(jobs: Sequence[Work], kept: Sequence[Work]) -> list[Work]:
    """The jobs `kept`, which all end in time, and the largest set of the others that can too."""
    taken: list[Work] = []
    end_s = 0.0
    if kept:
        in_line = sorted([*((job, False) for job in jobs), *((job, True) for job in kept)])
    else:
        in_line = [(job, False) for job in sorted(jobs)]
    for (due_s, work_s, place), is_kept in in_line:
        if not is_kept:
            heappush(taken, (-work_s, due_s, place))
        end_s += work_s
        while end_s > due_s and taken:
            end_s += heappop(taken)[0]
    found = [*kept, *((due_s, -minus_s, place) for minus_s, due_s, place in taken)]
    return sorted(found, key=itemgetter(0, 2))


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
        """By remaining time; late ones by arrival."""
        printed, self._pace_s = self._options.is_printed, tightest_pace_s(view)
        keys: list[tuple[bool, float, float, RequestView]] = []
        for call in (*begun, *view.online_waiting):
            remains_s = self._remains_s(view, call)
            is_late = remains_s < 0 and not printed
            key = call.arrival_at_s if is_late else remains_s
            keys.append((is_late, key, call.arrival_at_s, call))
        keys.sort(key=itemgetter(0, 1, 2))
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

    def _remains_s(self, view: EngineView, call: RequestView) -> float:
        num_chunks = math.ceil(left_tokens(call) / self._chunk_tokens)
        step_s = max(self._longest_s)
        if self._options.is_printed and call.slo_jct_s < math.inf:
            answer = view.calls.likely_tokens(call.max_output_tokens)
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
                is_urgent = 0 <= self._remains_s(view, call) <= max(self._longest_s)
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
        """Of those that remain about as long as the first, the one that leaves least of tokens and
        blocks, each as a share of all."""
        left, has_room = list(prompts), True
        running, view = set(map(id, draft.view.online_running)), draft.view
        while left:
            most_s = self._remains_s(view, left[0]) + HEAD_S
            near = [c for c in left[:MOST_CHOSEN_FROM] if self._remains_s(view, c) <= most_s]
            call = min(near, key=lambda each: self._distance(draft, each))
            left.remove(call)
            if id(call) in running:
                go_on(draft, call, limit_s)
            elif has_room:
                has_room = admit_call(draft, victims, call, limit_s)
            if draft.tokens_left <= 0 or not has_room:
                break
        for call in left:
            if id(call) in running:
                go_on(draft, call, limit_s)
        return has_room and not left

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
