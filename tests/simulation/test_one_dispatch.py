"""The simulator hands rows out as the daemon does: one scripted hour, assignment by assignment.

Both sides get the same jobs, ends of rows, deaths and refusals. What they hand out is compared, and
known: the digest is of the whole hour, so that no change of the dispatch goes unseen.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
from job_builders import make_tree_job

from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.faults import accuse_rows
from batchrun.daemon.in_flight import Assignment, EngineSlot
from batchrun.daemon.job import ActiveJob
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.pool.row_queue import Window
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.offline_jobs import JobTerms, OfflineJob, job_of_plan
from batchrun.simulator.virtual.engine import RequestRecord
from batchrun.types import EnginePhase, Usage

NUM_ENGINES = 3
HOUR_S = 3_600
ROWS_PER_S = 1
WINDOW = (24, 200_000)
NUM_OUTPUT_TOKENS = 40
DIGEST = "5526a3494fc1d9fd"
"""Of every assignment of the hour: instant, job, row, engine, and whether it is urgent."""
Row = Assignment[Any, Any]


@dataclass(frozen=True)
class Comes:
    """A job and its terms; letters are documents of a chunk each."""

    documents: str
    rows_per_document: int
    weight: float = 1.0
    submit_s: float = 0.0
    deadline_at: float | None = None


JOBS = [
    Comes("abcdefghijklmnop", 120),
    Comes("ponmlkqrstu", 160, weight=3.0, submit_s=300.0),
    Comes("vwx", 120, submit_s=900.0, deadline_at=1_020.0),
    Comes("abcdefgh", 220, weight=0.5, submit_s=1_500.0),
    Comes("yzab", 90, submit_s=2_400.0, deadline_at=3_500.0),
]


def texts(job: Comes) -> list[str]:
    """Rows of several documents in turn, as inputs have them."""
    return [
        (letter * 6) + chr(ord("A") + number % 26)
        for number in range(job.rows_per_document)
        for letter in job.documents
    ]


class Side(Protocol):
    """Who hands out rows."""

    slots: list[Any]

    def handed_out(self, now_s: float) -> Iterator[Row]:
        """Rows that go at `now_s`."""

    def end(self, row: Row, now_s: float) -> None:
        """A row is answered."""

    def give_back(self, row: Row, now_s: float, ready_at_s: float) -> None:
        """A row comes back."""


class DaemonSide:
    """The daemon's jobs and engines."""

    def __init__(self) -> None:
        self.slots = [self._slot(index) for index in range(NUM_ENGINES)]
        self.assigner = Assigner[ActiveJob, Slot](self.slots)
        self.to_come = [
            (make_tree_job(f"job-{number}", texts(job), job.weight), job)
            for number, job in enumerate(JOBS)
        ]

    def _slot(self, index: int) -> Slot:
        engine = AttachedEngine(AttachedSettings(name=f"e{index}", url="http://127.0.0.1:9"))
        engine.state = EnginePhase.READY
        window = Window(*WINDOW)
        return Slot(engine, uses_priority=False, window=window, hint_nonce="secret")

    def handed_out(self, now_s: float) -> Iterator[Row]:
        while self.to_come and self.to_come[0][1].submit_s <= now_s:
            active, job = self.to_come.pop(0)
            self.assigner.join(active, deadline_at=job.deadline_at)
        while rows := self.assigner.assign(now_s)[0]:
            yield from rows

    def end(self, row: Row, now_s: float) -> None:
        row.job.queue.finish(row.row)
        row.slot.release(row)
        self.assigner.settle(row, usage_of(row))
        if row.job.queue.is_finished:
            self.assigner.leave(row.job)

    def give_back(self, row: Row, now_s: float, ready_at_s: float) -> None:
        row.slot.release(row)
        self.assigner.give_back(row, ready_at_s=ready_at_s)


class SimulatorSide:
    """The simulator's feed, with the same rows."""

    def __init__(self) -> None:
        self.feed = RowFeed([offline_job(job) for job in JOBS], [16] * NUM_ENGINES, 1)
        self.slots = list(self.feed.assigner.slots)
        for slot in self.slots:
            slot.window = Window(*WINDOW)
        self.names: dict[int, str] = {}

    def handed_out(self, now_s: float) -> Iterator[Row]:
        self.feed.send(now_s)
        arrived = [arrival for port in self.feed.ports for arrival in port.take_due(now_s)]
        order = {name: number for number, name in enumerate(self.feed.sent)}
        for name in sorted((arrival.request_id for arrival in arrived), key=order.__getitem__):
            row = self.feed.sent[name]
            self.names[id(row)] = name
            yield row

    def end(self, row: Row, now_s: float) -> None:
        usage, name = usage_of(row), self.names.pop(id(row))
        record = RequestRecord(name, False, now_s, usage.num_prompt_tokens, 0, None)
        record.num_hit_tokens = usage.num_cached_tokens
        record.output_token_ids = [7] * usage.num_output_tokens
        self.feed.ended(record, now_s)

    def give_back(self, row: Row, now_s: float, ready_at_s: float) -> None:
        del self.feed.sent[self.names.pop(id(row))]
        row.slot.release(row)
        self.feed.assigner.give_back(row, ready_at_s=ready_at_s)


