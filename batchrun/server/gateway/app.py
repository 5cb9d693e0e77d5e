"""Routes: what the gateway answers, and what it passes to an engine or to the daemon.

It answers the OpenAPI document itself, and `GET /v1/models/{model}` from the list of models, since
vLLM has no such route.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from ruamel.yaml import YAML

from batchrun.errors import BatchrunError, ConfigError, shortened
from batchrun.hints import SloBounds
from batchrun.home import GATEWAY_HEADER, ROUTING_PATH, TALLY_PATH
from batchrun.media.fetching import ImageFetcher
from batchrun.media.hosts import ImageHosts
from batchrun.routing.decisions import NUM_KEPT
from batchrun.server.gateway.admission import (
    ABOUT_CALLER,
    OPEN_PATHS,
    Door,
    check_class,
    choose_class,
    class_name,
)
from batchrun.server.gateway.bodies import (
    FLEX,
    BodiesInFlight,
    HeldBody,
    SteeredBody,
    fill_images,
    read_body,
    read_call_body,
)
from batchrun.server.gateway.daemon_calls import (
    DAEMON_HEAD_S,
    DAEMON_ROUTES,
    DaemonCalls,
    is_daemon_route,
)
from batchrun.server.gateway.dashboard import PREFIX as DASHBOARD
from batchrun.server.gateway.dashboard import DashboardDoor, check_site, is_dashboard
from batchrun.server.gateway.envelope import (
    CLASS_HEADER,
    NO_HEADERS,
    REQUEST_ID,
    LimitError,
    RefusalError,
    choose_request_id,
    forwarded_headers,
)
from batchrun.server.gateway.forward import COUNTED_AS, ForwardedCall, Forwarder, JsonObject, relay
from batchrun.server.gateway.replies import ReplyUsage, read_models
from batchrun.server.gateway.tally import EJECTED, Ejected, SeenReply, Tally, TallyPage
from batchrun.server.gateway.upstreams import REFUSE, SloClasses, Upstreams, find_daemon

LIST_TARGET = "/v1/models"
METRICS_S = 5.0
"""A daemon that gives nothing for so long gives no metrics."""
HUNG_UP = 499
"""Counted for a caller who left before his answer."""
OTHER_ROUTES = "other"
FOR_DAEMON = frozenset({TALLY_PATH, ROUTING_PATH})


def model_id_in(raw_path: str) -> str | None:
    """The model that a raw (percent-encoded) path names; slashes may be encoded or not."""
    model_id = unquote(raw_path.removeprefix(LIST_TARGET + "/"))
    return model_id if raw_path.startswith(LIST_TARGET + "/") and model_id else None


def one_model(models: Sequence[JsonObject], *, model_id: str, request_id: str) -> web.Response:
    """The one model out of a list. Raises RefusalError with 404."""
    found = next((model for model in models if model["id"] == model_id), None)
    if found is None:
        message = f"The model '{shortened(model_id)}' does not exist"
        raise RefusalError(404, message, code="model_not_found")
    return web.json_response(found, headers={REQUEST_ID: request_id})


MAX_BODY_BYTES = 64 * 2**20
MAX_HELD_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a gateway; `port` 0 takes any free port.

    `keys_path` lists the API keys; None: nobody is asked for one. `worker` is
    this one's number, of `num_workers`, who share the memories behind `book_fd` and `tally_fd`.
    `drain_s`: how long
    a stream may go on after SIGTERM. `body_idle_s`: the longest pause in an upload.
    `max_body_bytes` bounds one request body, `max_held_bytes` those of all calls that a worker has.
    `daemon_head_s`: how long the daemon may take to begin
    an answer.
    """

    host: str
    port: int
    upstreams_path: Path
    keys_path: Path | None = None
    num_workers: int = 1
    worker: int = 0
    book_fd: int | None = None
    tally_fd: int | None = None
    drain_s: float = 30.0
    body_idle_s: float = 30.0
    daemon_head_s: float = DAEMON_HEAD_S
    max_body_bytes: int = MAX_BODY_BYTES
    max_held_bytes: int = MAX_HELD_BYTES


