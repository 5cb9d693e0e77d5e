"""Jobs that wait for the hours in which calls leave the most room, and go on ahead of deadlines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import FakeEngineFactory

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.job import ActiveJob
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.errors import JobSpecError
from batchrun.estimator.tide import DAY, MINUTE_S, course_of_day, minutes_to_cheap_time
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.pool.row_queue import RowLoad, Window
from batchrun.server.api.cheap_start import LAST_S, MINUTES, SPARE, CheapStarts
from batchrun.server.gateway.tally import SeenReply, Tally, create_tally
from batchrun.server.web.calls_of_all import (
    CallsOfAll,
    keep_minutes,
    read_minutes,
    this_minute,
)
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.store import jobs, results
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState

JOB_FILE = """\
name: sample
endpoint: /v1/completions
input: {path: rows.parquet, prompt: "{{ text }}"}
output: {path: out.jsonl}
"""
LIMIT = "request: {max_tokens: 8}\n"
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
    course = course_of_day(day([2, 3, 4], ends_at=now))
    found = minutes_to_cheap_time(course, work_hours * 3600, left_hours * 3600)
    assert abs(found / HOUR - wait_hours) <= 0.25


def test_work_goes_at_once_before_a_day_is_known_or_where_all_hours_are_alike() -> None:
    assert course_of_day(day([2], ends_at=20)[1:]) is None
    assert minutes_to_cheap_time(None, 600, 80_000) == 0
    assert minutes_to_cheap_time(course_of_day([7.0] * DAY), 600, 80_000) == 0


def test_days_are_averaged_by_the_time_of_day() -> None:
    loads = day([2], ends_at=20) + day([6], ends_at=20) + day([6], ends_at=20)
    found = minutes_to_cheap_time(course_of_day(loads), 600, 80_000)
    assert abs(found - 10 * HOUR) <= 15


def test_going_on_with_what_is_left_never_waits_again_within_a_night() -> None:
    loads, left_s, work_s = day([2, 3, 4], ends_at=20), 86_400.0, 5_400.0
    gone: list[int] = []
    for minute in range(DAY):
        if work_s > 0 and not minutes_to_cheap_time(course_of_day(loads), work_s, left_s):
            gone.append(minute)
            work_s -= MINUTE_S
        loads.append(loads[-DAY])
        left_s -= MINUTE_S
    assert len(gone) == 90
    assert gone[-1] - gone[0] == 89


def test_minutes_are_kept_for_who_leads_next(store: Store) -> None:
    assert read_minutes(store, MINUTES, 100) == ([], 0)
    keep_minutes(store, MINUTES, [1.0, 2.0], 100)
    assert read_minutes(store, "fleet a", 100) == ([], 0)
    assert read_minutes(store, MINUTES, 100) == ([1.0, 2.0], 0)
    assert read_minutes(store, MINUTES, 103) == ([1.0, 2.0], 3)
    assert read_minutes(store, MINUTES, 101 + DAY) == ([], 0)
    ((key, _),) = jobs.list_settings(store, "minutes:").items()
    jobs.write_setting(store, "minutes:" + key, {"loads": "many"})
    assert read_minutes(store, MINUTES, 100) == ([], 0)


def test_a_clock_that_is_behind_forgets_no_minutes(store: Store) -> None:
    keep_minutes(store, MINUTES, [1.0, 2.0], 100)
    assert read_minutes(store, MINUTES, 95) == ([1.0, 2.0], 0)
    assert read_minutes(store, MINUTES, 98 - DAY) == ([], 0)


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
    """A daemon with a fake engine that takes a while for a row, calls that the test makes up, and
    jobs that may wait."""

    daemon: Daemon
    starts: CheapStarts
    figures: GatewayFigures
    tally: Tally
    folder: Path
    now_s: float = 0.0

    async def submit(
        self, name: str, more: str, num_rows: int = 2, limit: str = LIMIT
    ) -> JobRecord:
        rows = pa.table({"text": [f"{name} {row}" for row in range(num_rows)]})
        pq.write_table(rows, self.folder / "rows.parquet")
        file = self.folder / "job.yaml"
        text = JOB_FILE.replace("sample", name).replace("out.", f"{name}.")
        file.write_text(text + limit + more)
        job = prepare_job(load_job_file(file, cwd=self.folder), links=self.daemon.links)
        record = await self.daemon.submit(job)
        await until(lambda: record.seq in self.daemon.active)
        return record

    def call(self, num_calls: int) -> None:
        """So many calls end, and the gateway tells of them."""
        for _ in range(num_calls):
            self.tally.count_reply(SeenReply("", "0", 0.1, 0.02, 1_000, 0, 100))
        told = [(each.kind, each.labels, each.values.tolist()) for each in self.tally.read()]
        self.figures.take(json.dumps(told).encode(), self.now_s)

    async def look(self, minute: int) -> None:
        await self.starts.look(minute, self.now_s)

    async def let_go(self, job: JobRecord) -> tuple[int, ActiveJob]:
        """The cheap hour comes, and the job's first rows go; the minute before."""
        minute, active = this_minute(), self.daemon.active[job.seq]
        self.call(1)
        await self.look(minute + 70)
        await until(lambda: active.queue.num_in_flight > 0)
        return minute, active

    def waits(self, job: JobRecord) -> bool:
        return job.id in self.daemon.dispatcher.waiting

    def state(self, job: JobRecord) -> JobState:
        return jobs.get(self.daemon.store, job.id).state


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def waiting(tmp_path: Path, fake_engine: FakeEngineFactory) -> AsyncIterator[Waiting]:
    """A day is known whose cheap hour begins in an hour."""
    settings = await fake_engine("--latency-s=1")
    store = open_store(tmp_path / "store.db")
    engine = AttachedEngine(AttachedSettings(name="fake", url=settings.base_url))
    await engine.start()
    window = Window(32, 400_000)
    slot = Slot(engine, uses_priority=False, window=window, models=(), load=RowLoad(1.0))
    known = [50.0] * HOUR + [0.0] * HOUR + [50.0] * (DAY - 2 * HOUR)
    keep_minutes(store, MINUTES, known, this_minute())
    daemon = Daemon(store, [slot], tmp_path / "inputs")
    figures = GatewayFigures("http://127.0.0.1:9", "secret")
    starts = CheapStarts(daemon, CallsOfAll(store, daemon.name, figures))
    running = asyncio.create_task(daemon.run())
    yield Waiting(daemon, starts, figures, Tally(create_tally(1), 1, 0), tmp_path)
    running.cancel()
    await asyncio.wait([running])
    await engine.stop()
    store.close()


