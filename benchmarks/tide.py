"""Replicas that follow the tide of a day, against a fixed fleet and one that knows the day.

    python -m benchmarks.tide [--seeds N ...] [--data FOLDER] [--light-s SECONDS] [--json FILE]

A day is one of ServeGen's, days 1 to 6 of its clients with their gaps, drawn anew by the seed and
thinned until its busiest five minutes fill 16 engines; calls have the lengths of Azure's
conversations. `follows` is `batchrun.estimator.tide`, fed with what a gateway tells: the work of
calls that ended, the day before, and a profile whose coefficients are off by 5 % each. A replica is
paid for from its order to the end of its drain, and ready after `START_S`. `fixed` has the peak's
engines all day. `oracle` has in each minute the fewest engines that hold it, or hold so much less
than the day still keeps the promise, keeps one over a gap that is shorter than to stop and start
it, and buys for jobs just what they lack.

Jobs with deadlines come through the day, predicted with an error of a tenth; what calls leave of
the work that holds their bounds is theirs, and else an endless job's (`offline_tokens`).

Attainment is judged in bins of 20 s: by the work that an engine has in one, on a table that light
engines behind the shipped router make (`KeptTable`); what a full fleet leaves over waits. With
`--light-s` the busiest and the steepest stretch of so many seconds run on light engines, call by
call, as replicas came and went, and both figures are printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from batchrun.estimator.engine_capacity import CallLengths
from batchrun.estimator.tide import (
    CapacityCorrection,
    FleetNeeds,
    FleetSizer,
    JobNeed,
    TideForecast,
    TideSettings,
)
from benchmarks.forecast import DATA, DAY_S
from benchmarks.records import Bar, Record, finish, parser, shown
from benchmarks.tide_days import (
    BIN_S,
    BINS_A_MINUTE,
    DRAIN_S,
    MOST_ENGINES,
    PEAK_ENGINES,
    PROMISE,
    START_S,
    Day,
    Ints,
    capacity_by,
    kept_table,
    make_day,
    profile,
    run_light,
    work_of,
)

ROW_TOKENS = (2_000, 1_000, 64)
"""Of a row: its prompt, what of it is cached, its answer."""
JOBS = ((2.0, 4.0, 3.0), (9.0, 6.0, 9.0), (18.5, 4.0, 6.0))
"""With deadlines: the hour they come, the hours that they have, and engine-hours of work."""
MOST_OF_ORACLE = 1.15
ORACLE_SHARES = (0.99, 0.985, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9)
SETTINGS = TideSettings(1, MOST_ENGINES)


@dataclass(slots=True, eq=False)
class Outcome:
    """What a fleet made of a day: replicas that get calls in each bin, engine-hours paid."""

    ready: Ints
    engine_hours: float
    num_changes: int
    attainment: float = 0.0
    offline_tokens: float = 0.0
    deadlines_kept: float = 1.0


@dataclass(slots=True)
class Jobs:
    """The jobs of the day; `left_s` is work in engine-seconds."""

    left_s: list[float] = field(default_factory=lambda: [hours * 3600.0 for *_, hours in JOBS])
    late: set[int] = field(default_factory=set)
    endless_s: float = 0.0

    def open(self, at_s: float) -> list[int]:
        """Those that have come and are not done, the earliest deadline first."""
        come = [i for i, (hour, *_) in enumerate(JOBS) if hour * 3600.0 <= at_s]
        return sorted((i for i in come if self.left_s[i] > 0), key=deadline_s)

    def work(self, at_s: float, spare_s: float) -> None:
        """So many engine-seconds are there for rows in the bin from then on."""
        for i in self.open(at_s):
            done = min(spare_s, self.left_s[i])
            self.left_s[i] -= done
            spare_s -= done
            if self.left_s[i] > 0 and at_s + BIN_S >= deadline_s(i):
                self.late.add(i)
        self.endless_s += spare_s

    @property
    def kept(self) -> float:
        """The share of deadlines that were kept; a job that is not done has missed its own."""
        late = self.late | {i for i, left in enumerate(self.left_s) if left > 0}
        return 1 - len(late) / len(JOBS)


def deadline_s(job: int) -> float:
    """Of a job, by the day's clock."""
    hour, hours, _ = JOBS[job]
    return (hour + hours) * 3600.0


