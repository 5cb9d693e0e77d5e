"""Finding the row that kills engines: in few deaths, without harm to its neighbours."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from engine_builders import fake_settings
from job_builders import make_active_job, make_tree_job
from msgspec.structs import replace
from store_builders import answered

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.engine_link import EngineLink, Slot
from batchrun.daemon.faults import SOLO, Trials, accuse_rows
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.opening import open_job
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine, ManagedEngine
from batchrun.engine.sockets import EngineSockets
from batchrun.pool.row_queue import Window
from batchrun.store import results
from batchrun.store.database import open_store
from batchrun.types import EnginePhase, Usage
from batchrun.wire import ClassTelemetry, RowKey, Telemetry

JOB = "job_a"
Kills = Callable[[set[int]], set[int] | None]
"""The rows of the last steps when these rows kill the engine, None when they do not."""


def run(room: int, kills: Kills, num_rows: int) -> tuple[list[int], list[int], int]:
    """A job on an engine for `room` rows, which some rows kill: the rows that were answered, those
    that were found guilty, and how often the engine died."""
    engine = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9000"))
    engine.state = EnginePhase.READY
    slot = Slot(engine, uses_priority=False, window=Window(room, 10**9))
    assigner = Assigner[ActiveJob, Slot]([slot])
    job = make_tree_job(JOB, ["a"] * num_rows)
    assigner.join(job, deadline_at=None)
    answered: list[int] = []
    guilty: list[int] = []
    num_deaths = 0
    for now_s in range(10 * num_rows):
        while assigner.assign(float(now_s))[0]:
            pass
        sent = list(slot.in_flight.values())
        last = kills({assignment.row for assignment in sent})
        if last is not None:
            num_deaths += 1
            trials = dict.fromkeys(slot.in_flight, job.trials)
            accuse_rows(trials, {(JOB, row) for row in last}, slot.alone)
        for assignment in sent:
            slot.release(assignment)
            row = assignment.row
            if last is not None and not job.trials.is_guilty(row):
                assigner.give_back(assignment)
                continue
            (answered if last is None else guilty).append(row)
            assigner.settle(assignment, Usage(64, 8, 0))
            job.trials.clear(row)
            job.queue.finish(row)
    assert job.queue.is_finished
    return sorted(answered), sorted(guilty), num_deaths


def all_of(*guilty: int) -> Kills:
    """These rows kill; every row in flight was in the last steps."""
    return lambda rows: set(rows) if rows & set(guilty) else None


@pytest.mark.parametrize(
    ("room", "num_deaths"), [(1, 3), (2, 3), (8, 3), (9, 4), (64, 4), (256, 5)]
)
def test_the_guilty_row_is_found_in_few_deaths(room: int, num_deaths: int) -> None:
    answered, guilty, died = run(room, all_of(room // 2), 400)
    assert guilty == [room // 2]
    assert answered == [row for row in range(400) if row != room // 2]
    assert died == num_deaths


@pytest.mark.parametrize("guilty", [(0, 1), (3, 30), (0, 99), (5, 6, 7)])
def test_several_guilty_rows_are_all_found_and_nobody_else(guilty: tuple[int, ...]) -> None:
    answered, found, _ = run(32, all_of(*guilty), 100)
    assert found == sorted(guilty)
    assert answered == [row for row in range(100) if row not in guilty]


def test_only_rows_of_the_last_steps_are_suspects() -> None:
    trials = Trials()
    in_flight: dict[RowKey, Trials] = {(JOB, row): trials for row in range(100)}
    accused = accuse_rows(in_flight, {(JOB, 3), (JOB, 4), ("another", 5), (JOB, 400)})
    assert accused == {(JOB, 3), (JOB, 4)}
    assert trials.limits == {3: SOLO, 4: SOLO}


def test_new_rows_beside_a_suspect_stay_free() -> None:
    trials = Trials()
    in_flight: dict[RowKey, Trials] = {(JOB, row): trials for row in range(100)}
    accuse_rows(in_flight, set(in_flight))
    for row in range(95):
        trials.clear(row)
    beside: dict[RowKey, Trials] = {(JOB, row): trials for row in range(95, 300)}
    assert accuse_rows(beside, set(beside)) == {(JOB, row) for row in range(95, 100)}


def test_a_row_that_kills_what_parses_it_is_found_though_no_step_held_it() -> None:
    def kills(rows: set[int]) -> set[int] | None:
        return rows - {40} if 40 in rows else None

    answered, guilty, num_deaths = run(32, kills, 100)
    assert guilty == [40]
    assert answered == [row for row in range(100) if row != 40]
    assert num_deaths <= 6


def test_one_death_of_a_lone_row_proves_nothing() -> None:
    trials, row = Trials({0: SOLO}), (JOB, 0)
    accuse_rows({row: trials}, {row}, {row})
    assert not trials.is_guilty(0)
    accuse_rows({row: trials}, {row}, {row})
    assert trials.is_guilty(0)


def test_a_row_that_was_sent_with_others_is_guilty_of_nothing() -> None:
    engine = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9000"))
    engine.state = EnginePhase.READY
    slot = Slot(engine, uses_priority=False, window=Window(9, 10**9))
    assigner = Assigner[ActiveJob, Slot]([slot])
    job = make_tree_job(JOB, ["a"] * 5)
    assigner.join(job, deadline_at=None)
    while assigner.assign(0.0)[0]:
        pass
    for _ in range(4):
        slot.accuse()
        slot.came_back()
    assert set(job.trials.limits.values()) == {SOLO}
    assert [row for row in range(5) if job.trials.is_guilty(row)] == []


@pytest.mark.parametrize("state", [EnginePhase.UNREACHABLE, EnginePhase.RESTARTING])
async def test_an_engine_that_lives_and_gives_no_answer_has_not_ended(
    tmp_path: Path, state: EnginePhase
) -> None:
    unwell = [500] * 3

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=unwell.pop() if unwell else 200)

    app = web.Application()
    app.router.add_get("/health", answer)
    async with TestServer(app) as server:
        engine = ManagedEngine(fake_settings(tmp_path, url=str(server.make_url("")).rstrip("/")))
        engine.state = state
        slot = Slot(engine, uses_priority=False, window=Window(9, 10**9))
        assert await slot.has_ended() is (state is EnginePhase.RESTARTING)
        await engine.client.close()


def test_a_suspect_does_not_run_alone_beside_a_call_that_runs_as_offline_work(
    tmp_path: Path,
) -> None:
    engine = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9000"))
    slot = Slot(engine, uses_priority=False, window=Window(9, 10**9), apart_since_s=0.0)
    slot.link = EngineLink(EngineSockets(tmp_path / "engine"), "one")
    told = Telemetry("start", 0.0, "echo", 512, is_offline_on=True)
    are_alone = []
    for offline in (ClassTelemetry(num_running=1), ClassTelemetry(num_waiting=1), ClassTelemetry()):
        slot.link._remember(time.monotonic(), replace(told, offline=offline))
        are_alone.append(slot.is_left_alone(10.0))

    assert are_alone == [False, False, True]


async def test_a_row_that_has_just_ended_is_no_suspect(tmp_path: Path) -> None:
    engine = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9000"))
    engine.state = EnginePhase.READY
    slot = Slot(engine, uses_priority=False, window=Window(9, 10**9))
    job = make_tree_job(JOB, ["a"] * 2)
    with closing(open_store(tmp_path / "store.db")) as store:
        dispatcher = Daemon(store, [slot], tmp_path).dispatcher
        dispatcher.add(job)
        ended, other = dispatcher.assigner.assign(0.0)[0]
        dispatcher._conclude(ended, answered(ended.row))
        slot.accuse()

    assert job.trials.limits == {other.row: SOLO}


def test_after_a_restart_rows_that_have_a_result_are_no_suspects(tmp_path: Path) -> None:
    before = make_active_job(tmp_path, ["a"] * 3)
    before.close()
    with closing(open_store(tmp_path / "store.db")) as store:
        results.record_engine_death(store, before.record.seq, [0, 1])
        results.commit(store, [(before.record.seq, answered(0))], now_s=0.0)
        job = open_job(store, before.record, links=tmp_path / "links")
    job.close()

    assert job.trials.limits == {1: SOLO}
