"""`python -m batchrun.engine.fake --port PORT`: the fake engine's process and its HTTP side."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from batchrun.engine.door import KEY_VARIABLE, REFUSAL, is_let_in
from batchrun.engine.fake.answers import (
    BLOCK_TOKENS,
    FakeAnswer,
    FakeCall,
    PrefixCache,
    RefusedError,
    chunks,
    embeddings_reply,
    generate,
    parse_body,
    parse_call,
    parse_prompts,
    whole_reply,
)
from batchrun.engine.fake.script import Action, RuleBook, append_line, load_rules
from batchrun.errors import InputError

MAX_BODY_BYTES = 64 * 1024 * 1024
_EXIT_CODE = 86
_STARTED_AT = time.time()
_STEPS_PER_S = 100
_CACHE_BLOCKS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSettings:
    """How the fake engine behaves: `executions` is a file that notes what begins, `latency_s` comes
    before the first token, `api_key` is asked for on every route but `/health`."""

    model: str = "fake"
    rules: RuleBook = field(default_factory=lambda: RuleBook(()))
    executions: Path | None = None
    latency_s: float = 0.0
    tokens_per_s: float | None = None
    max_model_tokens: int = 8_192
    api_key: str | None = field(default=None, repr=False)


def build_app(settings: FakeSettings) -> web.Application:
    """The application; run it with `handler_cancellation`, so that a hang-up ends its request."""
    engine = _FakeServer(settings)
    middlewares: list[Middleware] = [_refusals]
    if settings.api_key:
        middlewares.insert(0, _door(settings.api_key))
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
    app.router.add_get("/health", engine.health)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/fake/executions", engine.executions)
    app.router.add_post("/v1/chat/completions", partial(engine.generate, is_chat=True))
    app.router.add_post("/v1/completions", partial(engine.generate, is_chat=False))
    app.router.add_post("/v1/embeddings", engine.embeddings)
    return app


class _FakeServer:
    def __init__(self, settings: FakeSettings) -> None:
        self._settings = settings
        self._cache = PrefixCache(_CACHE_BLOCKS)
        self._executions: list[dict[str, object]] = []
        self._num_running = 0
        self._stalled_at_s: float | None = None

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _request: web.Request) -> web.Response:
        labels = f'{{model_name="{self._settings.model}"}}'
        kv = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{_CACHE_BLOCKS}"'
        now_s = time.monotonic() if self._stalled_at_s is None else self._stalled_at_s
        return web.Response(
            text=f"process_start_time_seconds {_STARTED_AT}\n"
            f"vllm:num_requests_running{labels} {self._num_running}\n"
            f"vllm:iteration_tokens_total_count{labels} {now_s * _STEPS_PER_S:.0f}\n"
            f'vllm:cache_config_info{{{kv},enable_prefix_caching="True"}} 1.0\n'
        )

    async def models(self, _request: web.Request) -> web.Response:
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "batchrun",
            "max_model_len": self._settings.max_model_tokens,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def executions(self, _request: web.Request) -> web.Response:
        return web.json_response({"count": len(self._executions), "executions": self._executions})

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        model = self._settings.model
        inputs = parse_prompts(parse_body(await request.read(), model), "input")

        async def answer(_action: Action) -> web.StreamResponse:
            reply_id = f"embd-{_request_id(request)}"
            return web.json_response(embeddings_reply(inputs, reply_id=reply_id, model=model))

        return await self._execute(request, answer)

    async def generate(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        body = parse_body(await request.read(), self._settings.model)
        limit = self._settings.max_model_tokens
        call = parse_call(body, is_chat=is_chat, max_model_tokens=limit)

        async def answer(action: Action) -> web.StreamResponse:
            made = self._answer(call, _request_id(request), action)
            if call.stream:
                return await self._stream(request, made)
            await self._decode(made.num_output_tokens)
            return web.json_response(whole_reply(made))

        return await self._execute(request, answer)

    async def _execute(
        self, request: web.Request, answer: Callable[[Action], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        request_id, body = _request_id(request), await request.read()
        action = self._settings.rules.choose(request_id=request_id, body=body)
        if action.status is None:
            self._note_execution(request)
        self._num_running += 1
        try:
            if action.stall and self._stalled_at_s is None:
                self._stalled_at_s = time.monotonic()
            if self._stalled_at_s is not None:
                await asyncio.Event().wait()
            await asyncio.sleep(action.delay_s)
            fault = await _fault(request, action)
            if fault is not None:
                return fault
            await asyncio.sleep(self._settings.latency_s)
            return await answer(action)
        finally:
            self._num_running -= 1

    def _answer(self, call: FakeCall, request_id: str, action: Action) -> FakeAnswer:
        prefix = "chatcmpl" if call.is_chat else "cmpl"
        model, limit = self._settings.model, self._settings.max_model_tokens
        return FakeAnswer(
            head={"id": f"{prefix}-{request_id}", "created": int(time.time()), "model": model},
            call=call,
            choices=generate(call, max_model_tokens=limit, finish_reason=action.finish_reason),
            num_cached_tokens=sum(self._cache.admit(prompt) for prompt in call.prompts),
        )

    async def _stream(self, request: web.Request, answer: FakeAnswer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks(answer):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await self._decode(1)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _decode(self, num_tokens: int) -> None:
        if self._settings.tokens_per_s:
            await asyncio.sleep(num_tokens / self._settings.tokens_per_s)

    def _note_execution(self, request: web.Request) -> None:
        entry = {"request_id": _request_id(request), "path": request.path, "at": time.time()}
        self._executions.append(entry)
        if self._settings.executions is not None:
            append_line(self._settings.executions, json.dumps(entry))


async def _fault(request: web.Request, action: Action) -> web.StreamResponse | None:
    if action.die:
        os._exit(_EXIT_CODE)
    if action.hang:
        await asyncio.Event().wait()
    if action.drop_connection and request.transport is not None:
        request.transport.abort()
    if action.garbage:
        return web.Response(text="<html>this is not JSON</html>", content_type="application/json")
    if action.status is None:
        return None
    headers = {"Retry-After": action.retry_after} if action.retry_after else {}
    text = action.body or _error_text(f"scripted HTTP {action.status}", action.status, None)
    return web.Response(
        status=action.status, text=text, headers=headers, content_type="application/json"
    )


def _door(key: str) -> Middleware:
    """Asks for `key`, as engines do that batchrun starts."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if is_let_in(request.path, given, key):
            return await handler(request)
        return web.Response(status=401, body=REFUSAL, content_type="application/json")

    return check


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as error:
        text = _error_text(str(error), error.status, error.param)
        return web.Response(status=error.status, text=text, content_type="application/json")


