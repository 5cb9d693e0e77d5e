"""How many calls a second an engine serves within their bounds, by its step-time model.

The planner's question, asked while engines run: it takes seconds, not minutes, since engines here
are a few lines. A prompt is computed in chunks, first come, first served; a call holds the KV of
its prompt and of its answer from the first chunk on; steps take what the model says. Nothing is
shared but what the lengths say is cached.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

WARM_S = 20.0
"""Calls of the first seconds are load, and not judged; of so many more as an answer takes."""
ENGINE_S = 960.0
"""So long is judged in all: one engine for that long, four for a quarter of it each."""
LEAST_JUDGED_S = 90.0
MAX_CALLS = 30_000
"""Of a trial, about: where more would come in its time, it is shorter."""
NUM_BOUNDS = 20
"""But as long as so many bounds of the first token, with so many times the calls at most: only
then is a call late by an overload of 5 %."""
REST_S = 20.0
"""Answers that take longer than that beyond the last call are taken to go on at their pace."""
MOST_SHARE, LEAST_SHARE = 1.2, 0.1
"""Rates that are tried, as shares of what the engine could do at most."""
NUM_RATES = 56
"""So many are tried between them, by bisection: steps of less than 5 %."""
NUM_DRAWS = 3
SIZES = (1, 4, 16)
"""Numbers of engines for which it is found what they hold."""


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """What an engine holds: tokens of KV, calls at a time, new tokens in a step."""

    kv_tokens: int = 137_600
    max_running: int = 256
    budget_tokens: int = 2048


class Promise(NamedTuple):
    """The share `target` of calls has its first token within `ttft_s` and a mean time between
    tokens of at most `tpot_s`."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    target: float = 0.99


@dataclass(frozen=True, slots=True, eq=False)
class CallLengths:
    """Lengths of calls as they came: tokens of prompts, of these cached, and of answers."""

    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def take(self, chosen: Ints) -> CallLengths:
        """Those at these places."""
        return CallLengths(
            self.prompt_tokens[chosen], self.cached_tokens[chosen], self.output_tokens[chosen]
        )


@dataclass(slots=True, eq=False)
class _Call:
    arrival_s: float
    prompt_tokens: int
    left_tokens: int
    output_tokens: int
    is_judged: bool
    first_token_s: float = math.inf
    end_s: float = math.inf


class _Engine:
    """One engine on a clock of its own."""

    def __init__(self, model: StepTimeModel, room: EngineRoom) -> None:
        self._model, self._room = model, room
        self.now_s = 0.0
        self.waiting: deque[_Call] = deque()
        self.prefills: deque[_Call] = deque()
        self.ends: list[tuple[int, int, _Call]] = []
        self.left_tokens = 0
        self._num_steps = self._context_tokens = self._held_tokens = self._num_begun = 0

    def take(self, call: _Call) -> None:
        """A call has come."""
        self.waiting.append(call)
        self.left_tokens += call.left_tokens

    def advance(self, until_s: float) -> None:
        """Run steps until then; one that is under way goes on."""
        while self.now_s < until_s:
            if not (self.waiting or self.prefills or self.ends):
                self.now_s = until_s
                return
            self._step()

    def foresee(self) -> None:
        """Give the answers under way the ends that they come to at their pace so far."""
        for end, _, call in self.ends:
            num_steps = call.output_tokens - 1 - (end - self._num_steps)
            pace_s = (self.now_s - call.first_token_s) / max(num_steps, 1)
            call.end_s = call.first_token_s + pace_s * (call.output_tokens - 1)

    def _step(self) -> None:
        self._admit()
        num_decodes, contexts = len(self.ends), self._context_tokens
        load = StepLoad(num_decodes, num_decodes, contexts, contexts - 0.5 * num_decodes)
        load.num_decodes, load.decode_context_tokens = num_decodes, contexts
        load.max_decode_context_tokens = 2 * contexts // max(num_decodes, 1)
        budget = self._room.budget_tokens - num_decodes
        done = []
        for call in self.prefills:
            chunk = min(budget, call.left_tokens)
            if chunk <= 0:
                break
            budget -= chunk
            call.left_tokens -= chunk
            self.left_tokens -= chunk
            load.add(chunk, call.prompt_tokens - call.left_tokens)
            if not call.left_tokens:
                done.append(call)
        self.now_s += self._model.predict_s(load)
        self._num_steps += 1
        self._context_tokens += num_decodes
        for call in done:
            self.prefills.popleft()
            call.first_token_s = self.now_s
            self._num_begun += 1
            end = self._num_steps + call.output_tokens - 1
            heapq.heappush(self.ends, (end, self._num_begun, call))
            self._context_tokens += call.prompt_tokens
        while self.ends and self.ends[0][0] <= self._num_steps:
            call = heapq.heappop(self.ends)[2]
            call.end_s = self.now_s
            self._context_tokens -= call.prompt_tokens + call.output_tokens - 1
            self._held_tokens -= call.prompt_tokens + call.output_tokens

    def _admit(self) -> None:
        while self.waiting and len(self.prefills) + len(self.ends) < self._room.max_running:
            call = self.waiting[0]
            held = self._held_tokens + call.prompt_tokens + call.output_tokens
            if held > self._room.kv_tokens and (self.prefills or self.ends):
                return
            self._held_tokens = held
            self.prefills.append(self.waiting.popleft())


