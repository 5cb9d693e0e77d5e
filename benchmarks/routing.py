"""Every router on the same calls: latency, hits, and how many calls a second keep their bounds.

    python -m benchmarks.routing [--workload NAME ...] [--router NAME ...] [--seeds N ...]
                                 [--capacity] [--num-engines N] [--json FILE]

Light engines (`light_engines`) behind one gateway. All routers know the same: what they sent where,
when its first token came and when it ended, the engines' KV size and prices; none knows lengths of
answers, or what an engine holds. Calls of the first 30 s are load, not judged. `--capacity` looks
for the calls/s at which 99 % keep TTFT and TPOT, in steps of 4 %, worst of the seeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from batchrun.routing.engine_book import EngineBook, EngineTraits
from batchrun.routing.routers import DEFAULT_ROUTER, ROUTERS, make_router
from benchmarks.light_engines import LightCall, LightEngine, run
from benchmarks.records import Bar, Record, finish, markdown, parser
from benchmarks.routed_calls import WORKLOADS, Workload

NUM_PROCESSES = 2
WARM_S, JUDGED_S, REST_S = 30.0, 70.0, 30.0
KEPT = 0.99
STEP = 1.04
LEAST_CAPACITY = {"toolbench": 1.6, "loogle": 4.0, "nextqa": 1.6, "azure": 0.98}
"""Capacity of the shipped router over that of `least`."""
RIVALS = tuple(name for name in ROUTERS if name not in {DEFAULT_ROUTER, "random", "rr"})
COLUMNS = ("mean_s", "p99_s", "ttft_p50_s", "ttft_p99_s", "prefix_hit_rate", "kept", "decision_us")


@dataclass(frozen=True, slots=True)
class Trial:
    """One router on one draw of one workload."""

    workload: str
    router: str
    seed: int
    rate_per_s: float
    num_engines: int


def main() -> int:
    """Run, print and save."""
    options = _parser().parse_args()
    measure = capacity if options.capacity else at_rate
    trials = [
        Trial(name, router, seed, WORKLOADS[name].rate_per_s, options.num_engines)
        for name in options.workload
        for router in options.router
        for seed in options.seeds
    ]
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        records = pool.map(measure, trials, chunksize=1)
    for name in options.workload:
        of_it = [record for record in records if record["workload"] == name]
        print(f"\n{name}, means of {len(options.seeds)} seeds\n")
        columns = ("capacity_per_s",) if options.capacity else ("rate_per_s", *COLUMNS)
        rows = [[router, *(_mean(of_it, router, key) for key in columns)] for router in _of(of_it)]
        print(markdown(["router", *columns], rows))
    judge = _capacity_bars if options.capacity else _latency_bars
    return finish(options.json, records, judge(records))


def at_rate(trial: Trial) -> Record:
    """A flat record of one run at the workload's own rate, near its knee."""
    calls, decision_s = _run(trial, trial.rate_per_s)
    judged = judged_of(calls)
    return {
        **_of_trial(trial),
        "rate_per_s": trial.rate_per_s,
        **latencies(judged),
        "kept": _kept(WORKLOADS[trial.workload], judged),
        "decision_us": 1e6 * decision_s / len(calls),
    }


def judged_of(calls: Sequence[LightCall]) -> list[LightCall]:
    """Those that are not load alone."""
    return [call for call in calls if WARM_S <= call.arrival_at_s < WARM_S + JUDGED_S]


def latencies(judged: Sequence[LightCall]) -> Record:
    """How long calls took, in seconds, and the cached part of their prompts; one that has not ended
    took until the end of the run."""
    end_s = WARM_S + JUDGED_S + REST_S
    whole_s = np.array([min(call.end_at_s, end_s) - call.arrival_at_s for call in judged])
    ttft_s = np.array([min(call.first_token_at_s, end_s) - call.arrival_at_s for call in judged])
    prompt_tokens = sum(call.prompt_tokens for call in judged)
    return {
        "calls": len(judged),
        "mean_s": float(whole_s.mean()),
        "p99_s": float(np.percentile(whole_s, 99)),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "prefix_hit_rate": sum(call.cached_tokens for call in judged) / prompt_tokens,
    }