def _error_text(message: str, status: int, param: str | None) -> str:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "FakeError")
    fields = {"message": message, "type": kind, "param": param, "code": status}
    return json.dumps({"error": fields})


def _request_id(request: web.Request) -> str:
    found: object = request.get("request_id")
    if not isinstance(found, str):
        found = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        request["request_id"] = found
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM. Returns the exit code."""
    options = _parse(arguments)
    try:
        rules = load_rules(options.script) if options.script else RuleBook(())
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    names = ("model", "executions", "latency_s", "tokens_per_s", "max_model_tokens")
    settings = FakeSettings(
        rules=rules,
        api_key=os.environ.get(KEY_VARIABLE),
        **{name: getattr(options, name) for name in names},
    )
    web.run_app(
        build_app(settings),
        host=options.host,
        port=options.port,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        print=None,
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m batchrun.engine.fake", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="fake", help="the id of the model it serves")
    parser.add_argument("--script", type=Path, help="JSON file of faults (see script.py)")
    parser.add_argument("--executions", type=Path, help="append one JSON line per execution")
    parser.add_argument("--latency-s", type=float, default=0.0, help="before the first token")
    parser.add_argument("--tokens-per-s", type=float, default=None, help="default: at once")
    parser.add_argument("--max-model-tokens", type=int, default=8_192)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
