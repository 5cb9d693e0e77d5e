"""Preble's ablation (arXiv 2407.00023, 5.4) step by step: ToolBench, Zipf 1.1, four engines.

    python -m benchmarks.preble_ablation [--rate N ...] [--seeds N ...] [--json FILE]

Each step has what the ones before it have: a fixed partition of prefixes by whoever knows the whole
trace, then E2, then rebalancing and replication, then prefill and decode in balance, then the local
order of waiting calls by their cached part. Light engines, calls of the first 30 s are load.
`moved_share`: calls for which later parts chose another engine than E2 in that moment would have;
`reordered_share`: steps in which the local order let in calls out of turn.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from batchrun.routing.e2 import E2, E2Plain
from batchrun.routing.engine_book import Call, EngineBook, EngineTraits
from batchrun.routing.rankings import RoundRobin
from batchrun.routing.router import Router
from benchmarks.light_engines import LightCall, LightEngine, run
from benchmarks.records import Bar, Record, finish, markdown, parser
from benchmarks.routed_calls import WORKLOADS
from benchmarks.routing import JUDGED_S, REST_S, WARM_S, judged_of, latencies

NUM_ENGINES = 4
NUM_GROUPS = 10
"""Preble's P: calls that wait are grouped by tenths of their prompt that are cached."""
COLUMNS = ("mean_s", "p99_s", "ttft_p50_s", "ttft_p99_s", "prefix_hit_rate")


class Partition(Router):
    """Knows the trace: each deepest prefix that two calls share has an engine, by its hash."""

    def __init__(self, book: EngineBook, rng: random.Random, calls: Sequence[LightCall]) -> None:
        super().__init__(book, rng)
        self._uses = Counter(key for call in calls for key in call.seen.keys.tolist())

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        shared = [key for key in call.keys.tolist() if self._uses[key] > 1]
        home = (shared[-1] if shared else int(call.keys[-1])) % len(engines)
        return [*engines[home:], *engines[:home]]


class E2Watched(E2):
    """Counts the calls for which E2 alone, knowing the same, would have chosen another engine."""

    def __init__(self, book: EngineBook, rng: random.Random) -> None:
        super().__init__(book, rng)
        self.num_moved = 0
        self._plain = copy.copy(self)
        self._plain.rebalances = self._plain.replicates = self._plain.balances_decodes = False

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        plain = E2.rank(self._plain, call, engines, now_s)
        order = super().rank(call, engines, now_s)
        self.num_moved += order[0] != plain[0]
        return order


class E2Moving(E2Watched):
    """Exploit and explore, with rebalancing and replication."""

    balances_decodes = False


class FairEngine(LightEngine):
    """Its waiting calls in Preble's local order: of group g up to g + 1 in each turn, the group
    with the largest cached part first."""

    num_steps = num_reordered = 0

    def step(self) -> None:
        """See `LightEngine`."""
        self.num_steps += 1
        arrived = [*self.waiting]
        if len(self.waiting) > 1:
            groups: list[deque[LightCall]] = [deque() for _ in range(NUM_GROUPS + 1)]
            for call in self.waiting:
                share = self.cached_of(call) / call.prompt_tokens
                groups[int(NUM_GROUPS * share)].append(call)
            self.waiting = deque(_in_turns(groups))
        self.num_reordered += [*self.waiting] != arrived
        super().step()


def _in_turns(groups: Sequence[deque[LightCall]]) -> Iterator[LightCall]:
    while any(groups):
        for group in range(NUM_GROUPS, -1, -1):
            for _ in range(min(group + 1, len(groups[group]))):
                yield groups[group].popleft()


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the table."""

    name: str
    make: Callable[[EngineBook, random.Random, Sequence[LightCall]], Router]
    engine: type[LightEngine] = LightEngine


STEPS = (
    Step("round robin", lambda book, rng, _: RoundRobin(book, rng)),
    Step("1 partition", Partition),
    Step("2 + E2", lambda book, rng, _: E2Plain(book, rng)),
    Step("3 + rebalancing, replication", lambda book, rng, _: E2Moving(book, rng)),
    Step("4 + prefill and decode", lambda book, rng, _: E2Watched(book, rng)),
    Step("5 + local order", lambda book, rng, _: E2Watched(book, rng), FairEngine),
)


def main() -> int:
    """Run, print and save."""
    made = parser(__doc__, seeds=(0, 1))
    made.add_argument("--rate", type=float, nargs="+", default=[60.0, 100.0])
    options = made.parse_args()
    records = [
        measure(step, rate, seed)
        for rate in options.rate
        for seed in options.seeds
        for step in STEPS
    ]
    for rate in options.rate:
        print(f"\n{rate:g} calls/s, means of {len(options.seeds)} seeds\n")
        rows = (
            [step.name, *(_mean(records, step, rate, key) for key in COLUMNS)] for step in STEPS
        )
        print(markdown(["step", *COLUMNS], rows))
    return finish(options.json, records, bars(records, options.rate))


def measure(step: Step, rate_per_s: float, seed: int) -> Record:
    """A flat record of one step on one draw."""
    rng = np.random.default_rng(seed)
    calls = WORKLOADS["toolbench"].draw(rng, rate_per_s, WARM_S + JUDGED_S)
    book = EngineBook.of([EngineTraits()] * NUM_ENGINES)
    engines = [step.engine(number) for number in range(NUM_ENGINES)]
    router = step.make(book, random.Random(seed), calls)
    run(calls, router, engines, WARM_S + JUDGED_S + REST_S)
    return {
        "step": step.name,
        "rate_per_s": rate_per_s,
        "num_engines": NUM_ENGINES,
        "seed": seed,
        "engines": "light",
        **latencies(judged_of(calls)),
        **_shares(router, engines, len(calls)),
    }


def _shares(router: Router, engines: Sequence[LightEngine], num_calls: int) -> Record:
    shares = {}
    if isinstance(router, E2Watched):
        shares["moved_share"] = router.num_moved / num_calls
    if fair := [engine for engine in engines if isinstance(engine, FairEngine)]:
        num_reordered = sum(engine.num_reordered for engine in fair)
        shares["reordered_share"] = num_reordered / sum(engine.num_steps for engine in fair)
    return shares


def bars(records: Sequence[Record], rates: Sequence[float]) -> Iterator[Bar]:
    """Of each step, its mean and p99 over those of the step before: the paper has all below 1."""
    for rate in rates:
        for before, step in pairwise(STEPS[1:]):
            for key in ("mean_s", "p99_s"):
                ratio = _mean(records, step, rate, key) / _mean(records, before, rate, key)
                yield Bar(f"{rate:g}/s, {step.name}: {key} over the step before", ratio)


def _mean(records: Sequence[Record], step: Step, rate: float, key: str) -> float:
    return fmean(
        record[key]
        for record in records
        if (record["step"], record["rate_per_s"]) == (step.name, rate)
    )


if __name__ == "__main__":
    raise SystemExit(main())
