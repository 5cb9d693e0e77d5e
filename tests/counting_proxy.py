"""A proxy in front of an engine that notes every execution it lets begin.

`python counting_proxy.py --port PORT --target URL --executions FILE` passes everything through,
streams in both directions, and hangs up on the engine when its own caller hangs up. Each POST that
reached the engine leaves a line `{"request_id": ..., "at": ...}`, as the fake engine writes them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import aiohttp
from aiohttp import web

HOP_BY_HOP = frozenset({
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "transfer-encoding",
})


def make_app(target: str, note: Callable[[str], None]) -> web.Application:
    """The proxy; `note` is called with a request id just before a POST goes to the engine."""

    async def on_connected(
        _session: aiohttp.ClientSession, context: SimpleNamespace, _params: object
    ) -> None:
        request_id = context.trace_request_ctx
        if request_id is not None:
            note(request_id)

    async def client(app: web.Application) -> AsyncIterator[None]:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_end.append(on_connected)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, trace_configs=[tracing], auto_decompress=False
        ) as session:
            app["session"] = session
            yield

    async def forward(request: web.Request) -> web.StreamResponse:
        request_id = request.headers.get("X-Request-Id") if request.method == "POST" else None
        session: aiohttp.ClientSession = request.app["session"]
        try:
            async with session.request(
                request.method,
                target + request.raw_path,
                headers=_end_to_end(request.headers),
                data=await request.read(),
                trace_request_ctx=request_id,
            ) as answer:
                return await _pass_on(request, answer)
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=f"no engine: {error}") from error

    app = web.Application(client_max_size=2**30)
    app.cleanup_ctx.append(client)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
    await response.prepare(request)
    async for chunk in answer.content.iter_any():
        await response.write(chunk)
    return response


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--executions", type=Path, required=True)
    options = parser.parse_args()

    with options.executions.open("a", buffering=1) as file:

        def note(request_id: str) -> None:
            file.write(json.dumps({"request_id": request_id, "at": time.time()}) + "\n")

        web.run_app(
            make_app(options.target, note),
            host="127.0.0.1",
            port=options.port,
            handler_cancellation=True,
            print=None,
        )


if __name__ == "__main__":
    main()
