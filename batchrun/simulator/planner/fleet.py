"""Step 1: the smallest number of engines of each kind that reaches the SLO target in the peak, on
every draw of the traffic.

Calls that miss a bound on an idle engine are found first: no number of engines helps them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from batchrun.config import STOCK_POLICY
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import OfflineJob
from batchrun.simulator.online import Calls
from batchrun.simulator.planner.confidence import has_room, is_kept
from batchrun.simulator.planner.kinds import EngineKind, SloTarget
from batchrun.simulator.planner.peak import TAIL_S, PeakLoad
from batchrun.simulator.planner.search import (
    WHOLE_ENGINES,
    enough,
    first_guess,
    num_simulated,
    sizes,
    smallest,
)
from batchrun.simulator.records import Slo
from batchrun.simulator.simulation import SimulationPlan, simulate
from batchrun.simulator.traces.trace import Ints, cached_tokens
from batchrun.types import ProgressSink


@dataclass(frozen=True, slots=True)
class Attainment:
    """What the calls of the peak of one draw got on `num_engines`; draw 0 is the trace as given.

    `num_timed` calls had two tokens or more by the end, and so a TPOT. `has_jobs`: beside the jobs.
    """

    num_engines: int
    num_calls: int
    num_ttft_missed: int
    num_timed: int
    num_tpot_missed: int
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    draw: int = 0
    has_jobs: bool = False

    @property
    def ttft_share(self) -> float:
        """The share of calls within the TTFT bound."""
        return 1 - self.num_ttft_missed / self.num_calls if self.num_calls else 1.0

    @property
    def tpot_share(self) -> float:
        """The share of calls within the TPOT bound, of those that have one."""
        return 1 - self.num_tpot_missed / self.num_timed if self.num_timed else 1.0

    def holds(self, slo: SloTarget) -> bool:
        """Whether both bounds hold for the target share of calls."""
        return all(missed <= may for missed, may in self.missed(slo))

    def missed(self, slo: SloTarget) -> tuple[tuple[int, int], tuple[int, int]]:
        """Calls that missed the TTFT and the TPOT bound, each with how many may."""
        return (
            (self.num_ttft_missed, slo.may_miss(self.num_calls)),
            (self.num_tpot_missed, slo.may_miss(self.num_timed)),
        )

    def spare_share(self, slo: SloTarget) -> float:
        """How much of what may miss did not, by the tighter bound; below 0 where it does not
        hold."""
        return min(may - missed for missed, may in self.missed(slo)) / max(1, self.num_calls)


def keep_together(tried: Sequence[Attainment], slo: SloTarget) -> bool:
    """Whether the bounds are kept on the draws tried, by all their calls together and with no draw
    on which they clearly are not."""
    return all(is_kept(each) for each in zip(*(e.missed(slo) for e in tried), strict=True))


def have_room(tried: Sequence[Attainment], slo: SloTarget) -> bool:
    """Whether they keep them so well that another draw does too, with the confidence asked for."""
    return all(has_room(each) for each in zip(*(e.missed(slo) for e in tried), strict=True))


def attainment(
    load: PeakLoad,
    kind: EngineKind,
    num_engines: int,
    slo: SloTarget,
    jobs: Sequence[OfflineJob] = (),
    progress: ProgressSink | None = None,
) -> Attainment:
    """Simulate the load on so many engines: alone, or under the engine's policy beside jobs.

    Nobody is told how long an answer will be.
    """
    plan = SimulationPlan(
        load.judged_s[1] + max(TAIL_S, slo.ttft_s),
        load.calls,
        jobs,
        num_engines,
        kind.engine if jobs else _stock(kind.engine),
        Slo(slo.ttft_s, slo.tpot_s),
        judged_s=load.judged_s,
        router=kind.router,
    )
    online = simulate(plan, progress=progress).online
    # Shares are whole numbers of calls over the judged ones.
    num_kept = round((online.ttft_kept or 0.0) * online.num_judged)
    num_tpot_missed = round((1 - (online.tpot_kept or 0.0)) * online.num_timed)
    return Attainment(
        num_engines,
        load.num_judged,
        load.num_judged - num_kept,
        online.num_timed,
        num_tpot_missed,
        online.ttft_p99_s,
        online.tpot_p99_s,
        load.draw,
        bool(jobs),
    )


def _stock(engine: EnginePlan) -> EnginePlan:
    """Under vLLM's own scheduler: without offline rows batchrun's does the same, step for step, and
    so nothing that happens depends on the bounds."""
    return replace(engine, policy=STOCK_POLICY, believed=())


@dataclass(frozen=True, slots=True)
class InfeasibleCalls:
    """Judged calls that miss `bound` on an engine of their own; `number` is the heaviest of them.

    `number` counts the trace's calls from 1. `took_s` is None for a call that engines refuse, since
    it is longer than the context; `bound_s` is then None too, and `context_tokens` says how long
    that is. `is_too_many`: more than the target lets miss, with the `num_refused` that miss it too.
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
    num_refused: int


