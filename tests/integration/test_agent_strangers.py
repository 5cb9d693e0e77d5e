"""Whoever comes to an agent's port without the secret changes nothing, whatever he sends."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from agent_rig import AgentRig
from engine_builders import make_request

from batchrun.engine.agent import messages
from batchrun.engine.agent.engine import AgentEngine
from batchrun.engine.agent.remote import AgentAddress
from batchrun.mutual_tls import client_context
from batchrun.types import OutcomeKind

OWN_ROUTES = (messages.STOP, messages.DRAIN, messages.LINK, messages.STATE, "/v1/completions")
NUM_AT_ONCE = 50


@pytest.fixture
def rig(tmp_path: Path) -> AgentRig:
    return AgentRig(tmp_path)


def trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    """Believes every server."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.parametrize("who", ["without a secret", "with another secret", "in the clear"])
async def test_strangers_get_no_reply(rig: AgentRig, who: str) -> None:
    tls = trusting(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    if who == "with another secret":
        tls = trusting(client_context(b"another secret of thirty-two bytes"))
    url = rig.url.replace("https", "http") if who == "in the clear" else rig.url
    async with still_the_same(rig), aiohttp.ClientSession() as session:
        for route in OWN_ROUTES:
            for method in ("GET", "POST"):
                with pytest.raises((aiohttp.ClientError, OSError)):
                    await session.request(method, url + route, ssl=tls)


async def test_what_was_recorded_of_a_connection_opens_no_other(rig: AgentRig) -> None:
    async with still_the_same(rig):
        recorded = await record_a_call(rig)
        assert len(recorded) > 800
        for cut in (len(recorded), len(recorded) // 2, 300):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(recorded[:cut])
            writer.write_eof()
            reply = await reader.read()
            writer.close()
            assert b"held_rows" not in reply


@pytest.mark.parametrize(
    "num_bodies",
    [1_000, pytest.param(100_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)])],
)
async def test_random_bytes_change_nothing(rig: AgentRig, num_bodies: int) -> None:
    rng = random.Random(17)
    async with still_the_same(rig):
        for _ in range(0, num_bodies, NUM_AT_ONCE):
            bodies = [random_body(rng) for _ in range(NUM_AT_ONCE)]
            await asyncio.gather(*(send(rig.port, body) for body in bodies))


async def test_a_holder_of_the_secret_who_talks_nonsense_is_shown_out(rig: AgentRig) -> None:
    rng = random.Random(17)
    tls = client_context(rig.secret)
    async with still_the_same(rig), aiohttp.ClientSession() as session:
        for _ in range(30):
            async with session.ws_connect(rig.url + messages.LINK, ssl=tls) as socket:
                await socket.send_bytes(rng.randbytes(rng.randrange(1, 2_000)))
                async for _frame in socket:
                    pass


@asynccontextmanager
async def still_the_same(rig: AgentRig) -> AsyncIterator[None]:
    """After the block the agent and its engine are those from before, and work."""
    async with rig.running():
        engine = AgentEngine(AgentAddress(name="a", url=rig.url, secret_file=rig.secret_file))
        await engine.start()
        before = engine.client.state
        await engine.client.close()
        yield
        async with rig.connected() as again:
            assert again.client.state == before
            assert (await again.client.execute(make_request(row=1))).kind is OutcomeKind.OK


async def record_a_call(rig: AgentRig) -> bytes:
    """The bytes that a holder of the secret sends for one call."""
    recorded = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", rig.port)

        async def back() -> None:
            while chunk := await their_reader.read(4096):
                writer.write(chunk)
            writer.close()

        returning = asyncio.create_task(back())
        while chunk := await reader.read(4096):
            recorded.extend(chunk)
            their_writer.write(chunk)
        their_writer.close()
        await asyncio.wait([returning])

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as session:
        port = cast("tuple[str, int]", server.sockets[0].getsockname())[1]
        url = f"https://127.0.0.1:{port}{messages.STATE}"
        async with session.get(url, ssl=client_context(rig.secret)) as reply:
            assert "held_rows" in await reply.json()
    return bytes(recorded)


def random_body(rng: random.Random) -> bytes:
    """Noise, noise behind the head of a TLS record, or an HTTP call with noise in it."""
    noise = rng.randbytes(rng.randrange(1, 3_000))
    record = bytes([rng.choice((20, 21, 22, 23)), 3, rng.randrange(4)]) + len(noise).to_bytes(2)
    call = (
        f"POST {rng.choice(OWN_ROUTES)} HTTP/1.1\r\nContent-Length: {len(noise)}\r\n\r\n".encode()
    )
    return rng.choice((b"", record, call)) + noise


async def send(port: int, body: bytes) -> None:
    """Send bytes, and read until the other end has had enough."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        writer.write(body)
        writer.write_eof()
        await reader.read()
    writer.close()
