"""What engines serve, as the daemon hears it: slow, never, or renamed; and what routers know."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from store_builders import add_batch
from test_dispatcher_abort import running_daemon, slot_of

from batchrun.daemon import dispatcher, opening
from batchrun.daemon.engine_link import EngineLink, Slot
from batchrun.daemon.opening import Opener
from batchrun.daemon.prices import traits_of
from batchrun.engine.client import KvConfig
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.engine.sockets import EngineSockets
from batchrun.jobs.batch import new_batch_job
from batchrun.jobs.expected_answers import DefaultModel
from batchrun.jobs.results.file_bytes import FileBytes
from batchrun.pool.row_queue import Window
from batchrun.store import api_keys, files, jobs
from batchrun.store.api_keys import KeyLimits, NewApiKey
from batchrun.store.batches import NewBatch
from batchrun.store.files import NewFile
from batchrun.store.jobs import JobRecord
from batchrun.types import EnginePhase, JobState
from batchrun.wire import Telemetry

CHAT = "/v1/chat/completions"


@dataclass
class Server:
    """An engine whose list of models comes after `num_silent` requests that get no answer, with 404
    while it does not tell."""

    num_silent: int = 0
    model: str = "small"
    tells: bool = True
    num_asked: int = 0
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.num_asked <= self.num_silent:
            await self.let_go.wait()
        if not self.tells:
            return web.Response(status=404)
        return web.json_response({"object": "list", "data": [{"id": self.model}]})


@asynccontextmanager
async def served(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/health", server.health)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.let_go.set()
        await runner.cleanup()


async def test_an_engine_that_is_slow_to_tell_its_models_serves_none_until_it_does(
    tmp_path: Path,
) -> None:
    server, seen = Server(num_silent=1), set()
    async with served(server) as url, running_daemon(tmp_path, url, models=None) as daemon:
        (slot,) = daemon.slots
        async with asyncio.timeout(30):
            while slot.models is None:
                seen.add(slot.serves("other"))
                await asyncio.sleep(0.01)
        assert slot.models == ("small",)
        assert (server.num_asked, seen) == (2, {False})


async def test_an_engine_that_never_tells_may_serve_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(dispatcher, "MAX_UNTOLD", 2)
    server = Server(num_silent=10**9)
    async with served(server) as url, running_daemon(tmp_path, url, models=None) as daemon:
        (slot,) = daemon.slots
        async with asyncio.timeout(30):
            while slot.models is None:
                await asyncio.sleep(0.01)
        assert slot.models == ()
        assert slot.serves("any")
        assert server.num_asked >= 2


def test_routers_know_of_an_engine_what_it_has_told(tmp_path: Path) -> None:
    engine = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9000"))
    slot = Slot(engine, uses_priority=False, window=Window(1, 1))
    before = traits_of(slot, None)
    slot.kv = KvConfig(16, 500, is_prefix_caching_on=True)
    slot.link = EngineLink(EngineSockets(tmp_path / "engine"), "one")
    told = Telemetry("start", 0.0, "echo", 512, is_offline_on=True, max_running=8)
    slot.link._remember(0.0, told)

    assert before == {}
    assert traits_of(slot, None) == {"kv_tokens": 8_000, "max_running": 8, "budget_tokens": 512}


@asynccontextmanager
async def opener_of(
    folder: Path, *servers: Server, models: tuple[str, ...] | None
) -> AsyncIterator[Opener]:
    """Opens batches for engines that nobody else asks."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(server)) for server in servers]
        for number in range(len(urls)):
            (folder / str(number)).mkdir()
        made = [
            await stack.enter_async_context(slot_of(folder / str(number), url, models=models))
            for number, url in enumerate(urls)
        ]
        spool = folder / "files"
        spool.mkdir()
        slots = [slot for _, slot in made]
        for slot in slots:
            async with asyncio.timeout(30):
                while slot.engine.state is not EnginePhase.READY:
                    await asyncio.sleep(0.01)
        yield Opener(made[0][0], slots, folder, lambda _: None, FileBytes(spool))