def context_tokens(engine: EnginePlan) -> int:
    """The longest call, prompt and answer, that fits into an engine."""
    shape = engine.shape
    return min(shape.max_model_len, (shape.num_blocks - 1) * shape.block_tokens)


def infeasible_calls(load: PeakLoad, engine: EnginePlan, slo: SloTarget) -> list[InfeasibleCalls]:
    """The judged calls that miss a bound alone: TTFT by the prompt, TPOT by the mean context, and
    those that fit no engine, which miss the TTFT too. At most one entry for each reason."""
    fitting = load.within(context_tokens(engine))
    calls = fitting.calls
    judged = np.flatnonzero(fitting.is_judged())
    timed = judged[calls.num_output_tokens[judged] > 1]
    # Blocks of a call before may still be in the cache.
    prompts = np.maximum(1, calls.num_prompt_tokens - cached_tokens(calls))
    contexts = calls.num_prompt_tokens + calls.num_output_tokens / 2

    def ttft_s(index: int) -> float:
        return alone(engine, int(prompts[index]), 1)[0]

    def tpot_s(index: int) -> float:
        tokens = calls.num_prompt_tokens[index], calls.num_output_tokens[index]
        return alone(engine, int(tokens[0]), int(tokens[1]))[1]

    found = []
    if num_refused := fitting.num_refused:
        longest = int(np.argmax(np.where(load.is_judged(), load.calls.num_tokens, 0)))
        counts = num_refused, 0, load.num_judged
        found.append(_infeasible("context", load, longest, counts, engine, slo))
    by_prompt = judged[np.argsort(prompts[judged], kind="stable")]
    by_context = timed[np.argsort(contexts[timed], kind="stable")]
    for name, bound_s, alone_s, ranked, num_more in (
        ("TTFT", slo.ttft_s, ttft_s, by_prompt, num_refused),
        ("TPOT", slo.tpot_s, tpot_s, by_context, 0),
    ):
        if num_late := _num_above(alone_s, ranked, bound_s):
            heaviest, counts = int(ranked[-1]), (num_late, num_more, len(ranked) + num_more)
            late = _infeasible(name, fitting, heaviest, counts, engine, slo)
            found.append(replace(late, took_s=alone_s(heaviest), bound_s=bound_s))
    return found


def _infeasible(
    bound: str,
    load: PeakLoad,
    heaviest: int,
    counts: tuple[int, int, int],
    engine: EnginePlan,
    slo: SloTarget,
) -> InfeasibleCalls:
    """`counts` are the calls that miss the bound, those refused besides, and all that could."""
    num, num_refused, num_judged = counts
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
        num + num_refused > slo.may_miss(num_judged),
        num_refused,
    )


def _num_above(alone_s: Callable[[int], float], ranked: Ints, bound_s: float) -> int:
    """How many of the calls `ranked`, the quickest first, take longer than the bound alone."""
    num = len(ranked)

    def is_late(rank: int) -> bool:
        return alone_s(int(ranked[rank])) > bound_s

    if not num or not is_late(num - 1):
        return 0
    return num - bisect_left(range(num - 1), True, key=is_late)


def alone(
    engine: EnginePlan, num_prompt_tokens: int, num_output_tokens: int
) -> tuple[float, float]:
    """TTFT and TPOT in seconds of one call on an idle engine; a TPOT of 0 for one token."""
    one = Calls(np.zeros(1), np.array([num_prompt_tokens]), np.array([num_output_tokens]))
    online = simulate(SimulationPlan(math.inf, one, engine=_stock(engine))).online
    assert online.ttft_p50_s is not None
    return online.ttft_p50_s, online.tpot_p50_s or 0.0


