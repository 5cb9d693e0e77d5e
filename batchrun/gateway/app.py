"""Routes: what the gateway answers, and what it passes to an engine or to the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from multidict import CIMultiDictProxy

from batchrun.errors import BatchrunError
from batchrun.gateway.api_document import document_json
from batchrun.gateway.body import read_body
from batchrun.gateway.class_choice import choose_class
from batchrun.gateway.daemon_calls import DaemonCalls, is_daemon_route
from batchrun.gateway.door import ABOUT_CALLER, Door
from batchrun.gateway.envelope import error_response
from batchrun.gateway.forward import Call, Forwarder
from batchrun.gateway.headers import REQUEST_ID, choose_request_id, without_key
from batchrun.gateway.metrics import metrics_response
from batchrun.gateway.models import LIST_TARGET, model_id_in, model_response
from batchrun.gateway.refusal import RefusalError
from batchrun.gateway.relay import relay
from batchrun.gateway.settings import GatewaySettings
from batchrun.gateway.slo_classes import SloClasses
from batchrun.gateway.steered import read_call_body
from batchrun.gateway.upstreams import Upstreams

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
        call = Call(
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


def _list_call(request: web.BaseRequest, request_id: str) -> Call:
    headers = _headers_for_engine(request)
    return Call(method="GET", target=LIST_TARGET, headers=headers, request_id=request_id)


def _headers_for_engine(request: web.BaseRequest) -> CIMultiDictProxy[str]:
    """An engine may ask for a key of its own; ours is not for it."""
    is_known = request[ABOUT_CALLER].key is not None
    return without_key(request.headers) if is_known else request.headers


def _wrong_method(request: web.BaseRequest, *, allowed: str, request_id: str) -> web.Response:
    message = f"{request.method} is not allowed on {request.rel_url.raw_path}; use {allowed}"
    response = error_response(405, message, request_id=request_id, code="method_not_supported")
    response.headers["Allow"] = allowed
    return response