def batch_for(opener: Opener, model: str, owner: str | None = None) -> JobRecord:
    """A batch of one line, which is not validated yet."""
    assert opener.files is not None
    line = {"custom_id": "a", "method": "POST", "url": CHAT}
    text = json.dumps(line | {"body": {"model": model, "messages": []}}).encode()
    given = NewFile("in", "batch", len(text), "0" * 64, None, owner)
    file = files.add(opener.store, given, now_s=1.0)
    (opener.files.spool / file.id).write_bytes(text)
    job = new_batch_job(opener.files.spool, CHAT, deadline_s=86_400, weight=1)
    asked = NewBatch(file.id, CHAT, "24h", None, None, "r", owner=owner)
    return add_batch(opener.store, asked, job, now_s=time.time()).job


async def test_a_batch_waits_for_the_engine_that_may_have_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "ENGINE_INTERVAL_S", 0.01)
    small, large = Server(), Server(model="large", tells=False)
    said = asyncio.Event()
    async with opener_of(tmp_path, small, large, models=None) as opener:
        record = batch_for(opener, "large")
        opened = asyncio.create_task(
            opener.open(record, lambda stage, *_: said.set() if "may have" in stage else None)
        )
        async with asyncio.timeout(30):
            await said.wait()
            large.tells = True
            job = await opened
        assert job is not None
        assert job.spec.model == "large"
        job.close()

        unknown = batch_for(opener, "huge")
        assert await opener.open(unknown, lambda *_: None) is None
        assert jobs.get(opener.store, unknown.id).state is JobState.FAILED


async def test_a_batch_whose_model_only_a_failed_engine_may_have_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "UNTOLD_INTERVAL_S", 0.01)
    small, large = Server(), Server(model="large", tells=False)
    said = asyncio.Event()
    waits = "waiting for engine fake, which has failed, to tell its models: its log says why"
    async with opener_of(tmp_path, small, large, models=None) as opener:
        engine = opener.slots[1].engine
        assert isinstance(engine, AttachedEngine)
        engine.state, engine.stage = EnginePhase.FAILED, "its log says why"
        record = batch_for(opener, "large")
        opened = asyncio.create_task(
            opener.open(record, lambda stage, *_: said.set() if stage == waits else None)
        )
        async with asyncio.timeout(30):
            await said.wait()
            large.tells = True
            job = await opened
        assert job is not None
        job.close()


async def test_what_answers_jobs_without_a_model_is_known_before_an_engine_was_heard(
    tmp_path: Path,
) -> None:
    async with opener_of(tmp_path, Server(), models=None) as opener:
        assert await opener._default_model() == DefaultModel("small", is_sure=False)
        opener.first_model = "large"
        assert await opener._default_model() == DefaultModel("large", is_sure=False)
        opener.slots = ()
        assert await opener._default_model() == DefaultModel("large", is_sure=True)


async def test_nothing_is_kept_of_the_input_of_a_batch_that_its_key_may_not_start(
    tmp_path: Path,
) -> None:
    async with opener_of(tmp_path, Server(), models=None) as opener:
        limits = KeyLimits(enqueued_tokens=1)
        key = NewApiKey("key_1", "team", "user", "0" * 64, None, limits)
        api_keys.add(opener.store, key, now_s=1.0)
        record = batch_for(opener, "small", key.id)

        assert await opener.open(record, lambda *_: None) is None

        assert jobs.get(opener.store, record.id).state is JobState.FAILED
        assert not list(opener.links.glob("*-file-*"))


async def test_a_batch_of_any_model_runs_on_an_engine_that_never_tells_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "ENGINE_INTERVAL_S", 0.01)
    async with opener_of(tmp_path, Server(tells=False), models=()) as opener:
        async with asyncio.timeout(30):
            job = await opener.open(batch_for(opener, "any"), lambda *_: None)
        assert job is not None
        assert job.spec.model == "any"
        job.close()
