"""The daemon sees that an engine with work does not get on, whichever way it hears of it."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from job_builders import make_tree_job
from msgspec.structs import replace

from batchrun.daemon import engine_link
from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.engine_link import EngineLink, Slot
from batchrun.daemon.job import ActiveJob
from batchrun.engine import progress as progressing
from batchrun.engine.agent import server
from batchrun.engine.agent.engine import AgentEngine, AgentWire
from batchrun.engine.agent.held_rows import KeptOutcomes, RowKeeper
from batchrun.engine.agent.messages import (
    AgentState,
    EndedRows,
    FromAgent,
    HeldRows,
    SentRow,
)
from batchrun.engine.agent.remote import AgentAddress
from batchrun.engine.agent.server import Agent, AgentSettings
from batchrun.engine.client import EngineClient
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.engine.progress import SILENT_S
from batchrun.engine.sockets import EngineSockets
from batchrun.mutual_tls import read_or_make_secret, server_context
from batchrun.pool.row_queue import Window
from batchrun.server.api.picture import view_engines
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.types import EnginePhase, Outcome, OutcomeKind
from batchrun.wire import ClassTelemetry, Telemetry, encode

FLEX_PAGE = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
IDLE_PAGE = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
WORKING, WAITING = ClassTelemetry(num_running=1), ClassTelemetry(num_waiting=1)
TOLD = Telemetry("start", 1.0, "echo", 512, is_offline_on=True)


class Watched:
    """A slot whose engine shows a page that never changes, looked at all the time."""

    def __init__(self, page: str) -> None:
        self.page, self.num_looks = page, 0
        self.is_offline_on = True
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._answer)
        self.server = TestServer(app)

    async def _metrics(self, _request: web.Request) -> web.Response:
        self.num_looks += 1
        return web.Response(text=self.page)

    async def _answer(self, _request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        async with self.server:
            url = str(self.server.make_url("")).rstrip("/")
            engine = AttachedEngine(AttachedSettings(name="one", url=url))
            engine.state = EnginePhase.READY
            slot = Slot(engine, uses_priority=False, window=Window(9, 10**9))
            watching = asyncio.create_task(slot.watch_progress(lambda: self.is_offline_on))
            try:
                async with asyncio.timeout(30):
                    yield slot
            finally:
                watching.cancel()
                await asyncio.wait([watching])
                await engine.client.close()

    async def look(self, num_times: int) -> None:
        """Wait until it was looked at so often."""
        until = self.num_looks + num_times
        while self.num_looks < until:
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once, and an engine hangs soon."""
    monkeypatch.setattr(engine_link, "LOOK_S", 0.01)
    monkeypatch.setattr(progressing, "UNKNOWN_STEP_S", 0.2)


def send_rows(slot: Slot) -> None:
    """Rows are in flight on the engine from now on."""
    assigner = Assigner[ActiveJob, Slot]([slot])
    assigner.join(make_tree_job("job_a", ["a"] * 5), deadline_at=None)
    assert assigner.assign(time.monotonic())[0]


async def test_a_core_that_hangs_while_it_has_nothing_to_do_is_found_by_the_rows_it_gets() -> None:
    watched = Watched(IDLE_PAGE)
    async with watched.slot() as slot:
        await watched.look(5)
        assert slot.engine.progress.stalled_s == 0
        send_rows(slot)
        while not slot.engine.progress.is_hung:
            await asyncio.sleep(0.01)
        assert slot.engine.progress.num_hangs == 1


@pytest.mark.parametrize(("page", "is_on"), [(IDLE_PAGE, False), ("something_else 1\n", True)])
async def test_rows_prove_nothing_where_they_may_sit_or_no_page_tells(
    page: str, *, is_on: bool
) -> None:
    watched = Watched(page)
    watched.is_offline_on = is_on
    async with watched.slot() as slot:
        send_rows(slot)
        await watched.look(10)
        assert slot.engine.progress.stalled_s == 0


