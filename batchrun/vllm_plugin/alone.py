"""What online calls would have had alone, beside what they had: what offline work costs in time.

Alone nothing can be measured while rows run. So of the time of each step that share counts which,
by the step-time model, the calls in it would have taken by themselves: a clock that stands still
while rows alone are computed. What it shows between two instants of a call is its latency alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from batchrun.estimator.step_time import StepTimeModel
from batchrun.hints import MAX_BOUND_S
from batchrun.scheduling.online_cost import AloneStep, alone_step
from batchrun.scheduling.view import RequestView
from batchrun.types import RequestClass
from batchrun.vllm_plugin.settings import OnlineSlo
from batchrun.wire import CostTelemetry

WINDOW_S = 300.0
MAX_CALLS = 512
"""Calls of the window that are looked at, the latest."""
LEAST_CALLS = 32
"""Fewer tell no bound."""
SUM_UP_EVERY_S = 1.0
NUM_ENDS = 64
"""Ends of steps that are remembered: calls come to the engine a little after they arrived."""
STRETCH_MEMORY_S = 10.0


class AloneTimes(NamedTuple):
    """The clock, as first tokens and as later tokens see it. Prompts of others count whole for the
    former; between two tokens so many fewer would have come alone as the time would be shorter."""

    first_s: float = 0.0
    later_s: float = 0.0


class Latency(NamedTuple):
    """One call's TTFT or TPOT, as it was and as it would have been; `at_s` is when it was known."""

    at_s: float
    seconds: float
    alone_s: float


@dataclass(frozen=True, slots=True)
class _Flight:
    """`alone` is None where the engine holds no row: alone the step would take what it takes."""

    scheduled_at_s: float
    predicted_s: float
    alone: AloneStep | None


class AloneClock:
    """Runs with the steps of one engine: whole while it holds no row, else with their share."""

    def __init__(self) -> None:
        self._flights: deque[_Flight] = deque()
        self._ends: deque[tuple[float, AloneTimes]] = deque(maxlen=NUM_ENDS)
        self._wall_s = self._alone_s = 0.0
        self.now = AloneTimes()

    @property
    def stretch(self) -> float:
        """How many times as slow as alone calls that generate were of late."""
        return max(1.0, self._wall_s / self._alone_s) if self._alone_s else 1.0

    def scheduled(self, now_s: float, predicted_s: float, alone: AloneStep | None) -> None:
        """A step was handed to the engine. O(1), as the other calls."""
        self._flights.append(_Flight(now_s, predicted_s, alone))

    def ended(self, now_s: float) -> None:
        """The oldest step has ended. Between steps the clock runs: alone there were gaps too."""
        if not self._flights:
            return
        flight = self._flights.popleft()
        last_end_s = self._ends[-1][0] if self._ends else flight.scheduled_at_s
        began_s = max(last_end_s, flight.scheduled_at_s)
        took_s, gap_s = now_s - began_s, began_s - last_end_s
        first, later = self._shares(flight)
        self.now = AloneTimes(
            self.now.first_s + gap_s + first * took_s, self.now.later_s + gap_s + later * took_s
        )
        self._ends.append((now_s, self.now))
        if flight.alone is None or flight.alone.decodes_s:
            weight = math.exp(-took_s / STRETCH_MEMORY_S)
            self._wall_s = weight * self._wall_s + took_s
            self._alone_s = weight * self._alone_s + later * took_s

    def first_at_s(self, at_s: float) -> float:
        """What the clock of first tokens showed at an instant of late, or shows in this step."""
        if not self._ends or at_s >= self._ends[-1][0]:
            began_s = self._ends[-1][0] if self._ends else at_s
            share = self._shares(self._flights[0])[0] if self._flights else 1.0
            return self.now.first_s + share * (at_s - began_s)
        after_s, after = self._ends[-1]
        for end_s, times in reversed(self._ends):
            if end_s <= at_s:
                share = (at_s - end_s) / (after_s - end_s) if after_s > end_s else 0.0
                return times.first_s + share * (after.first_s - times.first_s)
            after_s, after = end_s, times
        return after.first_s - (after_s - at_s)

    def _shares(self, flight: _Flight) -> AloneTimes:
        alone = flight.alone
        if alone is None:
            return AloneTimes(1.0, 1.0)
        whole_s = max(flight.predicted_s, alone.whole_s)
        later_s = alone.decodes_s + (alone.whole_s - alone.decodes_s) / self.stretch
        return AloneTimes(alone.whole_s / whole_s, later_s / whole_s) if whole_s else AloneTimes()


@dataclass(slots=True)
class _Call:
    arrived_alone_s: float
    first_at_s: float = 0.0
    first_later_s: float = 0.0