class World:
    """The fluid engines of a day: what a bin's work and replicas make of calls and rows."""

    def __init__(self, day: Day) -> None:
        self._day, self._table = day, kept_table()
        self._holds = np.array([0.0] + [self._table.holds(n) for n in range(1, MOST_ENGINES + 1)])
        self._waiting_s = 0.0
        self.jobs = Jobs()
        self.kept, self.served = np.zeros(len(day.work)), np.zeros(len(day.work))

    def step(self, number: int, num_ready: int) -> None:
        """Pass through a bin with so many replicas."""
        work_s = self._day.work[number] * BIN_S + self._waiting_s
        most_s = num_ready * self._table.full * BIN_S
        each = np.array([work_s / BIN_S / num_ready])
        share = float(self._table.of(np.array([num_ready]), each)[0])
        self.kept[number] = share * self._day.num_calls[number]
        self._waiting_s = max(0.0, work_s - most_s)
        self.served[number] = (work_s - self._waiting_s) / BIN_S
        spare_s = max(0.0, self._holds[num_ready] * BIN_S - work_s)
        self.jobs.work(number * BIN_S, spare_s)

    def judge(self, outcome: Outcome) -> Outcome:
        """Fill in what came out."""
        outcome.attainment = float(self.kept.sum()) / float(self._day.num_calls.sum())
        prompt, cached, output = (np.array([tokens]) for tokens in ROW_TOKENS)
        row_s = float(work_of(CallLengths(prompt, cached, output))[0])
        jobs_s = sum(hours * 3600.0 for *_, hours in JOBS) - sum(self.jobs.left_s)
        rows = (self.jobs.endless_s + jobs_s) / row_s
        outcome.offline_tokens = rows * (ROW_TOKENS[0] + ROW_TOKENS[2])
        outcome.deadlines_kept = self.jobs.kept
        return outcome


def fixed(day: Day) -> Outcome:
    """The peak's engines, all day."""
    world = World(day)
    for number in range(len(day.work)):
        world.step(number, PEAK_ENGINES)
    ready = np.full(len(day.work), PEAK_ENGINES)
    return world.judge(Outcome(ready, PEAK_ENGINES * DAY_S / 3600.0, 0))


def fewest(day: Day, target: float) -> Ints:
    """The fewest engines in each minute with which this share of its calls keep their bounds."""
    table = kept_table()
    work = day.work.reshape(-1, BINS_A_MINUTE)
    calls = day.num_calls.reshape(-1, BINS_A_MINUTE)
    found = np.full(len(work), MOST_ENGINES)
    for num in range(MOST_ENGINES, 0, -1):
        kept = table.of(np.full(work.size, num), work.ravel() / num).reshape(work.shape)
        shares = (kept * calls).sum(axis=1) / np.maximum(calls.sum(axis=1), 1)
        found[shares >= target] = num
    return found


def oracle(day: Day) -> Outcome:
    """Knows every call, and misses the promise in the minutes in which that saves the most, as long
    as the day keeps it: the cheapest of some shares of each minute's calls."""
    found = [oracle_of(day, share) for share in ORACLE_SHARES]
    return min(
        (each for each in found if each.attainment >= PROMISE.target),
        key=lambda each: each.engine_hours,
    )


def oracle_of(day: Day, share: float) -> Outcome:
    """Has the fewest engines that keep such a share of each minute's calls. Levels of the fleet are
    bridged where that is cheaper, and jobs get the engine time that they lack at its price."""
    needed = fewest(day, share)
    minute_s = BIN_S * BINS_A_MINUTE
    ready, paid_s, changes = needed.copy(), 0.0, 0
    for level in range(1, int(needed.max()) + 1):
        up = np.flatnonzero(needed >= level)
        gaps = np.diff(up) - 1
        is_bridged = (gaps > 0) & (gaps * minute_s <= START_S + DRAIN_S)
        for first, gap in zip(up[:-1][is_bridged], gaps[is_bridged], strict=True):
            ready[first + 1 : first + 1 + gap] = np.maximum(
                ready[first + 1 : first + 1 + gap], level
            )
        num_starts = 1 + int(((gaps > 0) & ~is_bridged).sum())
        paid_s += (len(up) + int(gaps[is_bridged].sum())) * minute_s
        paid_s += (num_starts - (level == 1)) * (START_S + DRAIN_S)
        changes += 2 * (num_starts - 1)
    by_bin = np.repeat(ready, BINS_A_MINUTE)
    world = World(day)
    for number, num in enumerate(by_bin.tolist()):
        world.step(number, num)
        for job in world.jobs.open(number * BIN_S):
            if (number + 1) * BIN_S >= deadline_s(job):
                paid_s += world.jobs.left_s[job] / (kept_table().holds(PEAK_ENGINES) / PEAK_ENGINES)
                world.jobs.left_s[job] = 0.0
                world.jobs.late.discard(job)
    return world.judge(Outcome(by_bin, paid_s / 3600.0, changes))