def parse_listen(listen: str) -> tuple[str, int]:
    """Split `HOST:PORT` (`[::1]:8000` for IPv6). Raises ConfigError."""
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen: {listen!r} is not HOST:PORT, for example 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


EMBEDDINGS = "/v1/embeddings"
ENGINE_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", EMBEDDINGS, "/v1/responses"})

Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]


class Gateway:
    """Answers every request; it holds nothing between two of them."""

    def __init__(
        self, settings: GatewaySettings, forwarder: Forwarder, door: Door, tally: Tally
    ) -> None:
        self._settings = settings
        self._door = door
        self._tally = tally
        self._metrics_page = TallyPage(tally, forwarder.balancer.figures, self._ejected)
        self._images = ImageFetcher()
        self._bodies = BodiesInFlight(settings.max_held_bytes)
        self._forwarder = forwarder
        forwarder.count_late = tally.count_late
        self._slo: SloBounds | None = None
        self._slo_classes: SloClasses = {}
        self._daemon = DaemonCalls(
            forwarder.session,
            settings.upstreams_path,
            body_idle_s=settings.body_idle_s,
            head_s=settings.daemon_head_s,
        )
        self._dashboard = DashboardDoor(door.keys, self.pass_on, door.session_secret)
        self._own: Mapping[str, tuple[str, Handler]] = {
            **{path: ("POST", self._generate) for path in ENGINE_ROUTES},
            LIST_TARGET: ("GET", self._models),
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi),
        }

    def take_over(self, upstreams: Upstreams) -> None:
        """Go on with a new list of engines and classes."""
        self._forwarder.balancer.replace(upstreams.engines, upstreams.router)
        self._forwarder.balancer.refuse_late(is_on=upstreams.late_calls == REFUSE)
        self._forwarder.timeouts = upstreams.timeouts
        self._slo, self._slo_classes = upstreams.slo, upstreams.slo_classes
        self._images.hosts = ImageHosts(upstreams.image_hosts)

    async def close(self) -> None:
        """Close the connections to the hosts of images."""
        await self._images.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The entry point of the HTTP server."""
        status = HUNG_UP
        try:
            response = await self._handle(request)
            status = response.get(COUNTED_AS, response.status)
            return response
        except ConnectionError:
            raise
        except Exception:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            path = request.rel_url.raw_path
            if path not in FOR_DAEMON or status != HTTPStatus.OK:
                self._tally.count_call(self._route_name(path), status)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = choose_request_id(request.headers)
        reply_headers = NO_HEADERS
        try:
            if request.rel_url.raw_path in FOR_DAEMON:
                return await self._tell_daemon(request)
            if is_dashboard(request.rel_url.raw_path):
                return await self._dashboard.answer(request, request_id)
            if not self._door.keys.is_asked_for and request.rel_url.raw_path not in OPEN_PATHS:
                check_site(request)
            caller = request[ABOUT_CALLER] = self._door.admit(request)
            reply_headers = caller.reply_headers
            response = await self._route(request)(request, request_id)
        except RefusalError as refusal:
            if isinstance(refusal, LimitError):
                await self._door.limited.wait(refusal.seq, is_refused=True)
            response = refusal.response(request_id)
        except BatchrunError as error:
            response = RefusalError(error.http_status, str(error)).response(request_id)
        if not response.prepared:
            response.headers.update(reply_headers)
        return response

    async def pass_on(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """To the daemon: later for a key that it has just refused something."""
        key = request[ABOUT_CALLER].key
        if key is not None:
            await self._door.refused.wait(key.seq)
        response = await self._daemon.pass_on(request, request_id)
        if key is not None and 400 <= response.status < 500:
            self._door.refused.note(key.seq)
        return response

    def _route(self, request: web.BaseRequest) -> Handler:
        """Who answers. Raises RefusalError with 404 or 405."""
        path = request.rel_url.raw_path
        if is_daemon_route(path):
            return self.pass_on
        if path in self._own:
            method, handler = self._own[path]
        elif model_id_in(path) is not None:
            method, handler = "GET", self._models
        else:
            raise RefusalError(404, f"Invalid URL ({request.method} {path})")
        if request.method != method:
            message = f"{request.method} is not allowed on {path}; use {method}"
            code, headers = "method_not_supported", {"Allow": method}
            raise RefusalError(405, message, code=code, headers=headers)
        return handler

    def _route_name(self, path: str) -> str:
        """A route of ours; callers do not choose what is counted."""
        if is_dashboard(path):
            return DASHBOARD
        daemons = (route for route in DAEMON_ROUTES if path.startswith(route))
        known = path if path in self._own else next(daemons, None)
        return known or (LIST_TARGET if model_id_in(path) is not None else OTHER_ROUTES)

    async def _generate(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        key = request[ABOUT_CALLER].key
        owner = None if key is None else key.id
        with self._door.calling(key), self._bodies.holding(owner) as held:
            return await self._generate_now(request, request_id, held)

    async def _generate_now(
        self, request: web.BaseRequest, request_id: str, held: HeldBody
    ) -> web.StreamResponse:
        limits = self._settings
        key = request[ABOUT_CALLER].key
        key_class = None if key is None else key.slo_class
        bounds = choose_class(request.headers, key_class, self._slo_classes)
        check_class(key, bounds, self._slo_classes, self._slo)
        most_bytes, idle_s = limits.max_body_bytes, limits.body_idle_s
        body = await read_body(request, max_bytes=most_bytes, idle_s=idle_s, held=held)
        body = await fill_images(body, self._images, held, "" if key is None else key.id)
        await held.take_turn(body)
        # What a caller takes to send its body, and hosts of images to answer, is no engine's time.
        began_s = ReplyUsage.now_s()
        written = read_call_body(request.rel_url.raw_path, body, bounds)
        is_flex = isinstance(written, SteeredBody) and written.is_flex
        if isinstance(written, SteeredBody) and (is_flex or CLASS_HEADER in request.headers):
            written.check_beams(self._forwarder.balancer.upstreams)
        if is_flex:
            held.count_as_flex()
        call = _call(
            request,
            request_id,
            target=request.rel_url.raw_path_qs,
            body=written,
            slo=None if request.rel_url.raw_path == EMBEDDINGS else bounds or self._slo,
        )
        meter = request[ABOUT_CALLER].meter
        name = class_name(request.headers, key_class, bounds)
        async with self._forwarder.exchange(call) as exchange:
            reply, _, usage, engine, _ = exchange
            try:
                return await relay(request, exchange, request_id=request_id)
            finally:
                if meter is not None:
                    meter.count(usage)
                seen = _seen_reply(reply, usage, began_s, (FLEX if is_flex else name, engine))
                promised = None if is_flex else bounds or self._slo
                self._tally.count_reply(replace(seen, bounds=promised))

    async def _models(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """Of a single engine its own reply, of several what all of them list."""
        model_id, call = model_id_in(request.rel_url.raw_path), _call(request, request_id)
        call.headers["Accept-Encoding"] = "identity"
        for condition in ("If-None-Match", "If-Modified-Since"):
            call.headers.popall(condition, None)
        if len(self._forwarder.balancer.upstreams) > 1:
            models = await self._forwarder.models(call, model_id)
        else:
            async with self._forwarder.exchange(call) as exchange:
                if model_id is None or exchange.reply.status != 200:
                    return await relay(request, exchange, request_id=request_id)
                models = await read_models(exchange.reply)
        if model_id is not None:
            return one_model(models, model_id=model_id, request_id=request_id)
        listed = {"object": "list", "data": models}
        return web.json_response(listed, headers={REQUEST_ID: request_id})

    async def _healthz(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return web.json_response({"status": "ok"}, headers={REQUEST_ID: request_id})

    async def _readyz(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        if await self._forwarder.is_any_healthy():
            return web.json_response({"status": "ready"}, headers={REQUEST_ID: request_id})
        raise RefusalError(503, "no engine is ready")

    async def _metrics(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """What the gateway counts, and what the daemon tells while it answers."""
        told = await self._daemon.read("/metrics", read_s=METRICS_S)
        own = self._metrics_page.render(is_daemon_up=told is not None)
        headers = {REQUEST_ID: request_id, "Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=own + (told or b""), headers=headers)

    async def _tell_daemon(self, request: web.BaseRequest) -> web.Response:
        """What the gateway knows, for the daemon, which shows the secret that it gave to it."""
        path = request.rel_url.raw_path
        daemon = await asyncio.to_thread(find_daemon, self._settings.upstreams_path)
        secret = None if daemon is None else daemon.gateway_key
        given = request.headers.get(GATEWAY_HEADER, "")
        if secret is None or not hmac.compare_digest(
            given.encode("utf-8", "surrogateescape"), secret.encode()
        ):
            raise RefusalError(404, f"Invalid URL ({request.method} {path})")
        if path == ROUTING_PATH:
            most = request.query.get("most", "")[:6]
            balancer, now_s = self._forwarder.balancer, ReplyUsage.now_s()
            num = int(most) if most.isdecimal() else NUM_KEPT
            tell = partial(balancer.explain, now_s, num)
            if (since_s := request.query.get("since")) is not None:
                tell = partial(balancer.ended_calls, now_s, float(since_s))
            return web.json_response(await asyncio.to_thread(tell))
        series = [(each.kind, each.labels, each.values.tolist()) for each in self._tally.read()]
        series += [(EJECTED, (name,), [left_s, num]) for name, left_s, num in self._ejected()]
        return web.json_response(series)

    def _ejected(self) -> Ejected:
        return self._forwarder.balancer.ejected(now_s=time.monotonic())

    async def _openapi(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return web.Response(
            body=await asyncio.to_thread(document_json),
            content_type="application/json",
            headers={REQUEST_ID: request_id},
        )


def _seen_reply(
    reply: aiohttp.ClientResponse, usage: ReplyUsage, began_s: float, names: tuple[str, str]
) -> SeenReply:
    """How a call went that came at `began_s`, of this class and engine. Only a stream shows when
    its tokens come."""
    is_stream = reply.status == 200 and reply.content_type == "text/event-stream"
    tokens = usage.output_tokens or max(0, usage.num_events - 1)
    is_timed = is_stream and usage.has_begun
    return SeenReply(
        *names,
        ttft_s=usage.began_s - began_s if is_timed else None,
        tpot_s=usage.tpot_s if is_timed else None,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens or 0,
        output_tokens=tokens,
    )


def _call(
    request: web.BaseRequest,
    request_id: str,
    *,
    target: str = LIST_TARGET,
    body: bytes | SteeredBody | None = None,
    slo: SloBounds | None = None,
) -> ForwardedCall:
    """An engine may ask for a key of its own; ours is not for it."""
    keeps_key = request[ABOUT_CALLER].key is None
    headers = forwarded_headers(request, request_id, keeps_key=keeps_key)
    return ForwardedCall(request.method, target, headers, body, slo)


FRAME = "document.yaml"


@cache
def document_json() -> bytes:
    """The document as it is served. Read once and kept: that takes a fifth of a second."""
    return json.dumps(load_document(), ensure_ascii=False, separators=(",", ":")).encode()


def load_document() -> dict[str, Any]:
    """The frame with the paths and components of all other files."""
    folder, yaml = files("batchrun.server.gateway") / "api_document", YAML(typ="safe")
    parts = {
        file.name: yaml.load(file.read_text("utf-8"))
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    }
    document: dict[str, Any] = parts.pop(FRAME) | {"paths": {}}
    for _, part in sorted(parts.items()):
        document["paths"] |= part.get("paths", {})
        for kind, named in part.get("components", {}).items():
            document["components"].setdefault(kind, {}).update(named)
    return document