async def test_an_engine_that_moved_since_it_got_its_rows_owes_nothing() -> None:
    """Such as one that lost a row on its way to the core."""
    watched = Watched(IDLE_PAGE)
    async with watched.slot() as slot:
        send_rows(slot)
        await watched.look(2)
        for _ in range(2):
            watched.page += "vllm:steps 1\n"
            await watched.look(2)
        await watched.look(5)
        assert slot.engine.progress.stalled_s == 0


async def test_of_an_engine_that_is_heard_its_scheduler_tells_whether_it_gets_on(
    tmp_path: Path,
) -> None:
    async with Watched("").slot() as slot:
        slot.link = link = EngineLink(EngineSockets(tmp_path / "engine"), "one")
        link._hear_telemetry(lambda: None, encode(replace(TOLD, online=WORKING)))
        while not slot.engine.progress.stalled_s:
            await asyncio.sleep(0.01)
        was_usable = slot.is_usable
        link._hear_telemetry(lambda: None, encode(replace(TOLD, online=WORKING, pause=2)))
        while slot.is_usable:
            await asyncio.sleep(0.01)
        assert was_usable and slot.engine.progress.is_doubtful
        assert not slot.engine.progress.stalled_s
        (shown,) = view_engines([slot], GatewayFigures("", ""))
        assert shown["stage"] == "paused or asleep: no rows go to it"


def agent_beside(engine: AttachedEngine, folder: Path) -> Agent:
    settings = AgentSettings(
        name="one",
        host="127.0.0.1",
        port=1,
        tls=server_context(read_or_make_secret(folder / "secret")),
        channel=folder / "engine",
        last_steps=folder / "steps",
        kept=folder / "kept.db",
    )
    return Agent(engine, settings)


@pytest.mark.parametrize(
    ("changes", "is_stalled"),
    [
        ({}, True),
        ({"is_offline_on": False}, False),
        ({"is_offline_on": False, "online": WORKING}, True),
        ({"online": WORKING, "pause": 2}, False),
    ],
)
async def test_an_agent_counts_no_work_that_the_scheduler_holds_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], *, is_stalled: bool
) -> None:
    """Such as a flex call that waits while offline work is off."""
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    watched = Watched(FLEX_PAGE)
    async with watched.slot() as slot:
        assert isinstance(slot.engine, AttachedEngine)
        beside = AttachedEngine(AttachedSettings(name="one", url=slot.engine.client.base_url))
        beside.state, agent = EnginePhase.READY, agent_beside(beside, tmp_path)
        agent._hear_telemetry(encode(replace(TOLD, offline=WAITING, **changes)))
        watching = asyncio.create_task(agent._watch_progress())
        await watched.look(20)
        assert (beside.progress.stalled_s > 0) is is_stalled
        watching.cancel()
        await asyncio.wait([watching])
        await beside.client.close()


async def test_what_a_scheduler_said_that_is_gone_tells_nothing_of_the_engine(
    tmp_path: Path,
) -> None:
    read_or_make_secret(tmp_path / "secret")
    address = AgentAddress(name="one", url="https://127.0.0.1:1", secret_file=tmp_path / "secret")
    engine, attached = AgentEngine(address), AttachedSettings(name="one", url="http://127.0.0.1:1")
    beside = AttachedEngine(attached)
    agent, link = agent_beside(beside, tmp_path), EngineLink(AgentWire(engine.client), "one")
    slot = Slot(engine, uses_priority=False, window=Window(9, 10**9), link=link)
    watching = asyncio.create_task(slot.watch_progress(lambda: True))

    async def tell(started: int) -> AgentState:
        beside.started, beside.state = started, EnginePhase.READY
        state = engine.client.state = agent._report_now()
        for _ in range(20):
            await asyncio.sleep(engine_link.LOOK_S)
        return state

    try:
        await tell(1)
        agent._hear_telemetry(encode(TOLD))
        link._hear_telemetry(lambda: None, encode(TOLD))
        assert (await tell(1)).runs_scheduler and link.telemetry is not None
        # vLLM is started anew without batchrun's scheduler.
        assert not (await tell(2)).runs_scheduler and link.look(has_rows=False) is None
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await engine.client.close()
        await beside.client.close()


