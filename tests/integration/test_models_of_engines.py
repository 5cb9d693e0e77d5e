"""What engines serve, as the daemon hears it: slow, never, or renamed; and what routers know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from test_dispatcher_abort import running_daemon

from batchrun.daemon import dispatcher
from batchrun.daemon.engine_link import EngineLink, Slot
from batchrun.daemon.prices import traits_of
from batchrun.engine.client import KvConfig
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.engine.sockets import EngineSockets
from batchrun.pool.row_queue import Window
from batchrun.wire import Telemetry

LISTED = {"object": "list", "data": [{"id": "small"}]}


@dataclass
class Server:
    """An engine whose list of models comes after `num_silent` requests that get no answer."""

    num_silent: int
    num_asked: int = 0
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.num_asked <= self.num_silent:
            await self.let_go.wait()
        return web.json_response(LISTED)


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
    slot.link._remember(0.0, told, is_new=True)

    assert before == {}
    assert traits_of(slot, None) == {"kv_tokens": 8_000, "max_running": 8, "budget_tokens": 512}
