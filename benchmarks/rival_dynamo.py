"""Dynamo's choice of an engine behind HTTP: its `SelectionService`, which is Rust, and a proxy.

    PYTHON_WITH_DYNAMO benchmarks/rival_dynamo.py --port N --engines PORT ... --events PORT ...

Run by the Python that has `ai-dynamo-runtime`; nothing of batchrun is imported. Every call is
booked, told when its first token came, and freed at its end; Dynamo learns what engines hold from
their KV events. Tokens are made of the text as `benchmarks.rival_engines` makes them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from itertools import count

import aiohttp
import numpy as np
from aiohttp import web

os.environ.setdefault("DYN_LOG", "error")
from dynamo._core import SelectionService

MODEL = "light"
UNIT_TOKENS = 64
KV_BLOCKS = 2150
BUDGET_TOKENS = 2048
TOKEN_CHARS = 4


class Proxy:
    """Sends each call where Dynamo says."""

    def __init__(self) -> None:
        self.service = SelectionService()
        self._numbers = count()
        self._session: aiohttp.ClientSession | None = None

    async def add_engine(self, number: int, port: int, events_port: int) -> None:
        """Make an engine known."""
        events = f"tcp://127.0.0.1:{events_port}"
        await self.service.upsert_worker({
            "worker_id": number,
            "model_name": MODEL,
            "endpoint": f"http://127.0.0.1:{port}",
            "block_size": UNIT_TOKENS,
            "kv_events_endpoint": events,
            "kv_events_endpoints": {0: events},
            "total_kv_blocks": KV_BLOCKS,
            "max_num_batched_tokens": BUDGET_TOKENS,
        })

    async def models(self, _request: web.Request) -> web.Response:
        """That calls can come."""
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Choose, pass on, and keep the book."""
        body = await request.read()
        text = "".join(each["content"] for each in json.loads(body)["messages"]).encode()
        whole = len(text) // TOKEN_CHARS * TOKEN_CHARS
        name = str(next(self._numbers))
        chosen = await self.service.select_and_reserve({
            "model_name": MODEL,
            "selection_id": name,
            "token_ids": np.frombuffer(text[:whole], "<u4").tolist(),
        })
        try:
            return await self._pass(request, chosen["endpoint"], body, name)
        finally:
            await self.service.free_reservation(name)

    async def _pass(
        self, request: web.Request, endpoint: str, body: bytes, name: str
    ) -> web.StreamResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        is_first = True
        url, headers = f"{endpoint}/v1/chat/completions", {"Content-Type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as answer:
            await reply.prepare(request)
            async for piece in answer.content.iter_any():
                if is_first:
                    is_first = False
                    await self.service.prefill_complete(name)
                await reply.write(piece)
        await reply.write_eof()
        return reply


async def _serve(port: int, engines: list[int], events: list[int]) -> None:
    proxy = Proxy()
    for number, ports in enumerate(zip(engines, events, strict=True), start=1):
        await proxy.add_engine(number, *ports)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_post("/v1/chat/completions", proxy.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    """Serve until the process is ended."""
    made = argparse.ArgumentParser(description="Dynamo's choice of an engine behind HTTP")
    made.add_argument("--port", type=int, required=True)
    made.add_argument("--engines", type=int, nargs="+", required=True)
    made.add_argument("--events", type=int, nargs="+", required=True)
    options = made.parse_args()
    asyncio.run(_serve(options.port, options.engines, options.events))


if __name__ == "__main__":
    main()