def test_what_is_heard_of_work_and_of_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = EngineLink(EngineSockets(tmp_path / "engine"), "one")
    assert link.look(has_rows=True) is None

    def hear(telemetry: Telemetry) -> list[bool]:
        """Whether work is due, without rows of ours and with."""
        link._hear_telemetry(lambda: None, encode(telemetry))
        looks = [link.look(has_rows=has_rows) for has_rows in (False, True)]
        return [bool(look.has_work) for look in looks if look is not None]

    assert hear(TOLD) == [False, False]
    assert hear(replace(TOLD, offline=WORKING)) == [False, True]
    before = link.look(has_rows=True)
    assert hear(replace(TOLD, online=WORKING, sent_at=2.0)) == [True, True]
    after = link.look(has_rows=True)
    assert before is not None and after is not None and before.mark != after.mark

    monkeypatch.setattr(engine_link, "STALE_S", -1.0)
    silent = link.look(has_rows=False)
    assert silent is not None
    assert (silent.mark, silent.has_work, silent.bound_s) == (after.mark, True, SILENT_S)


@pytest.mark.parametrize("what", ["damaged", "of another version"])
async def test_outcomes_that_cannot_be_read_keep_no_agent_from_starting(
    tmp_path: Path, what: str
) -> None:
    path, ended = tmp_path / "kept.db", Outcome("job_a", 0, 1, OutcomeKind.OK, body=b"{}")
    KeptOutcomes(path).add([ended])
    if what == "damaged":
        path.write_bytes(b"no database" * 1_000)
    else:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("INSERT INTO outcomes VALUES ('job_a', 1, X'81')")
    kept = KeptOutcomes(path)
    assert kept.load() == ([] if what == "damaged" else [ended])
    assert path.with_suffix(".damaged").exists() == (what == "damaged")
    kept.add([ended])
    assert KeptOutcomes(path).load() == [ended]


async def test_an_agent_knows_when_it_sent_the_newest_row_that_its_engine_has(
    tmp_path: Path,
) -> None:
    async with Watched(IDLE_PAGE).server as server:
        client = EngineClient(str(server.make_url("")).rstrip("/"))
        kept = KeptOutcomes(tmp_path / "kept.db")
        rows = RowKeeper(client, kept, lambda _: True, lambda: None)
        sent = [SentRow("job_a", row, 1, 1, "/v1/completions", b"{}", None) for row in range(2)]
        assert rows.newest_s == -math.inf
        rows.take(sent[:1], is_refused=False)
        first_s = rows.newest_s
        rows.take(sent[1:], is_refused=False)
        newest_s = rows.newest_s
        rows.forget([sent[1].key])

        assert -math.inf < first_s == rows.newest_s < newest_s
        await rows.close()
        await client.close()


async def test_the_daemon_hears_of_a_row_at_which_its_agent_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    def hear(message: FromAgent) -> bool:
        told.append(message)
        return True

    monkeypatch.setattr("aiohttp.ClientSession.post", refuse)
    client, told = EngineClient("http://127.0.0.1:1"), list[FromAgent]()
    kept = KeptOutcomes(tmp_path / "kept.db")
    rows = RowKeeper(client, kept, hear, lambda: None)
    telling = asyncio.create_task(rows.run())
    rows.meet()
    rows.take([SentRow("job_a", 7, 2, 1, "/v1/x", b"{}", None, "made")], is_refused=False)
    while len(told) < 2:
        await asyncio.sleep(0.01)
    telling.cancel()
    await client.close()

    held, ended = told
    assert isinstance(held, HeldRows) and isinstance(ended, EndedRows)
    (outcome,) = ended.outcomes
    assert (outcome.row, outcome.attempt, outcome.content) == (7, 2, "made")
    assert (outcome.kind, rows.num_held) == (OutcomeKind.RETRY, 0)
    assert outcome.error is not None
    assert 'failed: RuntimeError("can\'t start new thread")' in outcome.error.message