def end_with_parent() -> None:
    """Have this process end when the one that started it does, however that ends, or at Ctrl-C."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))


MAX_ENGINES = 1024
NUM_BESIDE = 3
"""Draws that are simulated beside jobs: those with the least to spare."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the search found for one kind. `num_engines` is None where nothing holds.

    `tried` are the simulated numbers, the smallest first, those beside jobs last; none when
    `infeasible` rules all out. The calls alone need `num_for_calls`, those of the trace as given
    `num_as_given`; that holds on `num_draws` draws: on others too many calls miss their bounds
    alone. `is_beside_kept`: whether the bounds are kept beside the jobs too; None without jobs.
    """

    kind: EngineKind
    num_engines: int | None
    tried: tuple[Attainment, ...] = ()
    infeasible: tuple[InfeasibleCalls, ...] = ()
    num_as_given: int | None = None
    num_for_calls: int | None = None
    num_draws: int = 1
    is_beside_kept: bool | None = None

    @property
    def is_impossible(self) -> bool:
        """Too many calls miss their bounds alone: no number of engines helps."""
        return any(each.is_too_many for each in self.infeasible)

    @property
    def price_per_hour(self) -> float | None:
        """Of the engines found; None without a price or an answer."""
        return None if self.num_engines is None else self.kind.price_per_hour(self.num_engines)

    def tried_on(self, num_engines: int, *, has_jobs: bool = False) -> list[Attainment]:
        """What was simulated with so many engines, a draw after the other."""
        return [e for e in self.tried if (e.num_engines, e.has_jobs) == (num_engines, has_jobs)]


@dataclass(slots=True)
class _Trials:
    """Simulates numbers of engines of a kind, each on each load once."""

    kind: EngineKind
    slo: SloTarget
    progress: ProgressSink | None
    done: dict[tuple[int, int], Attainment] = field(default_factory=dict)
    _ahead: dict[tuple[int, int], Attainment] = field(default_factory=dict)
    _pool: ProcessPoolExecutor | None = None

    def close(self) -> None:
        """End the processes of `look_ahead`."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def look_ahead(self, loads: Sequence[PeakLoad], num_engines: int) -> None:
        """Simulate, where there are many engines, as many of the loads as there are CPUs side by
        side, so that `of` has the answers already."""
        num_cpus = len(os.sched_getaffinity(0))
        known = self.done.keys() | self._ahead.keys()
        asked = [load for load in loads if (num_engines, load.draw) not in known][:num_cpus]
        if len(asked) < 2 or num_simulated(num_engines) == num_engines:
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(num_cpus, context, end_with_parent)
        if self.progress is not None:
            self.progress(f"{len(asked)} draws on {num_engines:,} of {self.kind.name}", 0, 1)
        # Where a process was killed, `of` simulates here what is missing.
        with suppress(BrokenProcessPool):
            begun = [
                self._pool.submit(attainment, *self._part(load, num_engines), self.slo)
                for load in asked
            ]
            for load, future in zip(asked, begun, strict=True):
                self._ahead[num_engines, load.draw] = future.result()

    def _part(self, load: PeakLoad, num_engines: int) -> tuple[PeakLoad, EngineKind, int]:
        """What is simulated for so many engines."""
        asked, part = load.within(context_tokens(self.kind.engine)), num_engines
        if num_simulated(num_engines) < num_engines and asked.calls.prefix is None:
            part = num_simulated(num_engines)
            asked = asked.part(part / num_engines)
        return asked, self.kind, part

    def of(self, load: PeakLoad, num_engines: int, jobs: Sequence[OfflineJob] = ()) -> Attainment:
        """What so many give to the load."""

        def report(stage: str, done: int, total: int) -> None:
            if self.progress is not None:
                what = f"draw {load.draw}, {num_engines:,} of {self.kind.name}"
                self.progress(f"{stage} the peak of {what}", done, total)

        key = num_engines, load.draw
        if key not in self.done:
            found = self._ahead.get(key)
            if found is None:
                asked = self._part(load, num_engines)
                found = attainment(*asked, self.slo, jobs, report)
            self.done[key] = replace(found, num_engines=num_engines)
        return self.done[key]

    def first_to_hold(
        self,
        nums: Iterable[int],
        loads: Sequence[PeakLoad],
        enough: int,
        jobs: Sequence[OfflineJob] = (),
    ) -> int | None:
        """The first of the numbers that holds on all loads together with room for chance. For that
        no more than `enough` are tried: then it is the first that holds at all.

        Loads are asked in their order but for one that has failed: it goes first.
        """
        asked, barely = list(loads), None
        for num in nums:
            if barely is not None and num > enough:
                break
            tried: list[Attainment] = []
            for place, load in enumerate(asked):
                if not jobs:
                    self.look_ahead(asked[place:], num)
                tried.append(self.of(load, num, jobs))
                if not keep_together(tried[-1:], self.slo):
                    asked.remove(load)
                    asked.insert(0, load)
                    break
            else:
                if keep_together(tried, self.slo):
                    if num >= enough or have_room(tried, self.slo):
                        return num
                    barely = barely or num
        return barely

    def attainments(self) -> tuple[Attainment, ...]:
        """The smallest number first, the trace as given before other draws."""
        return tuple(self.done[key] for key in sorted(self.done))


