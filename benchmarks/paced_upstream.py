"""An engine for measurements that streams at a fixed pace: each chunk says when it was sent.

    python -m benchmarks.paced_upstream --port PORT

`POST /v1/chat/completions` with `max_tokens` N sends N chunks, one each `INTERVAL_S`, the first at
once. Every chunk has its number (`seq`) and the instant of its sending (`sent_ns`, CLOCK_MONOTONIC,
which all processes of a machine share).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time

import uvloop
from aiohttp import web

MODEL = "paced"
INTERVAL_S = 0.02
CHAT = "/v1/chat/completions"


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
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    gc.freeze()
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
