"""Light engines behind HTTP, in real time: what routers of any make can be put in front of.

    python -m benchmarks.rival_engines --ports N N ... --speed X [--events N N ...]

Each port is an engine of `benchmarks.light_engines`, so many times as fast as the virtual A100. A
prompt is text, four characters a token; the last six are the length of the answer, which is thus in
no field that a router reads. `--events` are ports for KV events as vLLM publishes them, one an
engine. `GET /stats` tells how many calls and tokens an engine had, and how many were cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import uvloop
import xxhash
from aiohttp import web
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from benchmarks.light_engines import KV_TOKENS, UNIT_TOKENS, LightCall, LightEngine

MODEL = "light"
TOKEN_CHARS = 4
UNIT_CHARS = UNIT_TOKENS * TOKEN_CHARS
LENGTH_CHARS = 6
MAX_BODY_BYTES = 1 << 24


def keys_of(text: bytes) -> list[int]:
    """Chained keys of the full units of a prompt."""
    hashed, keys = xxhash.xxh3_64(), []
    for end in range(UNIT_CHARS, len(text) + 1, UNIT_CHARS):
        hashed.update(text[end - UNIT_CHARS : end])
        keys.append(hashed.intdigest() >> 1)
    return keys


def tokens_of(text: bytes) -> list[int]:
    """The token ids of a prompt's whole tokens; text is ASCII, so they have 31 bits."""
    whole = len(text) // TOKEN_CHARS * TOKEN_CHARS
    ids: list[int] = np.frombuffer(text[:whole], "<u4").tolist()
    return ids


class Events:
    """Tells an engine's KV events to whoever listens at a port."""

    def __init__(self, port: int) -> None:
        self._publisher = ZmqEventPublisher(0, f"tcp://127.0.0.1:{port}")
        self._blocks: dict[int, tuple[int | None, list[int]]] = {}
        self._held: set[int] = set()

    def note(self, keys: Sequence[int], tokens: Sequence[int]) -> None:
        """What a prompt's blocks are made of, before the engine holds them."""
        for number, key in enumerate(keys):
            begin = number * UNIT_TOKENS
            parent = keys[number - 1] if number else None
            self._blocks[key] = (parent, list(tokens[begin : begin + UNIT_TOKENS]))

    def tell(self, held: set[int], in_order: Iterable[int]) -> None:
        """The changes since the last call; new blocks are told `in_order`, parents first."""
        gone: list[bytes | int] = list(self._held - held)
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if gone:
            events.append(BlockRemoved(block_hashes=gone, medium="GPU"))
        for key in in_order:
            if key in held and key not in self._held:
                self._held.add(key)
                events.append(self._stored(key))
        self._held = set(held)
        if events:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def _stored(self, key: int) -> BlockStored:
        parent, tokens = self._blocks[key]
        return BlockStored(
            block_hashes=[key],
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=UNIT_TOKENS,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )


@dataclass(slots=True)
class Stats:
    """What an engine has had."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class RealTimeEngine:
    """A light engine whose steps end when the clock says so; `serve` runs it for ever."""

    engine: LightEngine
    events: Events | None = None
    stats: Stats = field(default_factory=Stats)
    num_steps: int = 0
    _answers: dict[LightCall, asyncio.Queue[bool]] = field(default_factory=dict)
    _has_work: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, text: bytes) -> tuple[LightCall, asyncio.Queue[bool]]:
        """Take a call; the queue gets an item for each token, True with the last one.

        Raises ValueError where the text does not end with the length of an answer.
        """
        keys, num_output = keys_of(text), int(text[-LENGTH_CHARS:])
        units = np.array(keys, np.uint64)
        call = LightCall(time.monotonic(), len(text) // TOKEN_CHARS, num_output, units)
        if self.events is not None:
            self.events.note(keys, tokens_of(text))
        answer: asyncio.Queue[bool] = asyncio.Queue()
        self._answers[call] = answer
        self.engine.waiting.append(call)
        self._has_work.set()
        return call, answer

    async def serve(self) -> None:
        """Step after step, each told when its time is over."""
        while True:
            if not self.engine.has_work:
                self._has_work.clear()
                await self._has_work.wait()
                self.engine.now_s = max(self.engine.now_s, time.monotonic())
            decoding = self.engine.decoding
            self.engine.step()
            self.num_steps += 1
            await asyncio.sleep(self.engine.now_s - time.monotonic())
            self._tell(decoding)

    def _tell(self, decoding: Sequence[LightCall]) -> None:
        ended = set(self.engine.ended)
        started = list(self.engine.started)
        self.engine.ended.clear()
        self.engine.started.clear()
        for call in (*decoding, *started):
            self._answers[call].put_nowait(call in ended)
        for call in started:
            self.stats.calls += 1
            self.stats.prompt_tokens += call.prompt_tokens
            self.stats.cached_tokens += call.cached_tokens
        for call in ended:
            del self._answers[call]
        if self.events is not None:
            in_order = (key for call in started for key in call.units.tolist())
            self.events.tell(self.engine.held_units, in_order)


def build_app(served: RealTimeEngine) -> web.Application:
    """The routes of vLLM that routers use."""

    async def ok(_request: web.Request) -> web.Response:
        return web.Response()

    async def models(_request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "batchrun"}
        return web.json_response({"object": "list", "data": [model | {"max_model_len": 65_536}]})

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=_page(served))

    async def stats(_request: web.Request) -> web.Response:
        found = served.stats
        return web.json_response({
            "calls": found.calls,
            "prompt_tokens": found.prompt_tokens,
            "cached_tokens": found.cached_tokens,
        })

    async def chat(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        text = "".join(message["content"] for message in body["messages"]).encode()
        try:
            call, answer = served.begin(text)
        except ValueError:
            raise web.HTTPBadRequest(text="the prompt does not end with a length") from None
        return await _answer(request, call, answer)

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/health", ok)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/stats", stats)
    app.router.add_post("/v1/chat/completions", chat)
    return app


async def _answer(
    request: web.Request, call: LightCall, answer: asyncio.Queue[bool]
) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    head = f'data: {{"id":"c-{id(call)}","object":"chat.completion.chunk","created":0,'
    head += f'"model":"{MODEL}",'
    is_last = False
    while not is_last:
        is_last = await answer.get()
        reason = '"length"' if is_last else "null"
        delta = '"delta":{"content":"word "}'
        choice = f'"choices":[{{"index":0,{delta},"finish_reason":{reason}}}]}}'
        await reply.write(f"{head}{choice}\n\n".encode())
    usage = {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.output_tokens,
        "total_tokens": call.prompt_tokens + call.output_tokens,
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }
    end = f'{head}"choices":[],"usage":{json.dumps(usage)}}}\n\ndata: [DONE]\n\n'
    await reply.write(end.encode())
    await reply.write_eof()
    return reply


def _page(served: RealTimeEngine) -> str:
    """As much of vLLM's metrics as routers read."""
    labels = f'{{model_name="{MODEL}"}}'
    num_blocks = KV_TOKENS // UNIT_TOKENS
    kv = f'block_size="{UNIT_TOKENS}",num_gpu_blocks="{num_blocks}"'
    used = len(served.engine.held_units) / num_blocks
    return (
        f"vllm:num_requests_running{labels} {served.engine.num_running}\n"
        f"vllm:num_requests_waiting{labels} {len(served.engine.waiting)}\n"
        f"vllm:kv_cache_usage_perc{labels} {used:.4f}\n"
        f"vllm:iteration_tokens_total_count{labels} {served.num_steps}\n"
        f'vllm:cache_config_info{{{kv},enable_prefix_caching="True"}} 1.0\n'
    )


async def _serve(ports: Sequence[int], speed: float, events: Sequence[int]) -> None:
    served = [
        RealTimeEngine(LightEngine(number, speed), Events(events[number]) if events else None)
        for number in range(len(ports))
    ]
    for each, port in zip(served, ports, strict=True):
        runner = web.AppRunner(build_app(each), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.gather(*(each.serve() for each in served))


def main() -> None:
    """Serve until the process is ended."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--ports", type=int, nargs="+", required=True)
    made.add_argument("--speed", type=float, default=1.0)
    made.add_argument("--events", type=int, nargs="+", default=())
    options = made.parse_args()
    uvloop.run(_serve(options.ports, options.speed, options.events))


if __name__ == "__main__":
    main()