class CallCosts:
    """Latencies of online calls, as they were and alone; `telemetry` sums up the last minutes. Of
    those, but of the last `LEAST_CALLS` at least, it takes what `slo: auto` has `learnt`.

    With 256 running requests a step with offline work costs 40 us, a first or last token 1 us.
    """

    def __init__(self) -> None:
        self.clock = AloneClock()
        self._calls: dict[str, _Call] = {}
        self.ttft: deque[Latency] = deque(maxlen=MAX_CALLS)
        self.tpot: deque[Latency] = deque(maxlen=MAX_CALLS)
        self.learnt = OnlineSlo()
        self._summed = CostTelemetry()
        self._summed_at_s = self._paused_at_s = -math.inf

    def arrived(self, view: RequestView) -> None:
        """An online call has come in; one from before the end of a pause tells nothing."""
        if view.arrival_at_s >= self._paused_at_s:
            self._calls[view.request_id] = _Call(self.clock.first_at_s(view.arrival_at_s))

    def paused(self, now_s: float) -> None:
        """vLLM pauses or goes on: latencies of calls that have come by now tell nothing."""
        self._calls.clear()
        self._paused_at_s = now_s

    def scheduled(
        self,
        output: SchedulerOutput,
        views: Mapping[str, RequestView],
        model: StepTimeModel,
        predicted_s: float,
        now_s: float,
    ) -> None:
        """A step was handed to the engine, which holds offline work; `model` is of steps alone."""
        decodes: list[int] = []
        prompts: list[tuple[int, int]] = []
        for request_id, new_tokens in output.num_scheduled_tokens.items():
            view = views[request_id]
            if view.request_class is RequestClass.ONLINE:
                context_tokens = view.handle.num_computed_tokens
                if new_tokens == 1 and context_tokens > view.num_prompt_tokens:
                    decodes.append(context_tokens)
                else:
                    prompts.append((new_tokens, context_tokens))
        alone = alone_step(model, decodes, prompts, self.clock.stretch)
        self.clock.scheduled(now_s, predicted_s, alone)

    def token(self, view: RequestView, now_s: float, *, is_last: bool) -> None:
        """An online call got a token; `first_token_at_s` is not set by the first yet."""
        call = self._calls.get(view.request_id)
        if call is None:
            return
        now = self.clock.now
        if view.first_token_at_s is None:
            call.first_at_s, call.first_later_s = now_s, now.later_s
            alone_s = now.first_s - call.arrived_alone_s
            self.ttft.append(Latency(now_s, now_s - view.arrival_at_s, alone_s))
        elif is_last and (num_gaps := view.handle.num_output_tokens - 1) > 0:
            alone_s = (now.later_s - call.first_later_s) / num_gaps
            self.tpot.append(Latency(now_s, (now_s - call.first_at_s) / num_gaps, alone_s))

    def left(self, request_id: str) -> None:
        """A call gets no further token."""
        self._calls.pop(request_id, None)

    def telemetry(self, now_s: float, online_cost: float | None) -> CostTelemetry:
        """Percentiles of the last minutes; made anew once a second at most."""
        if now_s - self._summed_at_s >= SUM_UP_EVERY_S:
            self._summed_at_s = now_s
            for kept in (self.ttft, self.tpot):
                while len(kept) > LEAST_CALLS and now_s - kept[0].at_s > WINDOW_S:
                    kept.popleft()
            self.learnt = learnt_slo(online_cost, self.ttft, self.tpot)
            recent = (
                [call for call in kept if now_s - call.at_s <= WINDOW_S]
                for kept in (self.ttft, self.tpot)
            )
            self._summed = _sum_up(online_cost, *recent)
        return self._summed


def learnt_slo(
    online_cost: float | None, ttft: Collection[Latency], tpot: Collection[Latency]
) -> OnlineSlo:
    """What `slo: auto` promises: `online_cost` times what 99 of 100 calls would have had alone; of
    each the default until it is known of `LEAST_CALLS`, and where it is no time at all."""
    bounds_s: dict[str, float] = {}
    for name, kept in (("ttft_s", ttft), ("tpot_s", tpot)):
        _, alone_s = _of([latency.alone_s for latency in kept])
        bound_s = min((online_cost or 0.0) * (alone_s or 0.0), MAX_BOUND_S)
        if len(kept) >= LEAST_CALLS and bound_s > 0:
            bounds_s[name] = bound_s
    return OnlineSlo(**bounds_s)


Percentiles = tuple[float | None, float | None]


def _sum_up(
    online_cost: float | None, ttft: Collection[Latency], tpot: Collection[Latency]
) -> CostTelemetry:
    (first, first_alone), (later, later_alone) = _percentiles(ttft), _percentiles(tpot)
    return CostTelemetry(online_cost, len(ttft), *first, *first_alone, *later, *later_alone)


def _percentiles(kept: Collection[Latency]) -> tuple[Percentiles, Percentiles]:
    """(p50, p99) as they were, and alone."""
    return (_of([latency.seconds for latency in kept]), _of([latency.alone_s for latency in kept]))


def _of(values: list[float]) -> Percentiles:
    if not values:
        return None, None
    values.sort()
    return values[len(values) // 2], values[min(len(values) - 1, math.ceil(0.99 * len(values)) - 1)]