def capacity(trial: Trial) -> Record:
    """The most calls/s that keep their bounds, between a fifth and five times the usual rate."""

    def keeps(rate_per_s: float) -> bool:
        calls, _ = _run(trial, rate_per_s)
        return _kept(WORKLOADS[trial.workload], judged_of(calls)) >= KEPT

    low, high = trial.rate_per_s / 5, trial.rate_per_s * 5
    while high / low > STEP:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return {**_of_trial(trial), "capacity_per_s": low}


def _run(trial: Trial, rate_per_s: float) -> tuple[Sequence[LightCall], float]:
    """The calls as they went, and the CPU seconds of all decisions."""
    rng = np.random.default_rng(trial.seed)
    calls = WORKLOADS[trial.workload].draw(rng, rate_per_s, WARM_S + JUDGED_S)
    book = EngineBook.of([EngineTraits()] * trial.num_engines)
    router = make_router(trial.router, book, trial.seed)
    engines = [LightEngine(number) for number in range(trial.num_engines)]
    return calls, run(calls, router, engines, WARM_S + JUDGED_S + REST_S)


def _of_trial(trial: Trial) -> Record:
    return {
        "workload": trial.workload,
        "router": trial.router,
        "is_default": trial.router == DEFAULT_ROUTER,
        "num_engines": trial.num_engines,
        "seed": trial.seed,
        "engines": "light",
    }


def _kept(workload: Workload, calls: Sequence[LightCall]) -> float:
    """The share of the calls that keep both bounds; one that has not ended keeps neither."""
    return fmean(
        call.first_token_at_s - call.arrival_at_s <= workload.ttft_s
        and call.end_at_s - call.first_token_at_s
        <= workload.tpot_s * max(call.output_tokens - 1, 1)
        for call in calls
    )


def _of(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["router"] for record in records))


def _mean(records: Sequence[Record], router: str, key: str) -> float:
    return fmean(record[key] for record in records if record["router"] == router)


def _capacity_bars(records: Sequence[Record]) -> Iterator[Bar]:
    for name in dict.fromkeys(record["workload"] for record in records):
        of_it = [record for record in records if record["workload"] == name]
        if not {DEFAULT_ROUTER, "least"} <= set(_of(of_it)):
            continue
        ours, least = (
            _mean(of_it, router, "capacity_per_s") for router in (DEFAULT_ROUTER, "least")
        )
        yield Bar(f"{name}: capacity over that of least", ours / least, LEAST_CAPACITY.get(name))
        if name == "loogle" and "llm-d" in _of(of_it):
            rival = _mean(of_it, "llm-d", "capacity_per_s")
            yield Bar("loogle: capacity over that of llm-d", ours / rival, 1.4)


def _latency_bars(records: Sequence[Record]) -> Iterator[Bar]:
    for name in dict.fromkeys(record["workload"] for record in records):
        of_it = [record for record in records if record["workload"] == name]
        rivals = [router for router in RIVALS if router in _of(of_it)]
        if DEFAULT_ROUTER not in _of(of_it) or not rivals:
            continue
        best = min(rivals, key=lambda router: _mean(of_it, router, "mean_s"))
        ratio = _mean(of_it, DEFAULT_ROUTER, "mean_s") / _mean(of_it, best, "mean_s")
        yield Bar(f"{name}: mean over that of the best rival, {best}", ratio, 1.05, is_most=True)


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, seeds=(0, 1, 2), capacity=False, num_engines=4)
    made.add_argument("--workload", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    made.add_argument("--router", choices=ROUTERS, nargs="+", default=list(ROUTERS))
    return made


if __name__ == "__main__":
    raise SystemExit(main())
