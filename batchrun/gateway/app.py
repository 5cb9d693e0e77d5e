"""Routes: what the gateway answers, and what it passes to an engine or to the daemon."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from batchrun.errors import BatchrunError
from batchrun.gateway.body import read_body
from batchrun.gateway.daemon_calls import DaemonCalls, is_daemon_route
from batchrun.gateway.envelope import error_response
from batchrun.gateway.forward import Call, Forwarder
from batchrun.gateway.headers import REQUEST_ID, choose_request_id
from batchrun.gateway.metrics import metrics_response
from batchrun.gateway.models import LIST_TARGET, model_id_in, model_response
from batchrun.gateway.refusal import CallRefusedError
from batchrun.gateway.relay import relay
from batchrun.gateway.settings import GatewaySettings
from batchrun.gateway.slo_classes import choose_class
from batchrun.gateway.steered import read_call_body
from batchrun.gateway.upstreams import UpstreamsFile

ENGINE_ROUTES = frozenset({
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
})

Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]


class Gateway:
    """Answers every request; it holds nothing between two of them."""

    def __init__(
        self, settings: GatewaySettings, forwarder: Forwarder, upstreams: UpstreamsFile
    ) -> None:
        self._settings = settings
        self._forwarder = forwarder
        self._upstreams = upstreams
        self._daemon = DaemonCalls(
            forwarder.session, settings.upstreams_path, body_idle_s=settings.body_idle_s
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The entry point of the HTTP server."""
        request_id = choose_request_id(request.headers)
        path = request.rel_url.raw_path
        method, handler = self._route(path)
        if handler is None:
            message = f"Invalid URL ({request.method} {path})"
            return error_response(404, message, request_id=request_id)
        if method is not None and request.method != method:
            return _wrong_method(request, allowed=method, request_id=request_id)
        try:
            return await handler(request, request_id)
        except CallRefusedError as refusal:
            text, code, param = refusal.text or "", refusal.code, refusal.param
            return error_response(400, text, request_id=request_id, code=code, param=param)
        except web.HTTPException as refusal:
            return error_response(refusal.status, refusal.text or "", request_id=request_id)
        except BatchrunError as error:
            return error_response(error.http_status, str(error), request_id=request_id)

    def _route(self, path: str) -> tuple[str | None, Handler | None]:
        """The method that a path wants (None: whoever answers says that), and who answers."""
        if path in ENGINE_ROUTES:
            return "POST", self._generate
        if path == LIST_TARGET:
            return "GET", self._list_models
        if model_id_in(path) is not None:
            return "GET", self._retrieve_model
        if path == "/healthz":
            return "GET", self._healthz
        if path == "/readyz":
            return "GET", self._readyz
        if path == "/metrics":
            return "GET", self._metrics
        if is_daemon_route(path):
            return None, self._daemon.pass_on
        return None, None

    async def _generate(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        limits = self._settings
        bounds = choose_class(request.headers, None, self._upstreams.slo_classes)
        body = await read_body(request, max_bytes=limits.max_body_bytes, idle_s=limits.body_idle_s)
        call = Call(
            method="POST",
            target=request.rel_url.raw_path_qs,
            headers=request.headers,
            request_id=request_id,
            body=read_call_body(request.rel_url.raw_path, body, bounds),
        )
        async with self._forwarder.exchange(call) as exchange:
            return await relay(
                request, exchange.reply, request_id=request_id, rewriting=exchange.rewriting
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


def _list_call(request: web.BaseRequest, request_id: str) -> Call:
    return Call(method="GET", target=LIST_TARGET, headers=request.headers, request_id=request_id)


def _wrong_method(request: web.BaseRequest, *, allowed: str, request_id: str) -> web.Response:
    message = f"{request.method} is not allowed on {request.rel_url.raw_path}; use {allowed}"
    response = error_response(405, message, request_id=request_id, code="method_not_supported")
    response.headers["Allow"] = allowed
    return response
