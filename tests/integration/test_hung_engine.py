"""An engine whose core hangs while its server answers: ended, started anew, and its rows run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from engine_builders import fake_settings, make_request, script_option
from gateway_rig import CHAT, running_engine, running_gateway, write_upstreams

from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine, Engine, ManagedEngine
from batchrun.engine.process import read_record
from batchrun.types import EnginePhase, OutcomeKind

STALL_ONCE: dict[str, object] = {"match": {"row": 7}, "action": {"stall": True}, "times": 1}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def looked_at(engine: Engine, bound_s: float = 0.5) -> AsyncIterator[None]:
    """The engine started, watched, and looked at often; stopped at the end."""

    async def look() -> None:
        while True:
            if engine.state in {EnginePhase.READY, EnginePhase.UNREACHABLE}:
                seen = await engine.client.look()
                engine.progress.see(replace(seen, bound_s=bound_s), time.monotonic())
            await asyncio.sleep(0.05)

    await engine.start()
    tasks = [asyncio.create_task(engine.watch()), asyncio.create_task(look())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await engine.stop()


async def test_a_hung_core_behind_a_healthy_server_is_ended_and_started_anew(
    tmp_path: Path,
) -> None:
    settings = fake_settings(tmp_path, script_option(tmp_path, STALL_ONCE))
    engine = ManagedEngine(settings)
    async with looked_at(engine), asyncio.timeout(40):
        before = read_record(settings.record_path)
        outcome = await engine.client.execute(make_request(row=7))
        assert outcome.kind is OutcomeKind.RETRY
        while engine.state is not EnginePhase.READY or read_record(settings.record_path) == before:
            await asyncio.sleep(0.02)
        assert engine.progress.num_hangs == 1
        assert (await engine.client.execute(make_request(row=7))).kind is OutcomeKind.OK


async def test_an_engine_that_works_for_long_on_one_row_is_left_alone(tmp_path: Path) -> None:
    slow: dict[str, object] = {"match": {"row": 7}, "action": {"delay_s": 1.5}}
    engine = ManagedEngine(fake_settings(tmp_path, script_option(tmp_path, slow)))
    async with looked_at(engine), asyncio.timeout(40):
        assert (await engine.client.execute(make_request(row=7))).kind is OutcomeKind.OK
        assert engine.progress.num_hangs == 0


async def test_an_attached_engine_that_hangs_is_unreachable_and_says_why(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path, script_option(tmp_path, STALL_ONCE))
    managed = ManagedEngine(settings)
    await managed.start()
    url, check_s = settings.base_url, 0.05
    engine = AttachedEngine(AttachedSettings(name="far", url=url, check_interval_s=check_s))
    try:
        async with looked_at(engine), asyncio.timeout(40):
            call = asyncio.create_task(engine.client.execute(make_request(row=7)))
            while engine.state is not EnginePhase.UNREACHABLE:
                await asyncio.sleep(0.02)
            assert "no progress for" in engine.stage
            assert await engine.client.is_healthy()
            call.cancel()
    finally:
        await managed.stop()


async def test_calls_pass_over_an_engine_that_hangs(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as one, running_engine() as two:
        write_upstreams(upstreams, [one.url], is_hung=True)
        async with running_gateway(upstreams) as gateway:
            async with gateway.post(HELLO) as reply:
                assert (reply.status, int(reply.headers["Retry-After"]) > 0) == (503, True)
            write_upstreams(upstreams, [two.url])
            while not two.seen:
                async with gateway.post(HELLO, path=CHAT) as reply:
                    await reply.read()
        assert one.seen == []