def follows(day: Day, seed: int, settings: TideSettings) -> Outcome:
    """What the shipped sizer does, minute by minute."""
    errors = np.random.default_rng((seed, 11)).normal(0.0, 0.1, len(JOBS))
    believed, correction = capacity_by(profile(seed)), CapacityCorrection()
    forecast = TideForecast(math.ceil(START_S / 60.0) + 1)
    for work in day.before.reshape(-1, BINS_A_MINUTE).mean(axis=1).tolist():
        forecast.add(work)
    sizer, world = FleetSizer(settings), World(day)
    first = forecast.forecast()
    assert first is not None
    wanted = believed.fewest(first.high, settings.low, settings.high)
    ready_at_s = [0.0] * wanted
    paid_s, ready, changes = 0.0, np.zeros(len(day.work), np.int64), 0
    for number in range(len(day.work)):
        at_s = number * BIN_S
        if number > BINS_A_MINUTE and number % BINS_A_MINUTE == 0:
            # Calls count when they end, so those of the last bin are not known yet.
            last = slice(number - BINS_A_MINUTE - 1, number - 1)
            forecast.add(float(world.served[last].mean()))
            held = believed.work(int(ready[last].min())) * correction.factor
            num_calls = float(day.num_calls[last].sum())
            late = num_calls - float(world.kept[last].sum())
            correction.learn(float(world.served[last].mean()) / held, num_calls, late)
            needs = [
                _need(world.jobs, job, errors[job], at_s, forecast) for job in world.jobs.open(at_s)
            ]
            asked = FleetNeeds(forecast.forecast(), needs, has_rows=True)
            number_of = sizer.decide(at_s, wanted, asked, believed.times(correction.factor))
            changes += abs(number_of.replicas - wanted)
            paid_s += max(0, wanted - number_of.replicas) * DRAIN_S
            wanted = number_of.replicas
            ready_at_s = ready_at_s[:wanted] + [at_s + START_S] * (wanted - len(ready_at_s))
        ready[number] = max(1, sum(each <= at_s for each in ready_at_s))
        paid_s += wanted * BIN_S
        world.step(number, int(ready[number]))
    return world.judge(Outcome(ready, paid_s / 3600.0, changes))


def _need(jobs: Jobs, job: int, error: float, at_s: float, forecast: TideForecast) -> JobNeed:
    """As it is predicted: the error of what is left goes away as rows come back."""
    work_s = jobs.left_s[job]
    work_s *= math.exp(error * work_s / (JOBS[job][2] * 3600.0))
    left_s = deadline_s(job) - at_s
    return JobNeed(f"job {job}", work_s, left_s, forecast.mean_ahead(int(left_s / 60.0)))


def light(day: Day, outcome: Outcome, length_s: float) -> Iterator[Record]:
    """The busiest stretch and the steepest, call by call; and what the table makes of them."""
    span = round(length_s / BIN_S)
    sums = np.convolve(day.work, np.ones(span), "valid")
    steep = sums[span:] - sums[:-span]
    for name, first in (("busiest", int(sums.argmax())), ("steepest", int(steep.argmax()))):
        start_s, end_s = first * BIN_S, (first + span) * BIN_S
        calls = day.calls.between(start_s, end_s)
        ready = outcome.ready[first : first + span]
        kept = run_light(calls, ready.tolist(), BIN_S, start_s)
        told = kept_table().of(ready, day.work[first : first + span] / ready)
        num = day.num_calls[first : first + span]
        yield {
            "trace": day.name,
            "stretch": name,
            "from_s": start_s,
            "num_engines": float(ready.mean()),
            "attainment_light": float(kept.mean()),
            "attainment_table": float((told * num).sum() / num.sum()),
        }


def trial(data: Path, seed: int, length_s: float) -> list[Record]:
    """A day: a record for each fleet, and for each stretch on light engines."""
    day = make_day(data, seed)
    fleets = {
        "fixed": fixed(day),
        "follows": follows(day, seed, SETTINGS),
        "oracle": oracle(day),
    }
    records: list[Record] = [
        {
            "trace": day.name,
            "seed": seed,
            "fleet": name,
            "engine_hours": each.engine_hours,
            "attainment": each.attainment,
            "offline_tokens": each.offline_tokens,
            "deadlines_kept": each.deadlines_kept,
            "of_oracle": each.engine_hours / fleets["oracle"].engine_hours,
            "most_engines": int(each.ready.max()),
            "num_changes": each.num_changes,
        }
        for name, each in fleets.items()
    ]
    return records + (list(light(day, fleets["follows"], length_s)) if length_s else [])


def main() -> int:
    """Run, print and save; exit code 1 where a bar is missed."""
    options = parser(__doc__, seeds=tuple(range(5)), data=DATA, light_s=0.0).parse_args()
    records = shown(
        record for seed in options.seeds for record in trial(options.data, seed, options.light_s)
    )
    return finish(options.json, records, bars(records))


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What `follows` is to keep on every day, and what it saves."""
    by_fleet = {
        name: [record for record in records if record.get("fleet") == name]
        for name in ("fixed", "follows", "oracle")
    }
    ours = by_fleet["follows"]
    yield Bar(
        "attainment of follows, the least", min(r["attainment"] for r in ours), PROMISE.target
    )
    most = max(record["of_oracle"] for record in ours)
    yield Bar("its engine-hours over the oracle's, the most", most, MOST_OF_ORACLE, is_most=True)
    yield Bar("deadlines kept, the least", min(r["deadlines_kept"] for r in ours), 1.0)
    hours = {name: fmean(r["engine_hours"] for r in each) for name, each in by_fleet.items()}
    tokens = {name: fmean(r["offline_tokens"] for r in each) for name, each in by_fleet.items()}
    yield Bar("engine-hours of the fixed fleet over its", hours["fixed"] / hours["follows"])
    yield Bar("offline tokens of the fixed fleet over its", tokens["fixed"] / tokens["follows"])


if __name__ == "__main__":
    raise SystemExit(main())
