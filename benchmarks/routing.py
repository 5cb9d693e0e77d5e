"""Every router on the same calls: latency, hits, and how many calls a second keep their bounds.

    python -m benchmarks.routing [--workload NAME ...] [--router NAME ...] [--seeds N ...]
                                 [--rate R] [--capacity] [--shipped] [--beside] [--num-engines N]
                                 [--workers N] [--gateways N] [--evictions]
                                 [--setting NAME=VALUE] [--json FILE]

Light engines (`light_engines`), or with `--shipped` those of the simulator, behind one gateway. All
routers know the same: what they sent where, when its first token came and when it ended, the
engines' KV size and prices; none knows lengths of answers, or what an engine holds. Calls of the
first 30 s are load, not judged. `--rate` takes the place of each workload's own calls/s. `--beside`
is `--shipped` with a job of documents in the same engines, `--setting` one of `PluginSettings` that
these are given, as `online_cost=1.3`. `--capacity` looks for the calls/s at which 99 % keep TTFT
and TPOT, in steps of 4 %.

That gateway has one worker; others can have the same calls too. `--workers N`: one with N workers,
to which calls come at random, and which share a book as `SharedBook` has it. `--gateways N`: so
many, which share nothing. `--evictions`: one that engines tell what they evict, at once and
exactly, and that guesses no evictions itself.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np

from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.engine_book import FIELDS, Call, EngineBook, EngineTraits, Sent
from batchrun.routing.prefix_map import Arrays, Held, PrefixMap
from batchrun.routing.router import Router
from batchrun.routing.routers import DEFAULT_ROUTER, ROUTERS, make_router
from batchrun.server.gateway.shared_book import NUM_PIECES
from benchmarks.light_engines import LightCall, LightEngine, Report, ReportingEngine, run
from benchmarks.records import Bar, Record, finish, grouped, markdown, parser
from benchmarks.routed_calls import WORKLOADS, Workload
from benchmarks.routing_shipped import PLAN, Beside, run_shipped

NUM_PROCESSES = 2
WARM_S, JUDGED_S, REST_S = 30.0, 70.0, 30.0
KEPT = 0.99
STEP = 1.04
LEAST_CAPACITY = {"toolbench": 1.6, "loogle": 4.0, "nextqa": 1.6, "azure": 0.98}
"""Capacity of the shipped router over that of `least`."""
RIVALS = tuple(name for name in ROUTERS if name not in {DEFAULT_ROUTER, "random", "rr"})
COLUMNS = ("mean_s", "p99_s", "ttft_p50_s", "ttft_p99_s", "prefix_hit_rate", "kept", "decision_us")
OFFLINE = "offline_tokens_per_s"
TABLE = ("capacity_per_s", "rate_per_s", *COLUMNS, OFFLINE)
MOST_OF_ONE_WORKER = 1.1
"""The mean latency with several workers over that with one."""
ASKED = {
    ("toolbench", 60.0, False): {"mean_s": 0.8, "prefix_hit_rate": 10.0},
    ("toolbench", 40.0, True): {OFFLINE: 1.0, "mean_s": 0.95, "prefix_hit_rate": 8.0},
    ("sharegpt", WORKLOADS["sharegpt"].rate_per_s, False): {"mean_s": 1.03, "p99_s": 1.05},
}
"""By workload, calls/s, and whether that is beside a job: what figures of the shipped router may be
of those of `least`, offline tokens and hits at least; of hits these are points more."""


@dataclass(frozen=True, slots=True)
class Front:
    """The gateways before the engines, all alike, and what they are told."""

    num_gateways: int = 1
    num_workers: int = 1
    knows_evictions: bool = False

    def __str__(self) -> str:
        told = ", told of evictions" if self.knows_evictions else ""
        return f"{self.num_gateways} x {self.num_workers}{told}"


ONE = Front()


@dataclass(frozen=True, slots=True)
class Trial:
    """One router on one draw of one workload."""

    workload: str
    front: Front
    router: str
    seed: int
    rate_per_s: float
    num_engines: int
    is_shipped: bool = False
    is_beside_job: bool = False
    setting: str = ""


class ToldMap(PrefixMap):
    """Forgets what it is told that an engine has evicted, and nothing else."""

    def answered(
        self, engine: int, keys: KeyArray, before: Held, now_s: float, num_cached: float | None
    ) -> None:
        """See `PrefixMap`; there is nothing to learn."""
        super().answered(engine, keys, before, now_s, None)

    def forget(self, engine: int, keys: KeyArray) -> None:
        """The engine no longer holds these pieces."""
        places, is_known, _ = self._find(keys)
        self._used_at_s[engine, places[is_known]] = -1.0

    def _num_fitting(self, room_pieces: float) -> int:
        return len(self._keys)


class Doors(Router):
    """Workers, each with a router of its own; any of them takes the next call."""

    def __init__(self, workers: Sequence[Router], rng: random.Random) -> None:
        super().__init__(workers[0].book, rng)
        self._workers = workers
        self._next = workers[0]
        self._worker_of: dict[Sent, Router] = {}

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        self._next = self.rng.choice(self._workers)
        return self._next.rank(call, engines, now_s)

    def sent(self, call: Call, engine: int, now_s: float, *, in_line: bool = True) -> Sent:
        """See `Router`."""
        sent = self._next.sent(call, engine, now_s, in_line=in_line)
        self._worker_of[sent] = self._next
        return sent

    def first_token(self, sent: Sent, now_s: float) -> None:
        """See `Router`."""
        self._worker_of[sent].first_token(sent, now_s)

    def ended(
        self,
        sent: Sent,
        now_s: float,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """See `Router`."""
        self._worker_of.pop(sent).ended(sent, now_s, cached_tokens, output_tokens)


def main() -> int:
    """Run, print and save."""
    options = _options()
    measure = capacity if options.capacity else at_rate
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        records = pool.map(measure, _trials(options), chunksize=1)
    columns = [key for key in TABLE if key in records[0]]
    for name in options.workload:
        print(f"\n{name}, means of {len(options.seeds)} seeds\n")
        rows = [
            [str(front), router, *(_mean(of_it, router, key) for key in columns)]
            for front, of_it in _by_front(_where(records, workload=name))
            for router in _of(of_it)
        ]
        print(markdown(["gateways x workers", "router", *columns], rows))
    return finish(options.json, records, _bars(records))


def _trials(options: argparse.Namespace) -> list[Trial]:
    fronts = [ONE, Front(num_workers=options.workers), Front(num_gateways=options.gateways)]
    fronts += [Front(knows_evictions=True)] if options.evictions else []
    is_shipped = options.shipped or options.beside
    engines = options.num_engines, is_shipped, options.beside, options.setting
    return [
        Trial(name, front, router, seed, options.rate or WORKLOADS[name].rate_per_s, *engines)
        for name in options.workload
        for front in dict.fromkeys(fronts)
        for router in options.router
        for seed in options.seeds
    ]


def at_rate(trial: Trial) -> Record:
    """A flat record of one run at the workload's own rate, near its knee, or the one asked for."""
    calls, figures = _run(trial, trial.rate_per_s)
    judged = judged_of(calls)
    return {
        **_of_trial(trial),
        "rate_per_s": trial.rate_per_s,
        **latencies(judged),
        "kept": _kept(WORKLOADS[trial.workload], judged),
        **figures,
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
        calls, _ = _run(trial, rate_per_s, may_stop=True)
        return _kept(WORKLOADS[trial.workload], judged_of(calls)) >= KEPT

    low, high = trial.rate_per_s / 5, trial.rate_per_s * 5
    while high / low > STEP:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return {**_of_trial(trial), "capacity_per_s": low}


def _run(
    trial: Trial, rate_per_s: float, *, may_stop: bool = False
) -> tuple[Sequence[LightCall], Record]:
    """The calls as they went, and what else is told of the run. It `may_stop` as soon as too many
    calls have missed a bound; light engines never do."""
    workload, end_s = WORKLOADS[trial.workload], WARM_S + JUDGED_S + REST_S
    calls = workload.draw(np.random.default_rng(trial.seed), rate_per_s, WARM_S + JUDGED_S)
    books = _books(trial)
    router, report = _router(trial, books), _report(books)
    if not trial.is_shipped:
        decision_s = run(calls, router, _light_engines(trial.num_engines, report), end_s)
        return calls, {"decision_us": 1e6 * decision_s / len(calls)}
    judged = judged_of(calls)

    def is_lost(now_s: float) -> bool:
        missed = sum(_has_missed(workload, call, now_s) for call in judged)
        return missed > (1 - KEPT) * len(judged)

    served = run_shipped(
        calls,
        router,
        (WARM_S, WARM_S + JUDGED_S, end_s),
        beside=Beside(trial.seed if trial.is_beside_job else None, trial.setting),
        is_lost=is_lost if may_stop else None,
        report=report,
    )
    return calls, {OFFLINE: (served[1] - served[0]) / JUDGED_S} if trial.is_beside_job else {}


def _books(trial: Trial) -> list[EngineBook]:
    """One for each worker: in a gateway they lie in the same arrays."""
    front, num_engines = trial.front, trial.num_engines
    traits = PLAN.traits if trial.is_shipped else EngineTraits()
    kind = ToldMap if front.knows_evictions else PrefixMap
    books: list[EngineBook] = []
    for _ in range(front.num_gateways):
        arrays = Arrays.private(NUM_PIECES, num_engines)
        loads = np.zeros((front.num_workers, num_engines, len(FIELDS)))
        books += [EngineBook(kind(arrays), loads, worker) for worker in range(front.num_workers)]
    for book in books:
        for engine in range(num_engines):
            book.introduce(engine, traits)
    return books


def _router(trial: Trial, books: Sequence[EngineBook]) -> Router:
    seeds = range(trial.seed, trial.seed + len(books))
    workers = [make_router(trial.router, *each) for each in zip(books, seeds, strict=True)]
    return workers[0] if len(workers) == 1 else Doors(workers, random.Random(trial.seed))


def _report(books: Sequence[EngineBook]) -> Report | None:
    """Who forgets what engines evict; None where nobody is told."""
    told = [book.prefixes for book in books if isinstance(book.prefixes, ToldMap)]

    def report(engine: int, keys: KeyArray) -> None:
        for prefixes in told:
            prefixes.forget(engine, keys)

    return report if told else None


def _light_engines(num: int, report: Report | None) -> list[LightEngine]:
    return [
        LightEngine(number) if report is None else ReportingEngine(number, report)
        for number in range(num)
    ]


def _of_trial(trial: Trial) -> Record:
    return {
        "workload": trial.workload,
        "router": trial.router,
        "is_default": trial.router == DEFAULT_ROUTER,
        "num_engines": trial.num_engines,
        "seed": trial.seed,
        "engines": "shipped" if trial.is_shipped else "light",
        "is_beside_job": trial.is_beside_job,
        **({"setting": trial.setting} if trial.setting else {}),
        **asdict(trial.front),
    }


def _has_missed(workload: Workload, call: LightCall, now_s: float) -> bool:
    """Whether a call has missed one of its bounds by now."""
    first_s, end_s = min(call.first_token_at_s, now_s), min(call.end_at_s, now_s)
    if first_s - call.arrival_at_s > workload.ttft_s:
        return True
    most_s = workload.tpot_s * max(call.output_tokens - 1, 1)
    return end_s - call.first_token_at_s > most_s


def _kept(workload: Workload, calls: Sequence[LightCall]) -> float:
    """The share of the calls that keep both bounds; one that has not ended keeps neither."""
    return fmean(not _has_missed(workload, call, math.inf) for call in calls)


def _where(records: Sequence[Record], **values: object) -> list[Record]:
    return [each for each in records if all(each[key] == values[key] for key in values)]


def _by_front(records: Sequence[Record]) -> Iterator[tuple[Front, list[Record]]]:
    for values, of in grouped(records, *Front.__dataclass_fields__).items():
        yield Front(*values), of


def _of(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["router"] for record in records))


