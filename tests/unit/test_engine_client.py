"""The client against the fake engine's faults: it never raises, and says whose fault it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from conftest import FakeEngineFactory
from engine_builders import make_request

import batchrun.engine.client as client_module
from batchrun.engine.client import EngineClient
from batchrun.engine.fake.script import load_rules
from batchrun.errors import ConfigError, EngineError
from batchrun.types import OutcomeKind
from benchmarks.deployment import free_port

FAULTS = [
    (1, {"status": 429, "retry_after": "7"}, OutcomeKind.BUSY, "FakeError"),
    (2, {"status": 500}, OutcomeKind.RETRY, "FakeError"),
    (3, {"status": 503, "body": "busy"}, OutcomeKind.BUSY, "http_503"),
    (4, {"status": 422}, OutcomeKind.ROW_ERROR, "FakeError"),
    (5, {"status": 401}, OutcomeKind.JOB_ERROR, "FakeError"),
    (6, {"garbage": True}, OutcomeKind.RETRY, "invalid_response"),
    (7, {"drop_connection": True}, OutcomeKind.RETRY, "connection_error"),
    (8, {"finish_reason": "abort"}, OutcomeKind.RETRY, "aborted"),
    (9, {"status": 302}, OutcomeKind.JOB_ERROR, "FakeError"),
]
RULES = tuple({"match": {"row": row}, "action": action} for row, action, _, _ in FAULTS)


@pytest_asyncio.fixture
async def client(fake_engine: FakeEngineFactory) -> AsyncIterator[EngineClient]:
    settings = await fake_engine(
        rules=(*RULES, {"match": {"substring": "sleep"}, "action": {"hang": True}})
    )
    made = EngineClient(settings.base_url)
    yield made
    await made.close()


async def executions(client: EngineClient) -> list[str]:
    url = f"{client.base_url}/fake/executions"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return [entry["request_id"] for entry in (await response.json())["executions"]]


async def test_every_fault_becomes_its_outcome(client: EngineClient) -> None:
    for row, action, kind, code in FAULTS:
        outcome = await client.execute(make_request(row=row))
        assert outcome.error is not None, action
        assert (outcome.kind, outcome.error.code) == (kind, code), action
        assert outcome.row == row


async def test_retry_after_is_passed_on(client: EngineClient) -> None:
    assert (await client.execute(make_request(row=1))).retry_after_s == 7.0


async def test_the_engine_sees_the_request_id(client: EngineClient) -> None:
    await client.execute(make_request(row=40, attempt=2))
    assert await executions(client) == ["batchrun-1-job-40-2"]


async def test_a_refused_request_is_no_execution(client: EngineClient) -> None:
    await client.execute(make_request(row=1))
    assert await executions(client) == []


SLEEPER = make_request(body={"messages": [{"role": "user", "content": "sleep"}]}, row=70)


async def test_a_row_may_wait_while_others_pass(client: EngineClient) -> None:
    hanging = asyncio.create_task(client.execute(SLEEPER))
    for row in range(50, 60):
        assert (await client.execute(make_request(row=row))).kind is OutcomeKind.OK
    assert SLEEPER.request_id in await executions(client)
    assert not hanging.done()
    hanging.cancel()


async def test_closing_ends_what_is_in_flight_as_lost(client: EngineClient) -> None:
    hanging = asyncio.create_task(client.execute(SLEEPER))
    await client.execute(make_request(row=51))
    await client.close()
    outcome = await hanging
    assert outcome.kind is OutcomeKind.RETRY
    assert outcome.error is not None
    assert outcome.error.code == "connection_error"


async def test_a_refused_connection_names_the_engine() -> None:
    client = EngineClient(f"http://127.0.0.1:{free_port()}")
    outcome = await client.execute(make_request())
    assert outcome.kind is OutcomeKind.RETRY
    assert outcome.error is not None
    assert client.base_url in outcome.error.message
    assert not await client.is_healthy()
    with pytest.raises(EngineError, match="no answer from the engine at http://127"):
        await client.models()
    await client.close()


@pytest.mark.parametrize("body", [{"x": float("nan")}, {"x": {1, 2}}])
async def test_a_body_that_is_no_json_is_the_rows_fault(body: dict[str, object]) -> None:
    client = EngineClient("http://127.0.0.1:9")
    outcome = await client.execute(make_request(body=body))
    assert outcome.kind is OutcomeKind.ROW_ERROR
    await client.close()


async def test_a_lone_surrogate_still_reaches_the_engine(client: EngineClient) -> None:
    messages = [{"role": "user", "content": "half \ud83d of an emoji"}]
    request = make_request(row=60, body={"messages": messages})
    assert (await client.execute(request)).kind is OutcomeKind.OK


async def test_an_endless_reply_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_RESPONSE_BYTES", 1000)

    async def reply(_request: web.Request) -> web.Response:
        return web.json_response({"choices": ["x" * 5000]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    client = EngineClient(f"http://127.0.0.1:{port}")
    outcome = await client.execute(make_request())
    await client.close()
    await runner.cleanup()
    assert outcome.error is not None
    assert outcome.error.code == "response_too_large"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        EngineClient(url)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_end_in_v1(url: str) -> None:
    assert EngineClient(url).base_url == "http://h:1"


async def test_a_fault_with_times_is_not_repeated_after_a_restart(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"action": {"status": 500}, "times": 2}]))
    first = load_rules(script).choose(request_id="a", body=b"")
    second, third = (load_rules(script).choose(request_id="b", body=b"") for _ in range(2))
    assert [first.status, second.status, third.status] == [500, 500, None]


async def test_a_long_reply_is_taken_in_within_the_room_for_it() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def room() -> AsyncIterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    async def reply(request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"choices": [{"text": "x" * body["length"]}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    client = EngineClient(f"http://127.0.0.1:{port}")
    for length, marks in ((1_000, []), (200_000, ["in", "out"])):
        outcome = await client.execute(make_request(body={"length": length}), room=room)
        assert outcome.kind is OutcomeKind.OK and seen == marks
    await client.close()
    await runner.cleanup()


async def test_a_long_reply_that_drips_is_broken_off_and_the_wait_for_room_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_SLOW_S", 0.3)

    @asynccontextmanager
    async def room() -> AsyncIterator[None]:
        await asyncio.sleep(0.6)
        yield

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x" * 70_000)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.05)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", drip)
    async with TestServer(app) as server:
        client = EngineClient(str(server.make_url("")).rstrip("/"))
        async with asyncio.timeout(20):
            outcome = await client.execute(make_request(), timeout_s=0.5, room=room)
        await client.close()

    assert outcome.kind is OutcomeKind.RETRY and outcome.error is not None
    assert "it came too slowly" in outcome.error.message


async def test_a_reply_that_nobody_asked_for_is_no_answer_to_the_next_row() -> None:
    """It lies on the connection when the next row goes."""

    async def answer_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split()[0])
                await reader.readexactly(length)
                row = head.split(b"batchrun-1-job-")[1].split(b"-")[0].decode()
                body = json.dumps({"choices": [{"message": {"content": row}}]}).encode()
                reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
                writer.write(reply)
                await asyncio.sleep(0.05)
                writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer_twice, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        for row in range(3):
            outcome = await client.execute(make_request(row=row))
            assert (
                outcome.body
                == json.dumps({"choices": [{"message": {"content": str(row)}}]}).encode()
            )
            await asyncio.sleep(0.3)
    finally:
        await client.close()
        server.close()


async def test_a_row_that_is_tried_again_goes_over_a_connection_of_its_own() -> None:
    """This engine has sent something twice on each connection, so that all after it are behind."""
    last_ids: dict[object, str] = {}

    async def answer_the_one_before(request: web.Request) -> web.Response:
        own = request.headers["X-Request-Id"]
        late = last_ids.get(request.transport, own)
        last_ids[request.transport] = own
        return web.json_response({"id": late, "choices": [{"message": {"content": "x"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer_the_one_before)
    async with TestServer(app) as server:
        client = EngineClient(str(server.make_url("")).rstrip("/"))
        tries = [(0, 1), (1, 1), (1, 2), (1, 3)]
        kinds = [
            (await client.execute(make_request(row=row, attempt=attempt))).kind
            for row, attempt in tries
        ]
        await client.close()

    assert kinds == [OutcomeKind.OK, OutcomeKind.RETRY, OutcomeKind.OK, OutcomeKind.OK]
