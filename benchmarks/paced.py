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
import re
import signal
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random

import aiohttp
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
REQUEST = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "A question of about the usual length. " * 20}],
    "max_tokens": CALL_CHUNKS,
    "stream": True,
}

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
        url, limit = f"http://127.0.0.1:{self.port}{CHAT}", aiohttp.ClientTimeout(CALL_LIMIT_S)
        async with aiohttp.ClientSession(timeout=limit) as session:
            while not self.stop.is_set():
                began_s = time.monotonic()
                parts: list[tuple[float, bytes]] = []
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.post(url, json=REQUEST) as reply:
                        async for data in reply.content.iter_any():
                            parts.append((time.monotonic(), data))
                self._note(began_s, time.monotonic(), parts)
                await asyncio.sleep(self.rng.uniform(0, INTERVAL_S) if parts else RETRY_S)

    def _note(self, began_s: float, ended_s: float, parts: list[tuple[float, bytes]]) -> None:
        """A call whose answer came in `parts`, each with the instant of its arrival."""
        ends = list(accumulate(len(data) for _, data in parts))
        seqs: list[int] = []
        first_s = np.nan
        events = list(_EVENT.finditer(b"".join(data for _, data in parts)))
        for event in events:
            stamp = _STAMP.search(event[1])
            if stamp is None:
                continue
            arrived_s, sent_s = parts[bisect_left(ends, event.end())][0], int(stamp[2]) / 1e9
            if not seqs:
                first_s = arrived_s - began_s
            seqs.append(int(stamp[1]))
            self.found.chunks.append((self.is_gateway, sent_s, arrived_s - sent_s))
        is_whole = seqs == list(range(CALL_CHUNKS)) and events[-1][1] == b"[DONE]"
        self.found.calls.append((self.is_gateway, began_s, first_s, ended_s, is_whole))


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
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def health(_request: web.Request) -> web.Response:
    """Always well."""
    return web.Response()


def _serve(port: int) -> None:
    app = web.Application()
    app.router.add_post(CHAT, generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        backlog=1024,
        access_log=None,
        handler_cancellation=True,
        print=None,
        loop=uvloop.new_event_loop(),
    )


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
        _serve(options.serve)
    else:
        uvloop.run(_call(options.gateway, options.direct, options.out))


if __name__ == "__main__":
    main()
