"""The planner's step 1 against answers that are known by construction.

    python -m benchmarks.plan_trials [--trials 50] [--json FILE]

A trial's trace is bursts of identical calls at one instant, far enough apart that engines are idle
when the next comes. One engine serves k calls of a burst within the bounds and misses at least one
of k + 1 and of every number up to 2k: that is counted on a single virtual engine, one burst size
after the other, without gateway, search or planner. The bound, of TTFT or TPOT in turn, lies half
way between what the slowest of k and the slowest of k + 1 calls got.

Then n = ceil(m / k) is the smallest number of engines for bursts of m calls. It is enough, since
the gateway gives each call to the engine with the fewest, and so none gets more than k. One fewer
is not: n - 1 engines hold (n - 1) k < m calls in time, so whatever the gateway does, one of them
gets k + 1 or more of every burst. That is one late call in m, and m < 100 makes it more than the
1 % which may be late.

Each trial also asks for a larger burst, for a looser and a tighter bound, and for a bound that one
call alone misses: the answers must be the known one, no larger, no smaller, and "impossible".
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace

import numpy as np

from batchrun.config import STOCK_POLICY
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.planner.fleet import Fleet, size_fleet
from batchrun.simulator.planner.kinds import EngineKind
from batchrun.simulator.planner.peak import SloTarget, peak_load
from batchrun.simulator.traces.trace import Trace
from batchrun.simulator.virtual.engine import Arrival, RequestRecord, VirtualEngine
from batchrun.simulator.virtual.setup import stock_scheduler
from benchmarks.records import Bar, Record, describe, finish, parser

MOST_ENGINES, MOST_HELD = 9, 7
NO_BOUND_S = 1_000.0
HEAVY_BURSTS = 3
ENGINE = EnginePlan(policy=STOCK_POLICY)


@dataclass(frozen=True, slots=True)
class Case:
    """`num_calls` at once, of these lengths; an engine holds `held` of them within `slo`."""

    num_prompt_tokens: int
    num_output_tokens: int
    held: int
    num_calls: int
    slo: SloTarget
    alone_s: float
    period_s: float
    bound: str

    @property
    def known(self) -> int:
        """The smallest number of engines."""
        return math.ceil(self.num_calls / self.held)


def main() -> int:
    """Run the trials, print and save them; exit code 1 when one of them fails."""
    made = parser(__doc__)
    made.add_argument("--trials", type=int, default=50)
    options = made.parse_args()
    records: list[Record] = []
    for seed in range(options.trials):
        records.append(trial(seed))
        print(describe(records[-1]), flush=True)
    bars = [
        Bar(f"{name}, share of trials", sum(bool(r[name]) for r in records) / len(records), 1.0)
        for name in ("is_found", "is_larger_found", "is_monotone_in_slo", "is_impossible_told")
    ]
    return finish(options.json, records, bars)


def trial(seed: int) -> Record:
    """One case, and what the planner says of it."""
    case, rng = draw_case(seed), random.Random(-1 - seed)
    begin_s = time.process_time()
    found = planned(case)
    larger = replace(case, num_calls=min(99, case.num_calls + rng.randint(1, 2 * case.held)))
    larger_found = planned(larger)
    looser = planned(replace(case, slo=_scaled(case, rng.uniform(1.05, 2.0)))).num_engines
    least = case.alone_s / _bound_s(case)
    factor = max(rng.uniform(0.6, 0.98), 1.001 * least)
    tighter = planned(replace(case, slo=_scaled(case, min(factor, 1.0)))).num_engines
    infeasible = planned(replace(case, slo=_scaled(case, 0.95 * least)))
    num = found.num_engines or 0
    return {
        "seed": seed,
        "bound": case.bound,
        "prompt_tokens": case.num_prompt_tokens,
        "output_tokens": case.num_output_tokens,
        "calls_at_once": case.num_calls,
        "held_by_one_engine": case.held,
        "known": case.known,
        "found": found.num_engines,
        "known_larger": larger.known,
        "found_larger": larger_found.num_engines,
        "found_looser": looser,
        "found_tighter": tighter,
        "is_found": found.num_engines == case.known,
        "is_larger_found": larger_found.num_engines == larger.known >= num,
        "is_monotone_in_slo": (looser or 10**9) <= num <= (tighter or 10**9),
        "is_impossible_told": infeasible.is_impossible and infeasible.num_engines is None,
        "cpu_s": time.process_time() - begin_s,
    }


def planned(case: Case) -> Fleet:
    """Step 1 on the case's trace."""
    load = peak_load(trace_of(case), (HEAVY_BURSTS - 0.5) * case.period_s, case.slo)
    return size_fleet(load, EngineKind("a100-8b", ENGINE), case.slo, 128)


