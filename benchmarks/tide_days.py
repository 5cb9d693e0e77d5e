"""Days of calls for `benchmarks.tide`: their work, and what engines keep of them.

The table of what is kept is made by light engines behind the shipped router; `run_light` runs a
stretch on them, call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchrun.estimator.engine_capacity import (
    CallLengths,
    EngineRoom,
    EngineTrial,
    FleetCapacity,
    Promise,
    fleet_capacity,
)
from batchrun.estimator.step_time import RooflineModel
from batchrun.routing.engine_book import EngineBook, EngineTraits, Prices
from batchrun.routing.routers import DEFAULT_ROUTER, make_router
from batchrun.simulator.traces.rates import RateSeries
from batchrun.simulator.traces.reading import read_rates
from benchmarks import light_engines
from benchmarks.data import ARRIVALS
from benchmarks.forecast import DAY_S, SERVEGEN
from benchmarks.light_engines import LightCall, LightEngine, advance
from benchmarks.routed_calls import chain, poisson
from benchmarks.scenarios import read_table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BIN_S = 20.0
BINS_A_MINUTE, PEAK_BINS = 3, 15
START_S, DRAIN_S = 180.0, 40.0
PEAK_ENGINES, MOST_ENGINES = 16, 24
NUM_DAYS = 6
PROMISE = Promise(1.0, 0.05, 0.99)
PRICES = Prices()
TABLE_SIZES = (1, 4, 16)
TABLE_SHARES = (0.6, 0.72, 0.8, 0.86, 0.92, 1.0)
LIGHT_WARM_S = 20.0


@cache
def lengths() -> CallLengths:
    """Of Azure's conversations; nothing is shared."""
    table = read_table(ARRIVALS)
    prompts, outputs = (np.array(table[f"{name}_tokens"]) for name in ("prompt", "output"))
    return CallLengths(prompts, np.zeros_like(prompts), np.maximum(2, outputs))


def work_of(calls: CallLengths) -> Floats:
    """Engine-seconds that each call adds to steps, by an engine's prices."""
    return PRICES.added_s(calls.prompt_tokens, calls.cached_tokens, calls.output_tokens)


def profile(seed: int | None = None) -> RooflineModel:
    """The law of light engines; with a seed each coefficient is off by 5 % (one deviation)."""
    off = np.ones(5) if seed is None else np.exp(np.random.default_rng(seed).normal(0, 0.05, 5))
    law = [light_engines.OVERHEAD_S, light_engines.TOKEN_S, light_engines.PAIR_S]
    law += [light_engines.WEIGHTS_S, light_engines.CONTEXT_S]
    base_s, token_s, pair_s, weights_s, context_s = (off * np.array(law)).tolist()
    return RooflineModel(
        base_s=base_s,
        token_s=token_s,
        pair_s=pair_s,
        weights_s=weights_s,
        context_s=context_s,
        unhidden=light_engines.OVERLAP_LOSS,
    )


def capacity_by(model: RooflineModel) -> FleetCapacity:
    """What `follows` believes that fleets hold."""
    trial = EngineTrial(model, EngineRoom(), lengths(), PROMISE)
    return fleet_capacity(trial, float(work_of(lengths()).mean()), MOST_ENGINES)


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Arrivals in seconds, lengths, and work."""

    at_s: Floats
    lengths: CallLengths
    work_s: Floats

    def between(self, start_s: float, end_s: float) -> Calls:
        """Those of a stretch."""
        places = np.arange(*np.searchsorted(self.at_s, (start_s, end_s)))
        return Calls(self.at_s[places], self.lengths.take(places), self.work_s[places])

    def by_bin(self, num_bins: int) -> tuple[Floats, Floats]:
        """Work a second, and calls, of each bin."""
        bins = np.minimum((self.at_s / BIN_S).astype(np.int64), num_bins - 1)
        work = np.bincount(bins, self.work_s, num_bins) / BIN_S
        return work, np.bincount(bins, minlength=num_bins).astype(np.float64)


def with_lengths(at_s: Floats, rng: np.random.Generator) -> Calls:
    """Calls at these times with lengths of Azure's."""
    drawn = lengths().take(rng.integers(len(lengths()), size=len(at_s)))
    return Calls(at_s, drawn, work_of(drawn))


def run_light(calls: Calls, replicas: Sequence[int], step_s: float, start_s: float = 0.0) -> Floats:
    """Whether each call keeps its bounds (1 or 0), where so many engines get calls in each step of
    the time from `start_s`; those that get none any more end what they have."""
    engines = [LightEngine(number) for number in range(max(replicas))]
    router = make_router(DEFAULT_ROUTER, EngineBook.of([EngineTraits()] * len(engines)), 0)
    columns = (calls.at_s - start_s, calls.lengths.prompt_tokens, calls.lengths.output_tokens)
    made = [
        LightCall(at_s, prompt, output, chain([((1 << 62) | number, prompt)]))
        for number, (at_s, prompt, output) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    ]
    for call in made:
        at_s = call.arrival_at_s
        advance(engines, router, at_s)
        num = replicas[min(int(at_s / step_s), len(replicas) - 1)]
        call.engine = router.rank(call.seen, range(num), at_s + 1.0)[0]
        call.sent = router.sent(call.seen, call.engine, at_s + 1.0)
        engines[call.engine].waiting.append(call)
    advance(engines, router, len(replicas) * step_s + DRAIN_S)
    return np.array([_is_kept(call) for call in made], np.float64)


def _is_kept(call: LightCall) -> bool:
    tpot_s = (call.end_at_s - call.first_token_at_s) / max(call.output_tokens - 1, 1)
    is_soon = call.first_token_at_s - call.arrival_at_s <= PROMISE.ttft_s
    return is_soon and tpot_s <= PROMISE.tpot_s


