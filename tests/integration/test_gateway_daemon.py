"""What the gateway passes on to the daemon: every byte, both ways, and one secret of its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from gateway_rig import Gateway, running_gateway, until

from batchrun.home import GATEWAY_HEADER, TALLY_PATH

KEY = "only the gateway knows"


@dataclass
class Daemon:
    """Remembers what it was asked; answers with the digest of the body, or with much."""

    seen: list[web.Request] = field(default_factory=list)
    num_hung_up: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        digest = hashlib.sha256()
        try:
            async for chunk in request.content.iter_any():
                digest.update(chunk)
        except (asyncio.CancelledError, ConnectionError):
            self.num_hung_up += 1
            raise
        if "slow" in request.query:
            await self.may_answer.wait()
        if request.path.endswith("/content"):
            return web.Response(body=b"x" * 5_000_000)
        return web.json_response({"sha256": digest.hexdigest()}, headers={"X-Request-Id": "its"})


@asynccontextmanager
async def rig(tmp_path: Path, *arguments: str) -> AsyncIterator[tuple[Daemon, Gateway]]:
    """A gateway in front of a daemon, without engines."""
    daemon = Daemon()
    app = web.Application(client_max_size=2**40)
    app.router.add_route("*", "/{path:.*}", daemon.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstreams = tmp_path / "upstreams.json"
    at = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "gateway_key": KEY}
    upstreams.write_text(json.dumps({"engines": [], "daemon": at}))
    try:
        async with running_gateway(upstreams, *arguments) as gateway:
            yield daemon, gateway
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/batch_x%2Fy/cancel?a=%20b"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PATCH"])
async def test_a_call_goes_on_as_it_was_spelled(tmp_path: Path, method: str, path: str) -> None:
    headers = {"Idempotency-Key": "one", "X-Batchrun-Gateway": "forged", "X-Request-Id": "mine"}
    async with rig(tmp_path) as (daemon, gateway):
        target = gateway.url + path
        async with gateway.session.request(method, target, headers=headers) as reply:
            assert (reply.status, reply.headers["X-Request-Id"]) == (200, "its")

    (seen,) = daemon.seen
    assert (seen.method, seen.raw_path) == (method, path)
    assert seen.headers.getall("X-Batchrun-Gateway") == [KEY]
    assert (seen.headers["Idempotency-Key"], seen.headers["X-Request-Id"]) == ("one", "mine")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_beyond_the_limit_of_online_calls_goes_through(
    tmp_path: Path, *, is_chunked: bool
) -> None:
    piece = bytes(range(256)) * 400
    size_bytes = len(piece) * 100

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield piece

    headers = {} if is_chunked else {"Content-Length": str(size_bytes)}
    async with rig(tmp_path, "--max-body-bytes", "1000") as (daemon, gateway):
        url = gateway.url + "/v1/files"
        async with gateway.session.post(url, data=pieces(), headers=headers) as reply:
            document = await reply.json()

    assert document["sha256"] == hashlib.sha256(piece * 100).hexdigest()
    assert daemon.seen[0].headers.get("Content-Length") == headers.get("Content-Length")


async def test_a_long_answer_comes_whole(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        reply = await gateway.session.get(gateway.url + "/v1/files/file-x/content")
        assert await reply.read() == b"x" * 5_000_000


@pytest.mark.parametrize("path", ["/v1/files", "/dashboard/uploads"])
async def test_an_upload_is_waited_for_as_long_as_the_daemon_lives(
    tmp_path: Path, path: str
) -> None:
    times = ("--daemon-head-s", "0.05", "--body-idle-s", "0.05")
    async with rig(tmp_path, *times) as (daemon, gateway):
        url = f"{gateway.url}{path}?slow"
        upload = asyncio.create_task(gateway.session.post(url, data=b"a" * 100_000))
        await until(lambda: len(daemon.seen) == 1)
        for _ in range(2):
            async with gateway.session.post(gateway.url + "/v1/batches?slow", data=b"{}") as reply:
                assert reply.status == 503
        daemon.may_answer.set()
        async with await upload as reply:
            assert reply.status == 200


async def test_an_upload_that_stalls_is_408_and_breaks_off_at_the_daemon(tmp_path: Path) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc"
    async with rig(tmp_path, "--body-idle-s", "0.2") as (daemon, gateway):
        answer = await gateway.raw(head)
        await until(lambda: daemon.num_hung_up == 1)

    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


async def test_a_caller_that_hangs_up_breaks_off_at_the_daemon(tmp_path: Path) -> None:
    async with rig(tmp_path) as (daemon, gateway):
        _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc")
        await until(lambda: len(daemon.seen) == 1)
        writer.close()
        await until(lambda: daemon.num_hung_up == 1)


async def test_a_call_without_a_body_may_name_any_encoding(tmp_path: Path) -> None:
    async with rig(tmp_path) as (daemon, gateway):
        url, headers = gateway.url + "/v1/files", {"Content-Encoding": "gzip"}
        async with gateway.session.get(url, headers=headers) as reply:
            assert reply.status == 200

    assert len(daemon.seen) == 1


async def test_a_compressed_body_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as (daemon, gateway):
        url, headers = gateway.url + "/v1/files", {"Content-Encoding": "gzip"}
        async with gateway.session.post(url, data=b"x", headers=headers) as reply:
            assert reply.status == 415
            assert (await reply.json())["error"].keys() == {"message", "type", "param", "code"}

    assert daemon.seen == []


async def test_what_the_daemon_asks_is_no_call_of_anybodys(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        for secret, status in ((KEY, 200), ("guessed", 404)):
            shown = {GATEWAY_HEADER: secret}
            async with gateway.session.get(gateway.url + TALLY_PATH, headers=shown) as reply:
                assert reply.status == status
        async with gateway.session.get(gateway.url + "/metrics") as reply:
            page = await reply.text()
    assert re.findall(r'_calls_total{route="other",status="(\d+)"}', page) == ["404"]