def offline_job(job: Comes) -> OfflineJob:
    """The same rows for the simulator."""
    active = make_tree_job("", texts(job), job.weight)
    terms = JobTerms(submit_s=job.submit_s, deadline_s=job.deadline_at or float("inf"))
    return job_of_plan(active.spec, active.plan, terms)


def usage_of(row: Row) -> Usage:
    """What the engine counts: odd rows find half of their prompt in the cache."""
    return Usage(row.tokens, NUM_OUTPUT_TOKENS, row.tokens // 2 * (row.row % 2))


@dataclass
class Hour:
    """The script: what happens to a side, and a line for every assignment."""

    side: Side
    in_flight: list[list[Row]] = field(default_factory=lambda: [[] for _ in range(NUM_ENGINES)])
    lines: list[str] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def run(self) -> Hour:
        """All of it, second by second. `told` is what hints say of the answers."""
        for now_s in map(float, range(HOUR_S)):
            self.faults(now_s)
            self.assign(now_s)
            for index, rows in enumerate(self.in_flight):
                if self.slots[index].is_down:
                    continue
                for row in rows[:ROWS_PER_S]:
                    row.trials.clear(row.row)
                    self.side.end(row, now_s)
                del rows[:ROWS_PER_S]
        return self

    @property
    def slots(self) -> list[EngineSlot]:
        return self.side.slots

    def assign(self, now_s: float) -> None:
        for slot in self.slots:
            if slot.is_set_apart and slot.apart_since_s is None:
                slot.apart_since_s = now_s
        for row in self.side.handed_out(now_s):
            index = self.slots.index(row.slot)
            self.in_flight[index].append(row)
            self.lines.append(f"{now_s:g} {row.job.id} {row.row} {index} {row.is_urgent}")
            self.told.append(row.job.answers.room_tokens)

    def faults(self, now_s: float) -> None:
        """Engines die, one for its rows; they answer again; one refuses rows; rows are slow."""
        if now_s == 600.0:
            self.die(1, now_s)
        if now_s in {1_200.0, 1_260.0}:
            trials = {key: row.trials for key, row in self.slots[2].in_flight.items()}
            accuse_rows(trials, frozenset())
            self.die(2, now_s)
        for index, up_s in ((1, 690.0), (2, 1_240.0), (2, 1_330.0)):
            if now_s == up_s:
                self.slots[index].is_down = False
        if 2_000.0 <= now_s < 2_060.0 and self.in_flight[0]:
            row = self.in_flight[0].pop()
            slot = self.slots[0]
            slot.pressure.refused(slot.window.num_rows, None, now_s, self.rng)
            self.side.give_back(row, now_s, slot.pressure.rests_until_s + 0.5)
        if 2_060.0 <= now_s < 2_400.0:
            self.slots[0].pressure.taken(self.slots[0].window.max_waiting)

    def die(self, index: int, now_s: float) -> None:
        self.slots[index].is_down = True
        for row in self.in_flight[index]:
            self.side.give_back(row, now_s, 0.0)
        self.in_flight[index] = []


@pytest.fixture(scope="module")
def daemon() -> Hour:
    return Hour(DaemonSide()).run()


def test_the_hour_has_all_that_dispatch_decides(daemon: Hour) -> None:
    fields = [line.split() for line in daemon.lines]
    jobs = Counter(job for _, job, *_ in fields)
    assert all(jobs[f"job-{number}"] >= 300 for number in range(len(JOBS))), jobs
    assert {engine for *_, engine, _ in fields} == {"0", "1", "2"}
    assert sum(urgent == "True" for *_, urgent in fields) > 100
    assert len({(job, row) for _, job, row, *_ in fields}) < len(fields)
    digest = hashlib.sha256("\n".join(daemon.lines).encode()).hexdigest()[:16]
    assert digest == DIGEST


def test_the_simulator_assigns_every_row_as_the_daemon_does(daemon: Hour) -> None:
    simulated = Hour(SimulatorSide()).run()
    for mine, theirs in zip(simulated.lines, daemon.lines, strict=False):
        assert mine == theirs
    assert len(simulated.lines) == len(daemon.lines)
    assert simulated.told == daemon.told
    assert max(daemon.told) == 128 and min(daemon.told) < 50