def trace_of(case: Case) -> Trace:
    """Two bursts of half the size, the heavy ones, and another half."""
    half = max(1, case.num_calls // 2)
    sizes = [half, half, *[case.num_calls] * HEAVY_BURSTS, half]
    at_s = np.repeat(np.arange(len(sizes)) * case.period_s, sizes)
    lengths = np.ones(len(at_s), np.int64)
    return Trace.of(at_s, lengths * case.num_prompt_tokens, lengths * case.num_output_tokens)


def draw_case(seed: int) -> Case:
    """Lengths, how many calls one engine holds, and how many engines that needs, are drawn."""
    rng = random.Random(seed)
    bound = "TTFT" if seed % 2 else "TPOT"
    lengths = rng.randint(300, 4_000), rng.randint(6, 40)
    held, num_engines = rng.randint(1, MOST_HELD), rng.randint(1, MOST_ENGINES)
    num_calls = rng.randint((num_engines - 1) * held + 1, num_engines * held)
    worst = [slowest(size, *lengths) for size in range(1, 2 * held + 1)]
    values = [each[bound == "TPOT"] for each in worst]
    # A later call never waits less, but two sizes may be equally slow: then one fewer is held.
    while held and max(values[:held]) >= min(values[held:]):
        held -= 1
    if not held:
        raise AssertionError(f"seed {seed}: two calls are as quick as one")
    bound_s = (max(values[:held]) + min(values[held:])) / 2
    slo = SloTarget(NO_BOUND_S, NO_BOUND_S)
    case = Case(*lengths, held, min(num_calls, 99), slo, values[0], 2 * worst[-1][2] + 1.0, bound)
    return replace(case, slo=_with_bound(case, bound_s))


def slowest(num_calls: int, num_prompt_tokens: int, num_output_tokens: int) -> tuple[float, ...]:
    """The largest TTFT, the largest TPOT and the last end of a burst on one idle engine."""
    engine = VirtualEngine(
        stock_scheduler(ENGINE.timing.steps_in_flight), ENGINE.shape, ENGINE.law, (), ENGINE.timing
    )
    for number in range(num_calls):
        prompt = [5 + (7 * number + place) % 1_900 for place in range(num_prompt_tokens)]
        engine.add(Arrival(f"call-{number}", True, 0.0, prompt, num_output_tokens, None))
    engine.run_until(math.inf)
    records = list(engine.records.values())
    ends_s = [record.token_times_s[-1] for record in records]
    return max(r.token_times_s[0] for r in records), max(map(_tpot_s, records)), max(ends_s)


def _tpot_s(record: RequestRecord) -> float:
    times_s = record.token_times_s
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def _bound_s(case: Case) -> float:
    return case.slo.ttft_s if case.bound == "TTFT" else case.slo.tpot_s


def _with_bound(case: Case, bound_s: float) -> SloTarget:
    name = "ttft_s" if case.bound == "TTFT" else "tpot_s"
    return replace(case.slo, **{name: bound_s})


def _scaled(case: Case, factor: float) -> SloTarget:
    return _with_bound(case, factor * _bound_s(case))


if __name__ == "__main__":
    raise SystemExit(main())
