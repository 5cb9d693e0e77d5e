"""A real gateway process in front of real HTTP engines that a test can hold and break."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy

CHAT = "/v1/chat/completions"
OPENING = b"".join(
    b"event: response.%s\ndata: {}\n\n" % name for name in (b"created", b"in_progress")
)
"""What vLLM sends of a response before it asks its core for one."""


@dataclass
class Seen:
    """One call as an engine saw it."""

    path: str
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document


@dataclass
class Engine:
    """Answers by the call's `model`: other names than `tiny` mean trouble."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    reply_headers: dict[str, str] = field(default_factory=dict)
    dies_by: str = ""
    dies_after_s: float = 0.0
    lists_after_s: float = 0.0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.path, request.headers, body))
        self.arrived.set()
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if self.dies_by:
            await asyncio.sleep(self.dies_after_s)
        if self.dies_by == "reset" and request.transport is not None:
            request.transport.abort()
        if self.dies_by:
            return web.json_response({"detail": "EngineCore encountered an issue"}, status=500)
        with suppress(ValueError):
            document = json.loads(body)
            if document.get("model") == "hold":
                await asyncio.Event().wait()
            if document.get("model") == "flat":
                return _flat_error(document)
            if document.get("model") == "torn" and request.transport is not None:
                _answer_in_part(request.transport, document)
                await asyncio.Event().wait()
            if document.get("model") == "blunt":
                shown = str(document)[: document.get("shown", 10**6)]
                return web.json_response({"detail": f"cannot read {shown}"}, status=400)
            if document.get("model") == "silent" and request.transport is not None:
                request.transport.abort()
            if document.get("stream"):
                return await self._stream(request, document)
        return web.json_response(_completion(request.path), headers=self.reply_headers)

    async def _stream(self, request: web.Request, document: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if request.path == "/v1/responses":
            await response.write(OPENING)
        for index in range(document.get("n_chunks", 5)):
            if document["model"] == "gated":
                await self.gate.acquire()
            await response.write(_event(index))
        while document["model"] == "commented":
            await response.write(b": keep-alive\n\n")
            await asyncio.sleep(0.1)
        if document["model"] == "break" and request.transport is not None:
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def has_seen(self, num_calls: int) -> None:
        """Wait until so many calls have arrived."""
        async with asyncio.timeout(20):
            while len(self.seen) < num_calls:
                self.arrived.clear()
                await self.arrived.wait()

    async def models(self, request: web.Request) -> web.Response:
        self.seen.append(Seen(request.raw_path, request.headers, b""))
        await asyncio.sleep(self.lists_after_s)
        ids = ("tiny", "org/name")
        return web.json_response({"object": "list", "data": [_model(name) for name in ids]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.dies_by else 200)


def _event(index: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f"w{index} "}, "finish_reason": None}
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _answer_in_part(transport: asyncio.Transport, document: dict[str, Any]) -> None:
    """And break off, unless the call says otherwise."""
    status, said = document.get("status", "500 Oh"), document.get("said", "{")
    transport.write(f"HTTP/1.1 {status}\r\nContent-Length: 99\r\n\r\n{said}".encode())
    if document.get("breaks_off", True):
        transport.close()


def _flat_error(document: dict[str, Any]) -> web.Response:
    """In pieces or compressed, where the call's `framing` says so, or its `coding` and `coded`."""
    reply = web.json_response({"detail": document.get("said", "Not Found")}, status=404)
    framing = document.get("framing")
    if "coding" in document:
        reply.body = bytes.fromhex(document["coded"])
        reply.headers["Content-Encoding"] = document["coding"]
    if framing == "chunked":
        reply.enable_chunked_encoding()
    elif framing is not None:
        reply.enable_compression(web.ContentCoding(framing))
    return reply


def _completion(path: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": "hello"}
    choice = {"index": 0, "message": message, "text": "hello", "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion" if path == CHAT else "text_completion",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
    }


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1, "owned_by": "tests"}


@asynccontextmanager
async def running_engine(*, port: int = 0) -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application(client_max_size=2**30)
    for path in (CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses"):
        app.router.add_post(path, engine.generate)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/health", engine.health)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@dataclass
class Gateway:
    """A gateway process and a client session."""

    url: str
    process: Process
    session: aiohttp.ClientSession

    def post(self, body: object, *, path: str = CHAT, **kwargs: Any) -> Any:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json"} | kwargs.pop("headers", {})
        return self.session.post(self.url + path, data=data, headers=headers, **kwargs)

    async def raw(self, request: bytes) -> bytes:
        """Send bytes on a connection of their own and return all that comes back."""
        port = int(self.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer


def write_upstreams(
    path: Path,
    urls: Sequence[str],
    *,
    slo_classes: Mapping[str, object] | None = None,
    late_calls: str = "serve",
    **more: object,
) -> None:
    """As the daemon does it: a whole file, renamed into place. `more` is said of every engine."""
    engines = [{"name": f"engine-{i}", "url": url, **more} for i, url in enumerate(urls)]
    new = path.with_suffix(".new")
    document = {
        "engines": engines,
        "daemon": None,
        "slo_classes": slo_classes or {},
        "late_calls": late_calls,
    }
    new.write_text(json.dumps(document))
    new.replace(path)


async def start_gateway(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batchrun.server.gateway", *arguments),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


@asynccontextmanager
async def running_gateway(upstreams: Path, *arguments: str) -> AsyncIterator[Gateway]:
    process = await start_gateway(
        "--listen", "127.0.0.1:0", "--upstreams", str(upstreams), *arguments
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert "http://" in line, (await process.communicate())[1].decode()
    try:
        async with aiohttp.ClientSession() as session:
            yield Gateway(url=line.split()[-1], process=process, session=session)
    finally:
        if process.returncode is None:
            process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), 10)
        if process.returncode is None:
            process.kill()
            await process.communicate()


@asynccontextmanager
async def rig(
    tmp_path: Path, *arguments: str, **known: Any
) -> AsyncIterator[tuple[Engine, Gateway]]:
    """One engine and a gateway in front of it, which knows this of it (see `write_upstreams`)."""
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        write_upstreams(upstreams, [engine.url], **known)
        async with running_gateway(upstreams, *arguments) as gateway:
            yield engine, gateway


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that gives no notice."""
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.05)
