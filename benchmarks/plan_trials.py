"""The planner's step 1 against answers that are known by construction.

    python -m benchmarks.plan_trials [--trials 50] [--json FILE]

A trial's trace is bursts of identical calls at one instant, far enough apart that engines are idle
when the next comes. A single virtual engine tells how many calls of a burst it serves within the
bounds: k, and no number from k + 1 to 2k. The bound, of TTFT or TPOT in turn, lies half way between
what the slowest of k and the slowest of k + 1 calls got.

Then n = ceil(m / k) is the smallest number of engines for bursts of m calls. It is enough, since
the gateway gives each call to the engine with the fewest. One fewer is not: some engine then gets
k + 1 or more of every burst, and one late call in m < 100 is more than the 1 % which may be late.

Each trial also asks for a larger burst, for a looser and a tighter bound, and for a bound that one
call alone misses: the answers must be the known one, no larger, no smaller, and "impossible".
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass, replace

import numpy as np

from batchrun.config import STOCK_POLICY
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.planner.fleet import Fleet, peak_load, size_fleet
from batchrun.simulator.planner.kinds import EngineKind, SloTarget
from batchrun.simulator.traces.trace import Trace
from batchrun.simulator.virtual.engine import Arrival, VirtualEngine
from batchrun.simulator.virtual.setup import stock_scheduler
from benchmarks.records import Bar, Record, finish, parser, shown

MOST_ENGINES, MOST_HELD = 9, 7
NO_BOUND_S = 1_000.0
HEAVY_BURSTS = 3
ENGINE = EnginePlan(policy=STOCK_POLICY)


@dataclass(frozen=True, slots=True)
class Case:
    """`num_calls` at once, of these lengths; an engine holds `held` of them within `bound_s`, which
    is of the TTFT or the TPOT, as `bound` says."""

    num_prompt_tokens: int
    num_output_tokens: int
    held: int
    num_calls: int
    bound: str
    bound_s: float
    alone_s: float
    period_s: float

    @property
    def known(self) -> int:
        """The smallest number of engines."""
        return math.ceil(self.num_calls / self.held)

    @property
    def slo(self) -> SloTarget:
        """The other bound is far."""
        is_ttft = self.bound == "TTFT"
        ttft_s, tpot_s = (self.bound_s, NO_BOUND_S) if is_ttft else (NO_BOUND_S, self.bound_s)
        return SloTarget(ttft_s, tpot_s)

    def scaled(self, factor: float) -> Case:
        """With another bound."""
        return replace(self, bound_s=factor * self.bound_s)


def main() -> int:
    """Run the trials, print and save them; exit code 1 when one of them fails."""
    options = parser(__doc__, trials=50).parse_args()
    records = shown(trial(seed) for seed in range(options.trials))
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
    looser = planned(case.scaled(rng.uniform(1.05, 2.0))).num_engines
    least = case.alone_s / case.bound_s
    factor = max(rng.uniform(0.6, 0.98), 1.001 * least)
    tighter = planned(case.scaled(min(factor, 1.0))).num_engines
    infeasible = planned(case.scaled(0.95 * least))
    num = found.num_engines or 0
    return {
        "seed": seed,
        **asdict(case),
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
    """Step 1 on two bursts of half the size, the heavy ones, and another half."""
    half = max(1, case.num_calls // 2)
    sizes = [half, half, *[case.num_calls] * HEAVY_BURSTS, half]
    at_s = np.repeat(np.arange(len(sizes)) * case.period_s, sizes)
    lengths = np.ones(len(at_s), np.int64)
    trace = Trace.of(at_s, lengths * case.num_prompt_tokens, lengths * case.num_output_tokens)
    load = peak_load(trace, (HEAVY_BURSTS - 0.5) * case.period_s, case.slo)
    return size_fleet(load, EngineKind("a100-8b", ENGINE), case.slo, 128)


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
    period_s = 2 * worst[-1][2] + 1.0
    return Case(*lengths, held, min(num_calls, 99), bound, bound_s, values[0], period_s)


def slowest(num_calls: int, num_prompt_tokens: int, num_output_tokens: int) -> tuple[float, ...]:
    """The largest TTFT, the largest TPOT and the last end of a burst on one idle engine."""
    engine = VirtualEngine(
        stock_scheduler(ENGINE.timing.steps_in_flight), ENGINE.shape, ENGINE.law, (), ENGINE.timing
    )
    for number in range(num_calls):
        prompt = [5 + (7 * number + place) % 1_900 for place in range(num_prompt_tokens)]
        engine.add(Arrival(f"call-{number}", True, 0.0, prompt, num_output_tokens, None))
    engine.run_until(math.inf)
    times_s = np.array([record.token_times_s for record in engine.records.values()])
    first_s, last_s = times_s[:, 0], times_s[:, -1]
    tpots_s = (last_s - first_s) / (num_output_tokens - 1)
    return float(first_s.max()), float(tpots_s.max()), float(last_s.max())


if __name__ == "__main__":
    raise SystemExit(main())