@dataclass(frozen=True, slots=True, eq=False)
class KeptTable:
    """The share of a bin's calls that keep their bounds, by the work of each of its engines: for
    some numbers of engines a falling line through means; between them, by the logarithm."""

    full: float
    """Work a second of an engine that never stops."""
    grid: Floats
    kept: Floats
    """A row for each of `TABLE_SIZES`."""

    def of(self, num_engines: Ints, work: Floats) -> Floats:
        """For each bin; `work` is each engine's."""
        at = np.interp(
            np.log(np.maximum(num_engines, 1)), np.log(TABLE_SIZES), range(len(self.kept))
        )
        low = np.floor(at).astype(np.int64)
        high = np.minimum(low + 1, len(self.kept) - 1)
        rows = np.array([np.interp(work, self.grid, row) for row in self.kept])
        each = np.arange(len(work))
        found: Floats = rows[low, each] + (at - low) * (rows[high, each] - rows[low, each])
        return found

    def holds(self, num_engines: int) -> float:
        """The work a second that so many engines hold together at the target."""
        work = np.linspace(0, self.full, 500)
        kept = self.of(np.full(500, num_engines), work)
        return num_engines * float(work[np.flatnonzero(kept >= PROMISE.target)[-1]])


@cache
def kept_table() -> KeptTable:
    """By light engines under steady loads; bins of all runs are pooled by their work."""
    usual = float(work_of(lengths()).mean())
    full = usual / EngineTrial(profile(), EngineRoom(), lengths(), PROMISE).least_s
    grid = np.array(np.arange(0.3, 1.3, 0.025) * full, np.float64)
    rows: list[Floats] = []
    for size in TABLE_SIZES:
        sums = np.zeros((2, len(grid)))
        for number, share in enumerate(TABLE_SHARES):
            run_s = LIGHT_WARM_S + max(80.0, 640.0 / size)
            rng = np.random.default_rng((size, number))
            calls = with_lengths(poisson(rng, share * full * size / usual, run_s), rng)
            num_bins = int(run_s / BIN_S)
            kept = run_light(calls, [size] * num_bins, BIN_S)
            work, num = calls.by_bin(num_bins)
            bins = np.minimum((calls.at_s / BIN_S).astype(np.int64), num_bins - 1)
            num_kept = np.bincount(bins, kept, num_bins)
            for i in range(round(LIGHT_WARM_S / BIN_S), num_bins):
                place = int(np.argmin(np.abs(grid - work[i] / size)))
                sums[:, place] += num_kept[i], num[i]
        known = sums[1] > 0
        rows.append(np.interp(grid, grid[known], falling(*sums[:, known]), left=1.0, right=0.0))
    return KeptTable(full, grid, np.array(rows, np.float64))


def falling(kept: Floats, num: Floats) -> Floats:
    """Shares kept / num as a falling line: neighbours that rise are pooled."""
    pools: list[tuple[float, float, int]] = []
    for each in zip(kept.tolist(), num.tolist(), strict=True):
        pools.append((*each, 1))
        while len(pools) > 1 and pools[-1][0] * pools[-2][1] > pools[-2][0] * pools[-1][1]:
            last, before = pools.pop(), pools.pop()
            pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    return np.concatenate([np.full(size, part / whole) for part, whole, size in pools])


@dataclass(frozen=True, slots=True, eq=False)
class Day:
    """The day before and the day that is judged: work a second and calls in each bin of both, and
    the calls of the second."""

    name: str
    before: Floats
    work: Floats
    num_calls: Floats
    calls: Calls


def make_day(data: Path, seed: int) -> Day:
    """Day 1 to 6 of ServeGen's by the seed, and the one before, thinned until the busiest five
    minutes fill so many engines."""
    number = 1 + seed % NUM_DAYS
    clients = read_rates(data / SERVEGEN)
    usual = float(work_of(lengths()).mean())
    wanted = kept_table().holds(PEAK_ENGINES)
    rng = np.random.default_rng((seed, 7))
    factor = wanted / (_rates_of(clients, number).max() * usual)
    times_s = [_draw(clients, day, factor, rng) for day in (number - 1, number)]
    peak_s = PEAK_BINS * BIN_S
    ends = np.searchsorted(times_s[1], times_s[1] + peak_s)
    most = float((ends - np.arange(len(ends))).max()) * usual / peak_s
    drawn = [with_lengths(at_s[rng.random(len(at_s)) < wanted / most], rng) for at_s in times_s]
    num_bins = round(DAY_S / BIN_S)
    before, _ = drawn[0].by_bin(num_bins)
    return Day(f"servegen-{number}", before, *drawn[1].by_bin(num_bins), drawn[1])


def _rates_of(clients: Sequence[RateSeries], day: int) -> Floats:
    """Calls a second of all clients in each ten minutes."""
    starts_s = day * DAY_S + np.arange(0, DAY_S, 600.0)
    total = np.zeros(len(starts_s))
    for client in clients:
        places = np.searchsorted(client.edges_s, starts_s, side="right") - 1
        rates = np.append(client.windows["rate_per_s"].to_numpy(), 0.0)
        total += np.where(places >= 0, rates[places], 0.0)
    return total


def _draw(
    clients: Sequence[RateSeries], day: int, factor: float, rng: np.random.Generator
) -> Floats:
    times_s = [
        client.scaled(factor).between(day * DAY_S, (day + 1) * DAY_S).draw_arrivals(rng)[0]
        for client in clients
        if client.end_s > day * DAY_S
    ]
    found: Floats = np.sort(np.concatenate(times_s))
    return found
