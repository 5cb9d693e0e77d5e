"""Step 1: the smallest number of engines of each kind that reaches the SLO target in the peak.

Calls that miss a bound on an idle engine are found first: no number of engines helps them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchrun.config import STOCK_POLICY
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.online import Calls
from batchrun.simulator.planner.kinds import EngineKind
from batchrun.simulator.planner.peak import Attainment, PeakLoad, SloTarget, attainment
from batchrun.simulator.simulation import SimulationPlan, simulate
from batchrun.simulator.traces.trace import Trace
from batchrun.types import ProgressSink

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InfeasibleCalls:
    """Judged calls that miss `bound` on an engine of their own; `number` is the heaviest of them.

    `number` counts the trace's calls from 1. `took_s` is None for a call that engines refuse, since
    it is longer than the context; `bound_s` is then None too, and `context_tokens` says how long
    that is. `is_too_many`: more than the target lets miss.
    """

    bound: str
    number: int
    num_prompt_tokens: int
    num_output_tokens: int
    took_s: float | None
    bound_s: float | None
    context_tokens: int
    num_calls: int
    num_judged: int
    is_too_many: bool


def context_tokens(engine: EnginePlan) -> int:
    """The longest call, prompt and answer, that fits into an engine."""
    shape = engine.shape
    return min(shape.max_model_len, (shape.num_blocks - 1) * shape.block_tokens)


def infeasible_calls(load: PeakLoad, engine: EnginePlan, slo: SloTarget) -> list[InfeasibleCalls]:
    """The judged calls that miss a bound alone: TTFT by the prompt, TPOT by the mean context, and
    those that fit no engine. At most one entry for each reason."""
    fitting = load.within(context_tokens(engine))
    calls = fitting.calls
    judged = np.flatnonzero(fitting.is_judged())
    timed = judged[calls.num_output_tokens[judged] > 1]
    prompts = least_computed(calls)
    contexts = calls.num_prompt_tokens + calls.num_output_tokens / 2

    def ttft_s(index: int) -> float:
        return alone(engine, int(prompts[index]), 1)[0]

    def tpot_s(index: int) -> float:
        tokens = calls.num_prompt_tokens[index], calls.num_output_tokens[index]
        return alone(engine, int(tokens[0]), int(tokens[1]))[1]

    by_prompt = judged[np.argsort(prompts[judged], kind="stable")]
    by_context = timed[np.argsort(contexts[timed], kind="stable")]
    found = []
    if fitting.num_refused:
        tokens = np.where(load.is_judged(), load.calls.num_tokens, 0)
        longest = load, int(np.argmax(tokens)), (fitting.num_refused, load.num_judged)
        found.append(_infeasible("context", *longest, engine, slo))
    for name, bound_s, alone_s, ranked in (
        ("TTFT", slo.ttft_s, ttft_s, by_prompt),
        ("TPOT", slo.tpot_s, tpot_s, by_context),
    ):
        if num_late := _num_above(alone_s, ranked, bound_s):
            heaviest = fitting, int(ranked[-1]), (num_late, len(ranked))
            late = _infeasible(name, *heaviest, engine, slo)
            found.append(replace(late, took_s=alone_s(int(ranked[-1])), bound_s=bound_s))
    return found


def _num_above(alone_s: Callable[[int], float], ranked: Ints, bound_s: float) -> int:
    """How many of the calls `ranked`, the quickest first, take longer than the bound alone."""
    num = len(ranked)

    def is_late(rank: int) -> bool:
        return alone_s(int(ranked[rank])) > bound_s

    if not num or not is_late(num - 1):
        return 0
    return num - bisect_left(range(num - 1), True, key=is_late)


def _infeasible(
    bound: str,
    load: PeakLoad,
    heaviest: int,
    parts: tuple[int, int],
    engine: EnginePlan,
    slo: SloTarget,
) -> InfeasibleCalls:
    """`parts` are the calls that miss the bound and all that could."""
    num, num_judged = parts
    return InfeasibleCalls(
        bound,
        int(load.numbers[heaviest]) + 1,
        int(load.calls.num_prompt_tokens[heaviest]),
        int(load.calls.num_output_tokens[heaviest]),
        None,
        None,
        context_tokens(engine),
        num,
        num_judged,
        num > slo.may_miss(num_judged),
    )


def alone(
    engine: EnginePlan, num_prompt_tokens: int, num_output_tokens: int
) -> tuple[float, float]:
    """TTFT and TPOT in seconds of one call on an idle engine; a TPOT of 0 for one token."""
    one = Calls(np.zeros(1), np.array([num_prompt_tokens]), np.array([num_output_tokens]))
    stock = replace(engine, policy=STOCK_POLICY, believed=())
    online = simulate(SimulationPlan(math.inf, one, engine=stock)).online
    assert online.ttft_p50_s is not None
    return online.ttft_p50_s, online.tpot_p50_s or 0.0


def least_computed(calls: Trace) -> Ints:
    """The prompt tokens of each call that no cache can have: blocks of a call before may stay."""
    prefix = calls.prefix
    if prefix is None:
        return calls.num_prompt_tokens
    seen: set[int] = set()
    least = calls.num_prompt_tokens.copy()
    for index in range(len(calls)):
        blocks = prefix.of_request(index).tolist()
        known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        least[index] = max(1, int(least[index]) - known * prefix.block_tokens)
        seen.update(blocks)
    return least


def smallest(holds: Callable[[int], bool], most: int) -> int | None:
    """A number up to `most` that holds while the one below it does not; None: `most` does not.

    1 needs no number below it. `holds` is asked at most about 2 log2(most) times. Where two
    questions differ so that the second holds wherever the first does, the second's answer is never
    larger: both are asked along one path, until the second holds where the first does not, and
    from there it looks below, the first above.
    """
    low, high = 0, 1
    while not holds(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    return bisect_left(range(high), True, low + 1, key=holds)


MAX_ENGINES = 1024


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the search found for one kind. `num_engines` is None where nothing holds.

    `tried` are the simulated numbers, the smallest first; none when `infeasible` rules all out.
    """

    kind: EngineKind
    num_engines: int | None
    tried: tuple[Attainment, ...]
    infeasible: tuple[InfeasibleCalls, ...]
    most_engines: int = MAX_ENGINES

    @property
    def is_impossible(self) -> bool:
        """Too many calls miss their bounds alone: no number of engines helps."""
        return any(each.is_too_many for each in self.infeasible)

    @property
    def price_per_hour(self) -> float | None:
        """Of the engines found; None without a price or an answer."""
        return None if self.num_engines is None else self.kind.price_per_hour(self.num_engines)

    def of(self, num_engines: int) -> Attainment | None:
        """What so many engines attain, if that was simulated."""
        return next((each for each in self.tried if each.num_engines == num_engines), None)