async def test_a_job_waits_says_until_when_and_goes_on(waiting: Waiting) -> None:
    job = await waiting.submit("night", "start: cheap\ndeadline: 40h\n")
    stages = waiting.daemon.stages
    assert waiting.waits(job)
    assert stages[job.id].describe().startswith("waits for cheap hours, about ")
    minute = this_minute()
    waiting.call(1)
    await waiting.look(minute + 30)
    assert waiting.waits(job)
    assert waiting.daemon.active[job.seq].queue.num_in_flight == 0
    await waiting.look(minute + 70)
    assert not waiting.waits(job)
    assert job.id not in stages
    await until(lambda: waiting.state(job) is JobState.COMPLETED)


async def test_rows_in_flight_when_their_job_waits_again_end_as_others(waiting: Waiting) -> None:
    job = await waiting.submit("night", "start: cheap\ndeadline: 40h\n", num_rows=60)
    minute, active = await waiting.let_go(job)
    left_s = active.queue.left_work_s
    (slot,) = waiting.daemon.slots
    slot.load.first_speed = left_s / (2 * LAST_S)
    waiting.call(100)
    await waiting.look(minute + 180)
    assert waiting.waits(job)
    slot.load.first_speed = 1.0
    waiting.call(0)
    waiting.daemon.dispatcher.waiting.clear()
    waiting.daemon.dispatcher.wake()
    await until(lambda: waiting.state(job) is JobState.COMPLETED)
    assert active.queue.left_work_s < left_s
    assert results.count(waiting.daemon.store, job.seq).num_completed == 60


