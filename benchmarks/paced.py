"""An engine that streams at a fixed pace, and callers of it, directly and through a gateway.

    python -m benchmarks.paced --serve PORT
    python -m benchmarks.paced --gateway PORT --direct PORT --out FILE

The engine: `POST /v1/chat/completions` with `max_tokens` N sends N chunks, one each `INTERVAL_S`,
the first at once. Every chunk has its number (`seq`) and the instant of its sending (`sent_ns`,
CLOCK_MONOTONIC, which all processes of a machine share). The callers: each stream makes one call
after the other on its connection, until SIGTERM; then every call and every chunk goes to FILE (see
`Calls`). Chunks are taken apart after the end of their call, so that the clock is read as soon as
bytes arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import signal
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import numpy.typing as npt
import uvloop
from aiohttp import web

MODEL = "paced"
INTERVAL_S = 0.02
CHAT = "/v1/chat/completions"
GATEWAY_STREAMS = 32
DIRECT_STREAMS = 16
"""Fewer than through the gateway: they only show what upstream and client take by themselves."""
CALL_CHUNKS = 50
CALL_LIMIT_S = 60.0
RETRY_S = 0.05
_EVENT = re.compile(rb"data: (\{[^\n]*\}|\[DONE\])\n\n")
_STAMP = re.compile(rb'"seq":(\d+),"sent_ns":(\d+)\}$')
_END = b"\r\n0\r\n\r\n"

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Calls:
    """What became of all calls. Instants are seconds of CLOCK_MONOTONIC.

    `calls` has a row for each: through the gateway (1) or directly (0), begun, seconds to its first
    chunk (NaN: none came), ended, whether it was whole and in order (1 or 0). `chunks` has a row
    for each chunk: through the gateway or directly, sent, seconds until it arrived.
    """

    calls: list[tuple[float, float, float, float, float]] = field(default_factory=list)
    chunks: list[tuple[float, float, float]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write both tables."""
        np.savez(path, calls=np.array(self.calls), chunks=np.array(self.chunks))


def load(path: Path) -> tuple[Floats, Floats]:
    """The tables `calls` and `chunks` of a file."""
    with np.load(path) as tables:
        return tables["calls"], tables["chunks"]


class _Connection(asyncio.Protocol):
    """One connection; a call at a time."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ends: list[int] = []
        self.arrived_s: list[float] = []
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self.arrived_s.append(time.monotonic())
        self.received += data
        self.ends.append(len(self.received))
        if self.received.endswith(_END):
            self._over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._over.set()

    async def exchange(self, request: bytes) -> None:
        """Send a request, wait for the end of its answer or of the connection."""
        assert self._transport is not None
        self.received.clear()
        self.ends.clear()
        self.arrived_s.clear()
        self._over.clear()
        self._transport.write(request)
        await self._over.wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _request() -> bytes:
    messages = [{"role": "user", "content": "A question of about the usual length. " * 20}]
    document = {"model": "paced", "messages": messages, "max_tokens": CALL_CHUNKS, "stream": True}
    body = json.dumps(document).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


REQUEST = _request()


@dataclass(frozen=True, slots=True)
class _Caller:
    """One stream after the other on one connection to `port`, until `stop`."""

    port: int
    is_gateway: bool
    found: Calls
    rng: Random
    stop: asyncio.Event

    async def run(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        connection: _Connection | None = None
        while not self.stop.is_set():
            if connection is None or not connection.is_open:
                connection = await self._connect()
            began_s = time.monotonic()
            if connection is None:
                self.found.calls.append((self.is_gateway, began_s, np.nan, began_s, False))
                await asyncio.sleep(RETRY_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(CALL_LIMIT_S):
                    await connection.exchange(REQUEST)
            _note(self.found, connection, began_s, is_gateway=self.is_gateway)
            await asyncio.sleep(self.rng.uniform(0, INTERVAL_S))
        if connection is not None:
            connection.close()

    async def _connect(self) -> _Connection | None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            _, made = await loop.create_connection(_Connection, "127.0.0.1", self.port)
            return made
        return None


def _note(found: Calls, connection: _Connection, began_s: float, *, is_gateway: bool) -> None:
    ended_s = time.monotonic()
    seqs: list[int] = []
    first_s = np.nan
    events = list(_EVENT.finditer(connection.received))
    for event in events:
        stamp = _STAMP.search(event[1])
        if stamp is None:
            continue
        arrived_s = connection.arrived_s[bisect_left(connection.ends, event.end())]
        if not seqs:
            first_s = arrived_s - began_s
        seqs.append(int(stamp[1]))
        sent_s = int(stamp[2]) / 1e9
        found.chunks.append((is_gateway, sent_s, arrived_s - sent_s))
    is_whole = seqs == list(range(CALL_CHUNKS)) and events[-1][1] == b"[DONE]"
    found.calls.append((is_gateway, began_s, first_s, ended_s, is_whole))
    if not connection.received.endswith(_END):
        connection.close()


async def _call(gateway_port: int, direct_port: int, out: Path) -> None:
    found, stop, rng = Calls(), asyncio.Event(), Random(0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    call_s = CALL_CHUNKS * INTERVAL_S
    through = _Caller(gateway_port, True, found, rng, stop)
    direct = _Caller(direct_port, False, found, rng, stop)
    async with asyncio.TaskGroup() as group:
        for caller, num_streams in ((through, GATEWAY_STREAMS), (direct, DIRECT_STREAMS)):
            for index in range(num_streams):
                group.create_task(caller.run(call_s * index / num_streams))
    found.save(out)


async def generate(request: web.Request) -> web.StreamResponse:
    """A stream of `max_tokens` chunks."""
    num_chunks = int((await request.json())["max_tokens"])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for seq in range(num_chunks):
        await asyncio.sleep(began_s + seq * INTERVAL_S - loop.time())
        await response.write(_event(seq, time.monotonic_ns()))
    await response.write(b"data: [DONE]\n\n")
    return response


def _event(seq: int, sent_ns: int) -> bytes:
    return (
        b'data: {"id":"chatcmpl-paced","object":"chat.completion.chunk","created":1,'
        b'"model":"paced","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
        b'"finish_reason":null}],"seq":%d,"sent_ns":%d}\n\n' % (seq, sent_ns)
    )


async def models(_request: web.Request) -> web.Response:
    """The one model."""
    model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "benchmarks"}
    return web.Response(
        body=json.dumps({"object": "list", "data": [model]}), content_type="application/json"
    )


async def health(_request: web.Request) -> web.Response:
    """Always well."""
    return web.Response()


async def _serve(port: int) -> None:
    app = web.Application()
    app.router.add_post(CHAT, generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed, or call until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", type=int, metavar="PORT")
    parser.add_argument("--gateway", type=int, metavar="PORT")
    parser.add_argument("--direct", type=int, metavar="PORT")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gc.freeze()
    if options.serve is not None:
        uvloop.run(_serve(options.serve))
    else:
        uvloop.run(_call(options.gateway, options.direct, options.out))


if __name__ == "__main__":
    main()
