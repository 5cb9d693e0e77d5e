"""Jobs that wait for the hours in which calls leave the most room, and go on ahead of deadlines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.daemon.daemon import Daemon
from batchrun.errors import JobSpecError
from batchrun.estimator.tide import DAY, MINUTE_S, minutes_to_cheap_time
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.server.api.cheap_start import CheapStarts
from batchrun.server.api.replica_follower import keep_minutes, read_minutes, this_minute
from batchrun.server.gateway.tally import SeenReply, Tally, create_tally
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.store.database import Store
from batchrun.store.jobs import JobRecord

JOB_FILE = """\
name: sample
endpoint: /v1/completions
input: {path: rows.parquet, prompt: "{{ text }}"}
output: {path: out.jsonl}
"""
HOUR = 60


def day(cheap_hours: Sequence[int], *, ends_at: int) -> list[float]:
    """A day of minutes up to that hour of it, with little load in some of its hours."""
    hours = [(ends_at + hour) % 24 for hour in range(24)]
    return [1.0 if hour in cheap_hours else 50.0 for hour in hours for _ in range(HOUR)]


@pytest.mark.parametrize(
    ("now", "left_hours", "work_hours", "wait_hours"),
    [
        (20, 24, 1.0, 6),
        (2, 24, 1.0, 0),
        (4, 24, 1.0, 0),
        (5, 30, 1.0, 21),
        (20, 5, 1.0, 0),
        (20, 24, 23.0, 0),
        (20, 24, 6.0, 0),
    ],
)
def test_work_waits_for_the_night_as_long_as_its_deadline_lets_it(
    now: int, left_hours: float, work_hours: float, wait_hours: int
) -> None:
    loads = day([2, 3, 4], ends_at=now)
    found = minutes_to_cheap_time(loads, work_hours * 3600, left_hours * 3600)
    assert abs(found / HOUR - wait_hours) <= 0.25


def test_work_goes_at_once_before_a_day_is_known_or_where_all_hours_are_alike() -> None:
    assert minutes_to_cheap_time(day([2], ends_at=20)[1:], 600, 80_000) == 0
    assert minutes_to_cheap_time([], 600, 80_000) == 0
    assert minutes_to_cheap_time([7.0] * DAY, 600, 80_000) == 0


def test_days_are_averaged_by_the_time_of_day() -> None:
    loads = day([2], ends_at=20) + day([6], ends_at=20) + day([6], ends_at=20)
    found = minutes_to_cheap_time(loads, 600, 80_000)
    assert abs(found - 10 * HOUR) <= 15


def test_going_on_with_what_is_left_never_waits_again_within_a_night() -> None:
    loads, left_s, work_s = day([2, 3, 4], ends_at=20), 86_400.0, 5_400.0
    gone: list[int] = []
    for minute in range(DAY):
        if work_s > 0 and not minutes_to_cheap_time(loads, work_s, left_s):
            gone.append(minute)
            work_s -= MINUTE_S
        loads.append(loads[-DAY])
        left_s -= MINUTE_S
    assert len(gone) == 90
    assert gone[-1] - gone[0] == 89


def test_minutes_are_kept_over_restarts(tmp_path: Path) -> None:
    file = tmp_path / "calls.tide"
    assert read_minutes(file, 100) == []
    keep_minutes(file, [1.0, 2.0], 100)
    assert read_minutes(file, 100) == [1.0, 2.0]
    assert read_minutes(file, 103) == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert read_minutes(file, 101 + DAY) == []
    file.write_text("{")
    assert read_minutes(file, 100) == []


def test_cheap_hours_need_a_deadline(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "rows.parquet")
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE + "start: cheap\n")
    with pytest.raises(JobSpecError, match=r"job.yaml:5: start: .*deadline"):
        load_job_file(file, cwd=tmp_path)
    file.write_text(JOB_FILE + "start: night\n")
    with pytest.raises(JobSpecError, match=r"job.yaml:5: start: "):
        load_job_file(file, cwd=tmp_path)


@dataclass(slots=True)
class Waiting:
    """A daemon without engines, calls that the test makes up, and a job that may wait."""

    daemon: Daemon
    starts: CheapStarts
    figures: GatewayFigures
    tally: Tally
    folder: Path

    async def submit(self, more: str) -> JobRecord:
        pq.write_table(pa.table({"text": ["a", "b"]}), self.folder / "rows.parquet")
        file = self.folder / "job.yaml"
        file.write_text(JOB_FILE + more)
        job = prepare_job(load_job_file(file, cwd=self.folder), links=self.daemon.links)
        record = await self.daemon.submit(job)
        while record.seq not in self.daemon.active:
            await asyncio.sleep(0.01)
        return record

    def call(self, num_calls: int) -> None:
        """So many calls end, and the gateway tells of them."""
        for _ in range(num_calls):
            self.tally.count_reply(SeenReply("", "0", 0.1, 0.02, 1_000, 0, 100))
        told = [(each.kind, each.labels, each.values.tolist()) for each in self.tally.read()]
        self.figures.take(json.dumps(told).encode(), time.monotonic())

    @property
    def going(self) -> set[str]:
        return set(self.daemon.dispatcher.jobs)


@pytest.fixture
async def waiting(store: Store, tmp_path: Path) -> AsyncIterator[Waiting]:
    """A day is known whose cheap hour begins in an hour."""
    file = tmp_path / "calls.tide"
    keep_minutes(file, [50.0] * HOUR + [0.0] * HOUR + [50.0] * (DAY - 2 * HOUR), this_minute())
    daemon = Daemon(store, [], tmp_path / "inputs")
    figures = GatewayFigures("http://127.0.0.1:9", "secret")
    starts = CheapStarts(daemon, figures, file)
    running = asyncio.create_task(daemon.run())
    yield Waiting(daemon, starts, figures, Tally(create_tally(1), 1, 0), tmp_path)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_job_waits_says_until_when_and_goes_on(waiting: Waiting) -> None:
    job = await waiting.submit("start: cheap\ndeadline: 40h\n")
    assert waiting.going == set()
    assert waiting.daemon.stages[job.id].describe().startswith("waits for cheap hours, about ")
    minute = this_minute()
    waiting.call(1)
    waiting.starts.look(minute + 30)
    assert waiting.going == set()
    waiting.starts.look(minute + 70)
    assert waiting.going == {job.id}
    assert job.id not in waiting.daemon.stages
    waiting.call(10)
    waiting.starts.look(minute + 180)
    assert waiting.going == set()


async def test_a_job_that_is_due_or_does_not_ask_to_wait_goes_at_once(waiting: Waiting) -> None:
    due = await waiting.submit("start: cheap\ndeadline: 15m\n")
    other = await waiting.submit("deadline: 20h\n")
    assert waiting.going == {due.id, other.id}


async def test_a_paused_or_cancelled_job_is_not_taken_for_one_that_waits(waiting: Waiting) -> None:
    paused = await waiting.submit("start: cheap\ndeadline: 20h\n")
    await waiting.daemon.pause(paused.id)
    assert paused.id not in waiting.daemon.stages
    waiting.starts.look(this_minute() + 70)
    assert waiting.going == set()
    await waiting.daemon.resume(paused.id)
    while paused.id not in waiting.going:
        await asyncio.sleep(0.01)


async def test_what_calls_bring_is_noted_by_the_minute(waiting: Waiting, tmp_path: Path) -> None:
    minute = this_minute()
    waiting.call(1)
    waiting.starts.look(minute + 1)
    waiting.call(5)
    waiting.starts.look(minute + 2)
    waiting.call(6)
    waiting.starts.look(minute + 4)
    assert waiting.starts.loads[-4:] == [50.0, 5_500.0, 3_300.0, 3_300.0]
