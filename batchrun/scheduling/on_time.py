"""On time before late: the order of calls that lets as many as possible keep their promise (Moore,
Management Science 15, 1968, for one machine)."""

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
from batchrun.estimator.step_time import largest_chunk
from batchrun.scheduling.draft import MIN_CHUNK_TOKENS, Draft
from batchrun.scheduling.online_queue import ArrivalOrder, begun_ids, fill_in_order
from batchrun.scheduling.promise_orders import first_due_s, left_tokens, lone_s, tightest_pace_s
from batchrun.scheduling.slack import StepLimits
from batchrun.scheduling.view import BY_ARRIVAL, EngineView, RequestView
from batchrun.scheduling.worth import Victims

IntArray = npt.NDArray[np.int_]
Arrival = tuple[int, float, str]
"""What `BY_ARRIVAL` sorts by."""

AGED_BOUNDS = 1.5
"""A call that has waited so many times its bound for the first token is aged, unless there is more
work than calls can wait for."""
AGED_BACKLOGS = 1.5
"""Then one is aged that has waited so many times what the line takes: as long as in the order of
arrival, and half as long again. Where lines grow for long, as more comes than the engine does, so
does this."""
LINE_MEMORY_S = 60.0
"""So far back it is seen how many calls a second come in while others wait."""
PAUSE_S = 10.0
"""So much and more between two steps is no step, but a pause in which none was planned."""
AGED_SHARE = 0.5
"""The oldest of the aged gets this share of the time that a step has for prompts."""

MOST_KNOWN_SHARE, MIN_KNOWN = 4, 64
"""What is remembered of calls is forgotten when it is so many times what waits."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a call asks for, as predicted when so many of its tokens were left and not cached:
    seconds of an engine that does nothing else, when its first token is due by the bound on it
    alone, and `BY_ARRIVAL`. `num_tokens` is 0 where the prompt was begun then."""

    num_tokens: int
    left_tokens: int
    work_s: float
    due_s: float
    arrival: Arrival


class PromptWork:
    """How long prompts take, in seconds of an engine that does nothing else, and how many of these
    a second of the running engine has room for.

    From step to step the same calls wait but for a few, so what is known of them is kept in one
    piece while nobody comes or goes: `works_s`, `dues_s`, `arrived_s`, `ttfts_s`, `arrivals` and
    whether they `are_new` (have no token yet), the sum of the first, the places of those with a
    completion bound (`bounded`), their priorities (`levels`) and values. What is cached of a prompt
    is looked up when its call comes, and then of one call a step, in turn: a look-up takes longer
    than all the rest.
    """

    def __init__(self) -> None:
        self._known: dict[str, Need] = {}
        self._calls: Sequence[RequestView] = ()
        self._tokens: list[int] = []
        self._step = 0
        self.works_s, self.dues_s, self.sum_s = np.empty(0), np.empty(0), 0.0
        self.arrived_s, self.ttfts_s = np.empty(0), np.empty(0)
        self.are_new = np.empty(0, np.bool_)
        self.arrivals: list[Arrival] = []
        self.bounded: list[int] = []
        self.levels: set[int] = set()
        self.values: set[float] = set()

    def look(self, view: EngineView) -> None:
        """Know the calls that wait in the view; once a step."""
        calls = view.online_waiting
        tokens = [call.num_tokens for call in calls]
        self._step += 1
        if calls and self._looks_up_again(view, calls[self._step % len(calls)]):
            self._calls = ()
        if len(self._known) > MOST_KNOWN_SHARE * (len(calls) + MIN_KNOWN):
            self._known.clear()
        elif tokens == self._tokens and calls == self._calls:
            return
        needs = [self.need(view, call) for call in calls]
        works_s = [need.work_s for need in needs]
        self._calls, self._tokens, self.sum_s = calls, tokens, sum(works_s)
        self.works_s, self.dues_s = np.array(works_s), np.array([need.due_s for need in needs])
        self.arrivals = [need.arrival for need in needs]
        self.arrived_s = np.array([call.arrival_at_s for call in calls])
        self.ttfts_s = np.array([call.slo_ttft_s for call in calls])
        self.are_new = np.array([call.first_token_at_s is None for call in calls], np.bool_)
        self.bounded = [at for at, call in enumerate(calls) if call.slo_jct_s < math.inf]
        self.levels = {call.priority for call in calls}
        self.values = {call.slo_value for call in calls}

    def need(self, view: EngineView, call: RequestView) -> Need:
        """What a call asks for that waits."""
        need = self._known.get(call.request_id)
        if need is None or need.num_tokens != call.num_tokens:
            left = max(1, call.num_tokens - view.look_up(call).num_tokens)
            need = self._known[call.request_id] = _need(view, call, left, call.num_tokens)
        return need

    def begun_need(self, view: EngineView, call: RequestView) -> Need:
        """What a call asks for whose prompt is begun."""
        need, left = self._known.get(call.request_id), left_tokens(call)
        if need is None or need.left_tokens != left:
            need = self._known[call.request_id] = _need(view, call, left, 0)
        return need

    def _looks_up_again(self, view: EngineView, call: RequestView) -> bool:
        """Whether what is cached of a waiting prompt has changed."""
        need = self._known.get(call.request_id)
        left = max(1, call.num_tokens - view.look_up(call).num_tokens)
        if need is None or need.left_tokens == left:
            return False
        self._known[call.request_id] = _need(view, call, left, call.num_tokens)
        return True

    @staticmethod
    def pace(view: EngineView, limit_s: float) -> tuple[float, float]:
        """Seconds of such work for each second, where steps last `limit_s` at most, and how long
        one then lasts."""
        load = view.online_decodes_load().totals()
        most = max(1, view.token_budget - load.num_decodes)
        least = min(MIN_CHUNK_TOKENS, most)
        tokens = max(least, largest_chunk(view.model, load, 0, limit_s, most))
        load.add(tokens, tokens)
        step_s = max(view.model.predict_s(load), 1e-6)
        return max(lone_s(view, tokens, tokens) / step_s, 1e-3), step_s