def size_fleet(
    loads: Sequence[PeakLoad],
    kind: EngineKind,
    slo: SloTarget,
    most_engines: int = MAX_ENGINES,
    progress: ProgressSink | None = None,
) -> Fleet:
    """The smallest number of engines of the kind, up to `most_engines`, that holds on every load.

    The first load is the trace's: its number is searched for. Then engines are added, one at a
    time, until all loads together hold with room for chance. Those with the most tokens are asked
    first, and before them one that did not hold with fewer engines.
    """
    infeasible = tuple(infeasible_calls(loads[0], kind.engine, slo))
    if any(each.is_too_many for each in infeasible):
        return Fleet(kind, None, infeasible=infeasible)
    asked = [loads[0]]
    for load in sorted(loads[1:], key=lambda load: -load.num_judged_tokens):
        if not any(each.is_too_many for each in infeasible_calls(load, kind.engine, slo)):
            asked.append(load)
    trials = _Trials(kind, slo, progress)
    first = first_guess(loads[0].within(context_tokens(kind.engine)), kind.engine)

    def holds(num: int) -> bool:
        return trials.of(loads[0], num).holds(slo)

    given = smallest(holds, most_engines, first)
    if given is not None and WHOLE_ENGINES < given < 2 * WHOLE_ENGINES:
        # Of more than those a part was simulated, which holds later.
        given = smallest(holds, WHOLE_ENGINES, WHOLE_ENGINES) or given
    nums = [num for num in sizes(most_engines) if num >= (given or 1)]
    try:
        num = given and trials.first_to_hold(nums, asked, enough(given))
    finally:
        trials.close()
    return Fleet(kind, num, trials.attainments(), infeasible, given, num, len(asked))


def beside_jobs(
    fleet: Fleet,
    loads: Sequence[PeakLoad],
    jobs: Sequence[OfflineJob],
    slo: SloTarget,
    most_engines: int = MAX_ENGINES,
    progress: ProgressSink | None = None,
) -> Fleet:
    """The fleet with as many engines as hold beside the jobs too, under the policy that runs them.

    Calls come first, so the number rises where jobs cost them their bounds, a tenth of it at a time
    and up to half as many again, or `most_engines`. Where those do not hold either, the number
    stays: the jobs have to pause in the peak. Simulated are the draws that have the least to spare
    without jobs.
    """
    num, trials = fleet.num_engines, _Trials(fleet.kind, slo, progress)
    assert num is not None and fleet.num_as_given is not None
    by_draw = {load.draw: load for load in loads}

    def hardness(each: Attainment) -> tuple[float, int]:
        return each.spare_share(slo), -by_draw[each.draw].num_judged_tokens

    hardest = sorted(fleet.tried_on(num), key=hardness)[:NUM_BESIDE]
    most = max(num, min(math.ceil(1.5 * num), most_engines))
    nums = range(num, most + 1, max(1, num // 10))
    asked = [by_draw[each.draw] for each in hardest]
    found = trials.first_to_hold(nums, asked, enough(fleet.num_as_given), jobs)
    tried = (*fleet.tried, *trials.attainments())
    return replace(fleet, num_engines=found or num, tried=tried, is_beside_kept=found is not None)