@dataclass(frozen=True, slots=True)
class EngineTrial:
    """Engines of one kind, calls as they came lately, and what those were promised."""

    model: StepTimeModel
    room: EngineRoom
    lengths: CallLengths
    promise: Promise
    seed: int = 0
    judged: Bools | None = None
    """Which of `lengths` are to keep the promise, the others are load; None: all."""

    def kept_alone(self) -> Bools:
        """Which of `lengths` keep the bound of the first token, and which that of the others, where
        nothing else runs: two rows."""
        calls = self.lengths
        columns = (calls.prompt_tokens, calls.cached_tokens, calls.output_tokens)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return np.array([self._is_kept_alone(*row) for row in rows]).T

    def _is_kept_alone(
        self, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> tuple[bool, bool]:
        left, first_s = max(1, prompt_tokens - cached_tokens), 0.0
        while left > 0 and first_s <= self.promise.ttft_s:
            chunk = min(left, self.room.budget_tokens)
            left -= chunk
            first_s += self.model.predict_s(StepLoad.of([(chunk, prompt_tokens - left, False)]))
        context = prompt_tokens + output_tokens // 2
        token_s = self.model.predict_s(StepLoad.of([(1, context, True)]))
        is_fast = output_tokens <= 1 or token_s <= self.promise.tpot_s
        return first_s <= self.promise.ttft_s, is_fast

    def kept(self, rate_per_s: float, num_engines: int) -> float:
        """The share of judged calls that keep both bounds, of so many a second to so many engines,
        each to the one with the least to do; one without a first token keeps neither."""
        warm_s, judged_s = self._warm_s(), max(ENGINE_S / num_engines, LEAST_JUDGED_S)
        rng = np.random.default_rng(self.seed)
        usual_s = MAX_CALLS / rate_per_s
        shown_s = NUM_BOUNDS * min(self.promise.ttft_s, usual_s)
        end_s = min(warm_s + judged_s, max(usual_s, shown_s))
        warm_s = min(warm_s, end_s / 2)
        num = rng.poisson(rate_per_s * end_s)
        at_s = np.sort(rng.uniform(0.0, end_s, num))
        calls = self._drawn(at_s, rng)
        engines = [_Engine(self.model, self.room) for _ in range(num_engines)]
        usual_tokens = max(1.0, float(self.lengths.prompt_tokens.mean()))
        for call in calls:
            for engine in engines:
                engine.advance(call.arrival_s)
            chosen = min(
                engines,
                key=lambda each: (
                    each.left_tokens / usual_tokens
                    + 0.2 * (len(each.ends) + len(each.prefills) + len(each.waiting))
                ),
            )
            chosen.take(call)
        for engine in engines:
            engine.advance(end_s + REST_S)
            engine.foresee()
        judged = [call for call in calls if call.is_judged and call.arrival_s >= warm_s]
        return sum(map(self._is_kept, judged)) / len(judged) if judged else 1.0

    def rate_per_s(self, num_engines: int) -> float:
        """The most calls a second that so many engines serve as promised, by bisection; less than
        they could by a step of 5 % at most, and the least that is tried where not even that is.
        `lengths` has calls."""
        most = num_engines / max(self.least_s, 1e-9)
        rates = most * np.geomspace(LEAST_SHARE, MOST_SHARE, NUM_RATES)
        target = self.promise.target
        index = bisect_left(
            range(NUM_RATES), True, key=lambda i: self.kept(float(rates[i]), num_engines) < target
        )
        return float(rates[max(index - 1, 0)])

    @property
    def least_s(self) -> float:
        """Seconds of an engine that a call takes at least, on average: its prompt in full steps,
        and its part of the steps of a full batch."""
        tokens = self.room.budget_tokens
        prefill_s = self.model.predict_s(StepLoad.of([(tokens, tokens, False)])) / tokens
        missed = float((self.lengths.prompt_tokens - self.lengths.cached_tokens).mean())
        num, step_s = self._full_batch()
        return missed * prefill_s + float(self.lengths.output_tokens.mean()) * step_s / num

    def _warm_s(self) -> float:
        """Until as many calls are under way as come to be, where they may not take longer."""
        step_s = min(self._full_batch()[1], self.promise.tpot_s)
        return WARM_S + float(self.lengths.output_tokens.mean()) * step_s

    def _full_batch(self) -> tuple[int, float]:
        """How many calls decode at once at most, and how long such a step takes."""
        contexts = float(self.lengths.prompt_tokens.mean())
        num = max(1, min(self.room.max_running, int(self.room.kv_tokens / max(contexts, 1.0))))
        return num, self.model.predict_s(StepLoad.of([(1, max(1, round(contexts)), True)] * num))

    def _is_kept(self, call: _Call) -> bool:
        tpot_s = (call.end_s - call.first_token_s) / max(call.output_tokens - 1, 1)
        return call.first_token_s - call.arrival_s <= self.promise.ttft_s and (
            tpot_s <= self.promise.tpot_s
        )

    def _drawn(self, at_s: Floats, rng: np.random.Generator) -> list[_Call]:
        chosen = rng.integers(len(self.lengths), size=len(at_s))
        lengths = self.lengths.take(chosen)
        judged = np.ones(len(at_s), np.bool_) if self.judged is None else self.judged[chosen]
        missed = np.maximum(1, lengths.prompt_tokens - lengths.cached_tokens)
        outputs = np.maximum(1, lengths.output_tokens)
        columns = (at_s, lengths.prompt_tokens, missed, outputs, judged)
        return [_Call(*each) for each in zip(*(c.tolist() for c in columns), strict=True)]


@dataclass(frozen=True, slots=True)
class FleetCapacity:
    """Work a second that fleets hold within the bounds, by some numbers of engines: engines
    together hold more each than one alone, whose calls come by chance. Between those numbers the
    work of an engine is read from a line over the logarithm of the number."""

    work_by_size: Mapping[int, float]
    """Of all engines together, for at least one number of engines."""
    hopeless: tuple[float, float] = (0.0, 0.0)
    """The shares of calls whose first token, and whose others, are late on engines without others
    too."""

    def work(self, num_engines: int) -> float:
        """That so many engines hold."""
        sizes = sorted(self.work_by_size)
        each = [self.work_by_size[size] / size for size in sizes]
        at = math.log(max(num_engines, 1))
        return num_engines * float(np.interp(at, np.log(sizes), each))

    def times(self, factor: float) -> FleetCapacity:
        """So many times of it."""
        works = {size: factor * work for size, work in self.work_by_size.items()}
        return replace(self, work_by_size=works)

    def fewest(self, work: float, low: int, high: int) -> int:
        """The fewest engines, between these bounds, that hold this work."""
        return low + bisect_left(range(low, high), work, key=self.work)


def fleet_capacity(trial: EngineTrial, work_s: float, most: int) -> FleetCapacity:
    """What up to `most` engines hold, means of some draws; a call's work is `work_s` on average.
    Calls that cannot keep their bounds are load, unless none can. Several engines are not tried
    where so many calls come that a trial is too short for a queue to show; chance is small then."""
    alone = trial.kept_alone()
    judged: Bools = np.logical_and.reduce(alone)
    if judged.any():
        trial = replace(trial, judged=judged)
    draws = [replace(trial, seed=trial.seed + number) for number in range(NUM_DRAWS)]
    shortest_s = max(WARM_S, NUM_BOUNDS * trial.promise.ttft_s)
    largest = max(1.0, min(most, MAX_CALLS * trial.least_s / shortest_s))
    sizes = [size for size in SIZES if size <= largest]
    works = {size: work_s * fmean(each.rate_per_s(size) for each in draws) for size in sizes}
    first, others = (1 - alone.mean(axis=1)).tolist()
    return FleetCapacity(works, (first, others))
