"""Routes: what the gateway answers, and what it passes to an engine or to the daemon.

It answers the OpenAPI document itself, and `GET /v1/models/{model}` from the list of models, since
vLLM has no such route.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy
from ruamel.yaml import YAML

from batchrun.errors import BatchrunError, ConfigError, DaemonUnavailableError, EngineError
from batchrun.server.gateway.admission import ABOUT_CALLER, Door, choose_class
from batchrun.server.gateway.bodies import read_body, read_call_body
from batchrun.server.gateway.envelope import (
    REQUEST_ID,
    RefusalError,
    choose_request_id,
    error_response,
    without_key,
)
from batchrun.server.gateway.forward import (
    DaemonCalls,
    ForwardedCall,
    Forwarder,
    is_daemon_route,
    relay,
)
from batchrun.server.gateway.upstreams import SloClasses, Upstreams, find_daemon

TIMEOUT_S = 5.0
MAX_PAGE_BYTES = 4 * 2**20


async def metrics_response(
    session: aiohttp.ClientSession, upstreams_path: Path, *, request_id: str
) -> web.Response:
    """The page. Raises DaemonUnavailableError while no daemon gives one."""
    daemon = await asyncio.to_thread(find_daemon, upstreams_path)
    if daemon is None:
        raise DaemonUnavailableError("no daemon gives metrics; start one with `batchrun up -d`")
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with session.get(daemon.url + "/metrics", timeout=timeout) as reply:
            reply.raise_for_status()
            page = await reply.content.read(MAX_PAGE_BYTES)
            while not reply.content.at_eof() and len(page) < MAX_PAGE_BYTES:
                page += await reply.content.read(MAX_PAGE_BYTES - len(page))
            kind = reply.headers.get("Content-Type", "text/plain")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise DaemonUnavailableError(
            "the daemon gives no metrics; start it with `batchrun up -d`"
        ) from error
    return web.Response(body=page, headers={"Content-Type": kind, REQUEST_ID: request_id})


LIST_TARGET = "/v1/models"
MAX_LIST_BYTES = 4 * 2**20


def model_id_in(raw_path: str) -> str | None:
    """The model that a raw (percent-encoded) path names; slashes may be encoded or not."""
    model_id = unquote(raw_path.removeprefix(LIST_TARGET + "/"))
    return model_id if raw_path.startswith(LIST_TARGET + "/") and model_id else None


async def model_response(
    reply: aiohttp.ClientResponse, *, model_id: str, request_id: str
) -> web.Response:
    """The one model out of an engine's list, or a 404 envelope. Raises EngineError."""
    try:
        text = await reply.content.read(MAX_LIST_BYTES)
        while not reply.content.at_eof() and len(text) < MAX_LIST_BYTES:
            text += await reply.content.read(MAX_LIST_BYTES - len(text))
        models = json.loads(text)["data"]
        found = [model for model in models if model["id"] == model_id]
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError("the engine did not list its models") from error
    if not found:
        message = f"The model '{model_id}' does not exist"
        return error_response(404, message, request_id=request_id, code="model_not_found")
    return web.json_response(found[0], headers={REQUEST_ID: request_id})


MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a gateway; `port` 0 takes any free port.

    `keys_path` lists the API keys; None: nobody is asked for one. `drain_s`: how long a stream may
    go on after SIGTERM. `body_idle_s`: the longest pause in an upload. `max_body_bytes` bounds one
    request body.
    """

    host: str
    port: int
    upstreams_path: Path
    keys_path: Path | None = None
    num_workers: int = 1
    drain_s: float = 30.0
    body_idle_s: float = 30.0
    max_body_bytes: int = MAX_BODY_BYTES


def parse_listen(listen: str) -> tuple[str, int]:
    """Split `HOST:PORT` (`[::1]:8000` for IPv6). Raises ConfigError."""
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen: {listen!r} is not HOST:PORT, for example 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


ENGINE_ROUTES = frozenset({
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
})

Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]


class Gateway:
    """Answers every request; it holds nothing between two of them."""

    def __init__(self, settings: GatewaySettings, forwarder: Forwarder, door: Door) -> None:
        self._settings = settings
        self._door = door
        self._forwarder = forwarder
        self._slo_classes: SloClasses = {}
        self._daemon = DaemonCalls(
            forwarder.session, settings.upstreams_path, body_idle_s=settings.body_idle_s
        )
        self._own: Mapping[str, tuple[str, Handler]] = {
            **{path: ("POST", self._generate) for path in ENGINE_ROUTES},
            LIST_TARGET: ("GET", self._list_models),
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi),
        }

    @property
    def own_routes(self) -> Mapping[str, str]:
        """The paths that are answered here or by an engine, each with its method; models apart."""
        return {path: method for path, (method, _) in self._own.items()}

    def take_over(self, upstreams: Upstreams) -> None:
        """Go on with a new list of engines and classes."""
        self._forwarder.balancer.replace(upstreams.engines)
        self._slo_classes = upstreams.slo_classes

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The entry point of the HTTP server."""
        request_id = choose_request_id(request.headers)
        try:
            caller = self._door.admit(request)
        except RefusalError as refusal:
            return refusal.response(request_id)
        request[ABOUT_CALLER] = caller
        response = await self._answer(request, request_id)
        if not response.prepared:
            response.headers.update(caller.reply_headers)
        return response

    async def _answer(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        path = request.rel_url.raw_path
        method, handler = self._route(path)
        if handler is None:
            message = f"Invalid URL ({request.method} {path})"
            return error_response(404, message, request_id=request_id)
        if method is not None and request.method != method:
            return _wrong_method(request, allowed=method, request_id=request_id)
        try:
            return await handler(request, request_id)
        except RefusalError as refusal:
            return refusal.response(request_id)
        except web.HTTPException as refusal:
            return error_response(refusal.status, refusal.text or "", request_id=request_id)
        except BatchrunError as error:
            return error_response(error.http_status, str(error), request_id=request_id)

    def _route(self, path: str) -> tuple[str | None, Handler | None]:
        """The method that a path wants (None: whoever answers says that), and who answers."""
        if path in self._own:
            return self._own[path]
        if model_id_in(path) is not None:
            return "GET", self._retrieve_model
        if is_daemon_route(path):
            return None, self._daemon.pass_on
        return None, None

    async def _generate(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        limits = self._settings
        key = request[ABOUT_CALLER].key
        key_class = None if key is None else key.slo_class
        bounds = choose_class(request.headers, key_class, self._slo_classes)
        body = await read_body(request, max_bytes=limits.max_body_bytes, idle_s=limits.body_idle_s)
        call = ForwardedCall(
            method="POST",
            target=request.rel_url.raw_path_qs,
            headers=_headers_for_engine(request),
            request_id=request_id,
            body=read_call_body(request.rel_url.raw_path, body, bounds),
        )
        async with self._forwarder.exchange(call) as exchange:
            return await relay(
                request,
                exchange.reply,
                request_id=request_id,
                rewriting=exchange.rewriting,
                meter=request[ABOUT_CALLER].meter,
            )

    async def _list_models(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        async with self._forwarder.exchange(_list_call(request, request_id)) as exchange:
            return await relay(request, exchange.reply, request_id=request_id)

    async def _retrieve_model(
        self, request: web.BaseRequest, request_id: str
    ) -> web.StreamResponse:
        model_id = model_id_in(request.rel_url.raw_path) or ""
        async with self._forwarder.exchange(_list_call(request, request_id)) as exchange:
            reply = exchange.reply
            if reply.status != 200:
                return await relay(request, reply, request_id=request_id)
            return await model_response(reply, model_id=model_id, request_id=request_id)

    async def _healthz(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return web.json_response({"status": "ok"}, headers={REQUEST_ID: request_id})

    async def _readyz(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        if await self._forwarder.is_any_healthy():
            return web.json_response({"status": "ready"}, headers={REQUEST_ID: request_id})
        return error_response(503, "no engine is ready", request_id=request_id)

    async def _metrics(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return await metrics_response(
            self._forwarder.session, self._settings.upstreams_path, request_id=request_id
        )

    async def _openapi(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return web.Response(
            body=await asyncio.to_thread(document_json),
            content_type="application/json",
            headers={REQUEST_ID: request_id},
        )


def _list_call(request: web.BaseRequest, request_id: str) -> ForwardedCall:
    headers = _headers_for_engine(request)
    return ForwardedCall(method="GET", target=LIST_TARGET, headers=headers, request_id=request_id)


def _headers_for_engine(request: web.BaseRequest) -> CIMultiDictProxy[str]:
    """An engine may ask for a key of its own; ours is not for it."""
    is_known = request[ABOUT_CALLER].key is not None
    return without_key(request.headers) if is_known else request.headers


def _wrong_method(request: web.BaseRequest, *, allowed: str, request_id: str) -> web.Response:
    message = f"{request.method} is not allowed on {request.rel_url.raw_path}; use {allowed}"
    response = error_response(405, message, request_id=request_id, code="method_not_supported")
    response.headers["Allow"] = allowed
    return response


FRAME = "document.yaml"


@cache
def document_json() -> bytes:
    """The document as it is served. Read once and kept: that takes a fifth of a second."""
    return json.dumps(load_document(), ensure_ascii=False, separators=(",", ":")).encode()


def load_document() -> dict[str, Any]:
    """The frame with the paths and components of all other files."""
    parts = {
        file.name: file for file in (files("batchrun.server.gateway") / "api_document").iterdir()
    }
    document = _read(parts.pop(FRAME).read_text("utf-8"))
    document["paths"] = {}
    for name, file in sorted(parts.items()):
        if name.endswith(".yaml"):
            part = _read(file.read_text("utf-8"))
            document["paths"] |= part.get("paths", {})
            for kind, named in part.get("components", {}).items():
                document["components"].setdefault(kind, {}).update(named)
    return document


def _read(text: str) -> dict[str, Any]:
    document: dict[str, Any] = YAML(typ="safe").load(text)
    return document