def _mean(records: Sequence[Record], router: str, key: str) -> float:
    return fmean(record[key] for record in _where(records, router=router))


def _bars(records: Sequence[Record]) -> Iterator[Bar]:
    for (name,), of in grouped(records, "workload").items():
        fronts = dict(_by_front(of))
        alone = fronts.pop(ONE)
        if "capacity_per_s" in alone[0]:
            yield from _capacity_bars(name, alone)
        else:
            yield from _latency_bars(name, alone)
            yield from _least_bars(name, alone)
        for front, of_it in fronts.items():
            yield from _front_bars(f"{name}, {front}", front, of_it, alone)


def _capacity_bars(name: str, of_it: Sequence[Record]) -> Iterator[Bar]:
    if not {DEFAULT_ROUTER, "least"} <= set(_of(of_it)):
        return
    ours, least = (_mean(of_it, router, "capacity_per_s") for router in (DEFAULT_ROUTER, "least"))
    yield Bar(f"{name}: capacity over that of least", ours / least, LEAST_CAPACITY.get(name))
    if name == "loogle" and "llm-d" in _of(of_it):
        rival = _mean(of_it, "llm-d", "capacity_per_s")
        yield Bar("loogle: capacity over that of llm-d", ours / rival, 1.4)


def _latency_bars(name: str, of_it: Sequence[Record]) -> Iterator[Bar]:
    rivals = [router for router in RIVALS if router in _of(of_it)]
    if DEFAULT_ROUTER not in _of(of_it) or not rivals:
        return
    best = min(rivals, key=lambda router: _mean(of_it, router, "mean_s"))
    ratio = _mean(of_it, DEFAULT_ROUTER, "mean_s") / _mean(of_it, best, "mean_s")
    yield Bar(f"{name}: mean over that of the best rival, {best}", ratio, 1.05, is_most=True)