async def test_a_job_whose_answers_nobody_knows_first_learns_of_them(waiting: Waiting) -> None:
    more = "start: cheap\ndeadline: 40h\n"
    job = await waiting.submit("night", more, num_rows=200, limit="")
    active, (slot,) = waiting.daemon.active[job.seq], waiting.daemon.slots
    assert not waiting.waits(job)
    await until(lambda: not active.answers.is_guess)
    assert not active.queue.is_finished
    slot.load = RowLoad(active.left_work_s / (2 * LAST_S))
    waiting.starts.review(active)
    assert waiting.waits(job)


async def test_a_job_that_has_hardly_any_rows_left_ends(waiting: Waiting) -> None:
    job = await waiting.submit("night", "start: cheap\ndeadline: 40h\n", num_rows=60)
    minute, _ = await waiting.let_go(job)
    waiting.call(100)
    await waiting.look(minute + 180)
    assert not waiting.waits(job)


async def test_a_job_that_is_due_or_does_not_ask_to_wait_goes_at_once(waiting: Waiting) -> None:
    due = await waiting.submit("due", "start: cheap\ndeadline: 15m\n")
    other = await waiting.submit("other", "deadline: 20h\n")
    assert not waiting.waits(due)
    assert not waiting.waits(other)


async def test_jobs_that_are_due_together_share_the_cheap_hour(waiting: Waiting) -> None:
    first = await waiting.submit("first", "start: cheap\ndeadline: 20h\n")
    work_s = waiting.daemon.active[first.seq].queue.left_work_s
    (slot,) = waiting.daemon.slots
    slot.load = RowLoad(work_s / (SPARE * 50 * MINUTE_S))
    second = await waiting.submit("second", "start: cheap\ndeadline: 21h\n")
    waiting.starts.review(waiting.daemon.active[first.seq])
    assert waiting.waits(first)
    assert not waiting.waits(second)


async def test_without_a_known_speed_nothing_waits_and_without_an_engine_all_do(
    waiting: Waiting,
) -> None:
    (slot,) = waiting.daemon.slots
    slot.load = RowLoad()
    job = await waiting.submit("night", "start: cheap\ndeadline: 20h\n")
    assert not waiting.waits(job)
    slot.models = None
    waiting.starts.review(waiting.daemon.active[job.seq])
    assert waiting.waits(job)
    slot.models = ("another",)
    waiting.starts.review(waiting.daemon.active[job.seq])
    assert not waiting.waits(job), "no engine is to come that has its model"


@pytest.mark.parametrize("ends", [Daemon.pause, Daemon.cancel])
async def test_a_job_that_leaves_does_not_wait_any_more(
    waiting: Waiting, ends: Callable[..., Awaitable[JobRecord]]
) -> None:
    job = await waiting.submit("night", "start: cheap\ndeadline: 40h\n")
    await ends(waiting.daemon, job.id)
    await until(lambda: job.seq not in waiting.daemon.active)
    await waiting.look(this_minute() + 70)
    assert not waiting.waits(job)
    assert waiting.daemon.dispatcher.jobs == {}
    await until(lambda: job.id not in waiting.daemon.stages)


async def test_what_calls_bring_is_noted_by_the_minute(waiting: Waiting) -> None:
    minute = this_minute()
    waiting.call(1)
    await waiting.look(minute + 1)
    waiting.call(5)
    await waiting.look(minute + 2)
    waiting.call(6)
    await waiting.look(minute + 4)
    assert waiting.starts.loads[-4:] == [50.0, 5_500.0, 3_300.0, 3_300.0]
    waiting.now_s = 100.0
    await waiting.look(minute + 5)
    assert waiting.starts.loads[-1] == 50.0
    waiting.call(500)
    await waiting.look(minute + 5 + 4 * HOUR)
    assert max(waiting.starts.loads[-4 * HOUR :]) == 50.0, "nobody saw these hours"


async def test_a_part_of_a_day_before_a_gap_is_no_day(store: Store, tmp_path: Path) -> None:
    daemon = Daemon(store, [], tmp_path / "inputs")
    calls = CallsOfAll(store, daemon.name, GatewayFigures("http://127.0.0.1:9", "secret"))
    keep_minutes(store, MINUTES, [5.0] * 120, this_minute() - 600)
    assert CheapStarts(daemon, calls).loads == []
    keep_minutes(store, MINUTES, [5.0] * DAY + [7.0] * 60, this_minute() - 600)
    assert CheapStarts(daemon, calls).loads[-600:] == [5.0] * 600