def _need(view: EngineView, call: RequestView, left: int, num_tokens: int) -> Need:
    work_s, due_s = lone_s(view, left, call.num_tokens), call.arrival_at_s + call.slo_ttft_s
    return Need(num_tokens, left, work_s, due_s, BY_ARRIVAL(call))


class LinePace:
    """How long each call of a line waits for the one before it to come in, where what decides is
    not prompts but the room that others hold."""

    def __init__(self) -> None:
        self._admitted = self._waited_s = 0.0
        self._seen_at_s = math.inf

    def saw(self, now_s: float, num_admitted: int, *, do_wait: bool) -> None:
        """So many calls came in; whether others wait on. Once a step with prompts."""
        passed_s = max(0.0, now_s - self._seen_at_s)
        kept = math.exp(-passed_s / LINE_MEMORY_S)
        self._waited_s = kept * self._waited_s + (passed_s if passed_s < PAUSE_S else 0.0)
        self._admitted = kept * self._admitted + num_admitted
        self._seen_at_s = now_s if do_wait else math.inf

    @property
    def seconds_each(self) -> float:
        """Of late."""
        return self._waited_s / max(1.0, self._admitted)


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
        self._line = LinePace()

    def limits(self, view: EngineView) -> StepLimits:
        """Those of `ArrivalOrder`."""
        limits = super().limits(view)
        self._limit_s = limits.online_s
        return limits

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """On time by due time, then the others by arrival; vLLM's priority before both."""
        calls, work = [*view.online_waiting, *begun], self._work
        pace, step_s = work.pace(view, self._limit_s)
        work.look(view)
        needs = [work.begun_need(view, call) for call in begun]
        backlog_s = sum([need.work_s for need in needs], work.sum_s) / pace
        levels = work.levels | {call.priority for call in begun}
        line_s = max(backlog_s, len(view.online_waiting) * self._line.seconds_each)
        self._aged = self._oldest_aged(view, begun, line_s, min(levels, default=0))
        if self._aged is not None:
            pace *= 1 - AGED_SHARE
        # A first token comes at the end of a step, which others behind it may share.
        start_s = view.now_s + view.rest_s + min(step_s, backlog_s)
        works_s = np.concatenate((work.works_s, [need.work_s for need in needs])) / pace
        dues_s = np.concatenate((work.dues_s, [need.due_s for need in needs]))
        self._bound_by_completion(view, calls, dues_s)
        values = work.values | {call.slo_value for call in begun}
        valued = [call.slo_value for call in calls] if len(values) > 1 else None
        arrivals = [*work.arrivals, *(need.arrival for need in needs)]
        resumed = [at for at, call in enumerate(calls) if call.first_token_at_s is not None]
        line = _Line(calls, len(view.online_waiting), arrivals, works_s, dues_s, valued, resumed)
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

    def _oldest_aged(
        self, view: EngineView, begun: Sequence[RequestView], line_s: float, level: int
    ) -> RequestView | None:
        """Of the calls of the first priority that have waited too long for their first token the
        first by arrival."""
        now_s, arrived_s = view.now_s, self._work.arrived_s
        latest_s = now_s - AGED_BACKLOGS * line_s
        waits = (arrived_s < latest_s) & (now_s - arrived_s > AGED_BOUNDS * self._work.ttfts_s)
        waits &= self._work.are_new
        aged = [
            call
            for call in begun
            if call.first_token_at_s is None
            and call.arrival_at_s < latest_s
            and now_s - call.arrival_at_s > AGED_BOUNDS * call.slo_ttft_s
        ]
        if waits.any():
            aged.append(view.online_waiting[int(waits.argmax())])
        oldest = min(aged, key=BY_ARRIVAL, default=None)
        return oldest if oldest is not None and oldest.priority == level else None

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
        draft.is_strict, num_before = True, len(draft.admitted)
        has_room = self._fill(draft, prompts, limit_s, victims)
        now_s, waiting = draft.view.now_s, draft.view.online_waiting
        num_admitted = len(draft.admitted) - num_before
        self._line.saw(now_s, num_admitted, do_wait=num_admitted < len(waiting))
        return has_room

    def _fill(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        aged = self._aged
        if aged is None or len(prompts) == 1:
            return fill_in_order(draft, prompts, limit_s, victims)
        others = [request for request in prompts if request is not aged]
        if not victims.may_have_adapter(aged):
            # Where no new call takes the others' adapters, they end some day.
            may_come = {0, aged.lora_id}
            begun = begun_ids(draft.view)
            others = [
                call
                for call in others
                if id(call) in begun or call.lora_id in may_come or call.first_token_at_s
            ]
            return fill_in_order(draft, others, limit_s, victims)
        spent_s = draft.view.model.predict_s(draft.load)
        share_s = spent_s + AGED_SHARE * max(0.0, limit_s - spent_s)
        if math.isinf(limit_s):
            share_s = self._work.pace(draft.view, limit_s)[1] * AGED_SHARE
        if fill_in_order(draft, [aged], share_s, victims):
            return fill_in_order(draft, others, limit_s, victims)
        begun = begun_ids(draft.view)
        fill_in_order(draft, [r for r in others if id(r) in begun], limit_s, victims)
        return False


@dataclass(frozen=True, slots=True)
class _Line:
    """The calls of a step: `num_waiting` that wait, by arrival, then those that are begun. How much
    work they are at the pace of the engine, when they are due, their values (None: all the same),
    and the places of those that were preempted in their answers."""

    calls: Sequence[RequestView]
    num_waiting: int
    arrivals: Sequence[Arrival]
    works_s: FloatArray
    dues_s: FloatArray
    values: Sequence[float] | None
    resumed: Sequence[int]

    def ordered(
        self, here: IntArray, start_s: float
    ) -> tuple[list[RequestView], list[RequestView]]:
        """Those at the places `here`, where work begins at `start_s`: answers that go on, then the
        largest set that can be on time, by due time, and the others by arrival."""
        calls, resumed = self.calls, np.intersect1d(self.resumed, here) if self.resumed else None
        if resumed is not None:
            here, start_s = np.setdiff1d(here, resumed), start_s + self.works_s[resumed].sum()
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
            insort(late, place, key=self.arrivals.__getitem__)
        if resumed is not None:
            first = sorted(resumed.tolist(), key=self.arrivals.__getitem__) + first
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