def _least_bars(name: str, of_it: Sequence[Record]) -> Iterator[Bar]:
    """What is asked of the shipped router against `least` on these calls."""
    asked = ASKED.get((name, of_it[0]["rate_per_s"], of_it[0]["is_beside_job"]), {})
    if not {DEFAULT_ROUTER, "least"} <= set(_of(of_it)):
        return
    for key, bound in asked.items():
        ours, least = (_mean(of_it, router, key) for router in (DEFAULT_ROUTER, "least"))
        if key == "prefix_hit_rate":
            yield Bar(f"{name}: hits more than with least, points", 100 * (ours - least), bound)
        else:
            title = f"{name}: {key} over that of least"
            yield Bar(title, ours / least, bound, is_most=key != OFFLINE)


def _front_bars(
    name: str, front: Front, of_it: Sequence[Record], alone: Sequence[Record]
) -> Iterator[Bar]:
    """Other gateways against the one with one worker; of these only workers have a bound."""
    keys = [key for key in ("capacity_per_s", "mean_s", OFFLINE) if key in of_it[0]]
    for router in _of(of_it):
        is_asked = router == DEFAULT_ROUTER and front.num_workers > 1
        for key in keys:
            ratio = _mean(of_it, router, key) / _mean(alone, router, key)
            bound = MOST_OF_ONE_WORKER if is_asked and key == "mean_s" else None
            yield Bar(f"{name}: {key} of {router} over one worker's", ratio, bound, is_most=True)


def _options() -> argparse.Namespace:
    flags = dict.fromkeys(("capacity", "shipped", "beside", "evictions"), False)
    sizes = {"rate": 0.0, "num_engines": 4, "workers": 1, "gateways": 1}
    made = parser(__doc__, seeds=(0, 1, 2), setting="", **sizes, **flags)
    made.add_argument("--workload", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    made.add_argument("--router", choices=ROUTERS, nargs="+", default=list(ROUTERS))
    options = made.parse_args()
    if options.capacity and options.beside:
        made.error("--capacity is that of calls alone")
    if options.setting and not (options.shipped or options.beside):
        made.error("--setting is for the engines of --shipped and --beside")
    if options.setting and "=" not in options.setting:
        made.error("--setting takes NAME=VALUE")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