def size_fleet(
    load: PeakLoad,
    kind: EngineKind,
    slo: SloTarget,
    most_engines: int = MAX_ENGINES,
    progress: ProgressSink | None = None,
) -> Fleet:
    """The smallest number of engines of the kind up to `most_engines`."""
    infeasible = tuple(infeasible_calls(load, kind.engine, slo))
    if any(each.is_too_many for each in infeasible):
        return Fleet(kind, None, (), infeasible, most_engines)
    fitting = load.within(context_tokens(kind.engine))
    tried: dict[int, Attainment] = {}

    def holds(num_engines: int) -> bool:
        def report(stage: str, done: int, total: int) -> None:
            if progress is not None:
                progress(f"{stage} the peak on {num_engines:,} of {kind.name}", done, total)

        tried[num_engines] = attainment(fitting, kind.engine, num_engines, slo, report)
        return tried[num_engines].holds(slo)

    found = smallest(holds, most_engines)
    return Fleet(kind, found, tuple(tried[num] for num in sorted(tried)), infeasible, most_engines)


def cheapest(fleets: Sequence[Fleet]) -> Fleet | None:
    """The fleet with the lowest price, of equals the one with the fewest engines."""
    able = [fleet for fleet in fleets if fleet.num_engines is not None]
    return min(able, key=lambda each: (each.price_per_hour or 0.0, each.num_engines), default=None)
