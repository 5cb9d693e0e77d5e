"""Parts that live and do nothing: a worker of the gateway, and the daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from deployment_rig import DeploymentRig
from gateway_rig import running_engine, running_gateway, until, write_upstreams

HANG_S = 240


async def test_a_stuck_worker_is_ended_and_replaced(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        write_upstreams(upstreams, [engine.url])
        async with running_gateway(upstreams, "--workers", "2") as gateway:
            first = set(psutil.Process(gateway.process.pid).children())
            stuck, other = first
            stuck.send_signal(signal.SIGSTOP)
            await until(lambda: not stuck.is_running())
            await until(lambda: len(_workers(gateway.process.pid)) == 2)

            assert other in _workers(gateway.process.pid)
            for _ in range(8):
                async with aiohttp.ClientSession() as session:
                    with suppress(aiohttp.ClientConnectorError):
                        async with session.get(gateway.url + "/healthz") as reply:
                            assert reply.status == 200


def _workers(pid: int) -> set[psutil.Process]:
    """The workers of a gateway that run."""
    children = psutil.Process(pid).children()
    return {each for each in children if each.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_daemon_that_does_not_answer_is_503_in_bounded_time(
    tmp_path: Path, method: str
) -> None:
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_route(method, "/v1/batches", hang)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    upstreams = tmp_path / "upstreams.json"
    upstreams.write_text(json.dumps({"engines": [], "daemon": {"url": url}}))
    try:
        async with running_gateway(upstreams, "--daemon-head-s=0.3") as gateway:
            call = gateway.session.request(method, gateway.url + "/v1/batches", json={"a": 1})
            async with asyncio.timeout(20), call as reply:
                assert reply.status == 503 and int(reply.headers["Retry-After"]) > 0
    finally:
        await runner.cleanup()


async def test_calls_to_a_daemon_that_does_nothing_are_503_long_before_their_time(
    tmp_path: Path,
) -> None:
    """It takes connections, as the kernel does for a process that is stopped, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        url = f"http://127.0.0.1:{stuck.getsockname()[1]}"
        upstreams = tmp_path / "upstreams.json"
        upstreams.write_text(json.dumps({"engines": [], "daemon": {"url": url}}))
        async with running_gateway(upstreams, f"--daemon-head-s={HANG_S}") as gateway:
            calls = [gateway.session.get(gateway.url + "/v1/files") for _ in range(5)]
            async with asyncio.timeout(HANG_S / 2):
                replies = await asyncio.gather(*calls)
    assert {reply.status for reply in replies} == {503}
    assert all(int(reply.headers["Retry-After"]) > 0 for reply in replies)


@pytest.mark.nightly
def test_up_beside_a_stopped_daemon_says_so_and_down_ends_it(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    os.kill(rig.pid_of("daemon"), signal.SIGSTOP)
    began_s = time.monotonic()
    code, line = rig.refuse("up", "-d")

    assert code == 4 and "gave no answer within 10 s; `batchrun down` ends it" in line
    assert time.monotonic() - began_s < 60
    assert "gave no answer within 5 s" in rig.ask("status")["stalled"]
    assert "daemon" in rig.ask("down")["stopped"]
