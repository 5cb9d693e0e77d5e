"""Callers who take their time, and headers that say who somebody is: a gateway of its own each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from gateway_rig import CHAT, Gateway, rig

from batchrun.keys import digest, new_key

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
POST = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
IDLE_S = "0.3"
DRIP_S = 0.02
NUM_MORE = 25
"""With `DRIP_S` longer than `IDLE_S`: a second answer would come by then."""


async def drip(gateway: Gateway, start: bytes, pieces: Iterator[bytes]) -> bytes:
    """Send `start` and then a piece now and then, until an error comes and a while longer; all
    answers."""
    port = int(gateway.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()

    async def collect() -> None:
        while piece := await reader.read(65_536):
            answer.extend(piece)

    collecting = asyncio.create_task(collect())
    writer.write(start)
    num_more = NUM_MORE
    with suppress(ConnectionError):
        while num_more and not collecting.done():
            writer.write(next(pieces))
            await writer.drain()
            await asyncio.sleep(DRIP_S)
            num_more -= b"}}" in answer
    writer.transport.abort()
    with suppress(ConnectionError):
        await collecting
    return bytes(answer)


def endless(text: bytes) -> Iterator[bytes]:
    while True:
        yield text


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"G", b"E"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b"X-A: b\r\n"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /", b"a"),
    ],
    ids=["no-line", "no-end", "the-second"],
)
async def test_headers_that_never_end_are_refused(
    tmp_path: Path, start: bytes, piece: bytes
) -> None:
    async with rig(tmp_path, "--body-idle-s", IDLE_S) as (_, gateway):
        answer = await drip(gateway, start, endless(piece))
        async with gateway.post(HELLO) as reply:
            assert reply.status == 200
    last = answer[answer.rindex(b"HTTP/1.") :]
    assert last.split()[1] in {b"408", b"400"}, answer
    assert set(json.loads(last.partition(b"\r\n\r\n")[2])) == {"error"}


async def test_a_body_that_drips_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, "--body-idle-s", IDLE_S) as (engine, gateway):
        for framing, piece in (
            (b"Content-Length: 1000000\r\nConnection: close\r\n\r\n", b"{"),
            (b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n", b"1\r\n{\r\n"),
        ):
            answer = await drip(gateway, POST + framing, endless(piece))
            assert answer.startswith(b"HTTP/1.1 408") and answer.count(b"HTTP/1.") == 1, answer
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert "less than 1024 bytes a second" in error["message"]
        assert engine.seen == []


async def test_a_connection_lives_on_between_calls(tmp_path: Path) -> None:
    """Only a head that has begun must end: who is silent between two calls is not cut off."""
    async with rig(tmp_path, "--body-idle-s", "0.2") as (_, gateway):
        port = int(gateway.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.5)
        writer.close()


async def test_a_caller_who_does_not_read_holds_up_nobody_and_fills_no_memory(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as (engine, gateway):
        port = int(gateway.url.rpartition(":")[2])
        process = psutil.Process(gateway.process.pid)
        body = json.dumps(HELLO | {"stream": True, "n_chunks": 10**9}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await engine.arrived.wait()
        before = process.memory_info().rss
        for _ in range(20):
            async with gateway.post(HELLO) as reply:
                assert reply.status == 200
        assert process.memory_info().rss - before < 50_000_000
        assert not engine.hung_up.is_set()
        writer.transport.abort()
        await asyncio.wait_for(engine.hung_up.wait(), 20)


async def test_many_large_bodies_are_refused_while_small_calls_go_on(tmp_path: Path) -> None:
    """Four of 4 MiB that an engine works at, where all may have 24 MiB, large ones 18."""
    texts, known = [], []
    for number in range(3):
        key_id, text = new_key()
        texts.append({"Authorization": f"Bearer {text}"})
        one = {"id": key_id, "sha256": digest(text), "role": "user", "seq": number + 1}
        known.append(one | {"slo_class": None, "requests_per_minute": None})
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": known}))
    large = {"model": "hold", "text": "x" * (4 * 2**20)}
    options = ("--max-held-bytes", str(24 * 2**20), "--keys", str(keys))
    async with rig(tmp_path, *options) as (engine, gateway):
        held: list[asyncio.Task[int]] = []
        one_more = large | {"model": "tiny"}
        for headers in texts[:2]:
            for _ in range(2):
                held.append(asyncio.create_task(_status(gateway, large, headers)))
                await engine.has_seen(len(held))
            is_last = headers is texts[1]
            why = "calls in flight" if is_last else "calls of this API key in flight"
            assert why in await _refusal(gateway, one_more, texts[2] if is_last else headers)
        for headers in texts:
            assert await _status(gateway, HELLO, headers) == 200
        for call in held:
            call.cancel()
        await asyncio.wait(held)
        async with asyncio.timeout(20):
            while await _status(gateway, one_more, texts[0]) != 200:
                await asyncio.sleep(0.05)


async def _status(gateway: Gateway, body: object, headers: dict[str, str]) -> int:
    async with gateway.post(body, headers=headers) as reply:
        return int(reply.status)


async def _refusal(gateway: Gateway, body: object, headers: dict[str, str]) -> str:
    """Why the call is not taken now."""
    async with gateway.post(body, headers=headers) as reply:
        assert reply.status == 503 and int(reply.headers["Retry-After"]) > 0
        return str((await reply.json())["error"]["message"])


async def test_no_header_says_what_only_the_daemon_may_say(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        for sent in (
            {"X-Vllm-Priority": "-9"},
            {"X-Vllm-Priority": "-9", "X-Data-Parallel-Rank": "0"},
            {"x-vllm-priority": "-9", "Connection": "X-Other"},
            {"X-Batchrun-Gateway": "x", "X-Batchrun-Anything": "x"},
            {"X-Request-Id": "batchrun-1-job_x-1-1"},
            {"Connection": "Authorization, X-Request-Id", "X-Request-Id": "batchrun-1"},
            {"Connection": "close, X-Batchrun-Gateway, Content-Length", "X-Batchrun-Gateway": "x"},
        ):
            async with gateway.post(HELLO, headers=sent) as reply:
                assert reply.status == 200
            seen = {name.lower(): value for name, value in engine.seen[-1].headers.items()}
            assert engine.seen[-1].json == HELLO
            assert "x-vllm-priority" not in seen
            assert "x-data-parallel-rank" not in seen
            assert not any(name.startswith("x-batchrun-") for name in seen)
            assert not seen["x-request-id"].startswith("batchrun")
