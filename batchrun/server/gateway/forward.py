"""One call to an engine: choose it, open the exchange, pass the reply on, close it in any case."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import math
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from batchrun.errors import ConfigError, EngineError, EngineSilentError
from batchrun.hints import SloBounds
from batchrun.home import NO_ENGINE_HEADER
from batchrun.media.connections import OWN_SHORTAGES, UNREACHED
from batchrun.server.gateway.admission import ABOUT_CALLER
from batchrun.server.gateway.balancer import Balancer, RoutedCall
from batchrun.server.gateway.bodies import SteeredBody
from batchrun.server.gateway.envelope import (
    REQUEST_ID,
    RefusalError,
    as_envelope,
    end_to_end,
    no_such_model,
    too_late,
)
from batchrun.server.gateway.replies import (
    DAEMON,
    ENGINE,
    SILENT,
    ReplyUsage,
    Rewriting,
    Waits,
    end_all,
    feed_all,
    is_stream,
    next_piece,
    read_models,
)
from batchrun.server.gateway.upstreams import CallTimeouts, Upstream

log = logging.getLogger(__name__)

HEALTH_S, YOUNG_S = 2.0, 2.0
LIST_S = 10.0
"""An engine has so long to list its models, and to end an error."""

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ForwardedCall:
    """What goes to an engine: `target` is path and query exactly as the caller spelled them.

    A steered body is written for the engine that is tried. `slo` is what the call is promised; None
    where it is nothing that the gateway knows of.
    """

    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes | SteeredBody | None = None
    slo: SloBounds | None = None


class Exchange(NamedTuple):
    """An engine's reply, what is to be changed in it, who sees it pass, whose it is, and how long
    its pieces are waited for."""

    reply: aiohttp.ClientResponse
    rewriting: Rewriting | None
    usage: ReplyUsage
    engine: str
    waits: Waits


NO_ANSWER = "the engine closed the connection without an answer"


class EngineLostError(EngineError):
    """The engine took a call, as far as can be told, and hung up."""


class Forwarder:
    """Carries calls to the engines that `balancer` knows, and waits for them as `timeouts` say.

    `count_late` hears of the engine of a stream that ended beyond its bound without a piece.
    """

    def __init__(self, balancer: Balancer, session: aiohttp.ClientSession) -> None:
        self.balancer = balancer
        self.session = session
        self.timeouts = CallTimeouts()
        self.count_late: Callable[[str], None] = lambda engine: None

    @asynccontextmanager
    async def exchange(self, call: ForwardedCall) -> AsyncIterator[Exchange]:
        """The engine's reply, its headers read. Leaving the block early cancels it at the engine.

        An engine that cannot be connected to is passed over; once bytes were sent no other one
        is tried, but where the engine turns out to be dead: then one more. Raises EngineError,
        EngineSilentError when no headers come in time, and RefusalError: with 404 for a model that
        none serves, with 503 while all are ejected, with 429 for a call that would be late where
        `late_calls` says so.
        """
        steered = call.body if isinstance(call.body, SteeredBody) else None
        text = call.body.text if isinstance(call.body, SteeredBody) else call.body
        routed = self.balancer.read(text, is_offline=steered is not None and steered.is_flex)
        if not self.balancer.is_served(routed):
            raise no_such_model(routed.text.model or "")
        routed.slo = call.slo
        with self._counting_late(routed):
            async with self._exchange(call, routed, steered) as exchange:
                yield exchange

    @contextmanager
    def _counting_late(self, routed: RoutedCall) -> Iterator[None]:
        """Whoever ends the call."""
        slo, usage = None if routed.is_offline else routed.slo, routed.usage
        began_s = usage.now_s()
        try:
            yield
        finally:
            is_owed = routed.awaited and routed.text.is_stream and not usage.has_begun
            if is_owed and slo is not None and usage.now_s() - began_s > slo.ttft_s:
                self.count_late(routed.awaited)

    @asynccontextmanager
    async def _exchange(
        self, call: ForwardedCall, routed: RoutedCall, steered: SteeredBody | None
    ) -> AsyncIterator[Exchange]:
        for upstream in self._candidates(routed):
            if routed.has_body and not self.balancer.take_turn(upstream, now_s=time.monotonic()):
                continue
            waits, routed.awaited = self._waits(routed), upstream.name
            found = self.balancer.num_ejections_in_a_row(upstream)
            with self.balancer.sending(upstream, routed):
                reply = await self._send(upstream, call, routed, due_s=waits.due_s)
                if reply is None:
                    continue
                if reply.status >= 300:
                    # What a server refuses shows nothing of its core.
                    routed.usage.on_begin = lambda now_s: None
                elif routed.has_body and not is_stream(reply):
                    self.balancer.answered(upstream)
                if reply.status < 500 and not reply.ok:
                    routed.awaited = ""
                rewriting = None
                if steered is not None:
                    rewriting = Rewriting(steered.tier_at(upstream), upstream.hint_nonce)
                try:
                    yield Exchange(reply, rewriting, routed.usage, upstream.name, waits)
                finally:
                    reply.close()
                    if routed.usage.is_silent:
                        self.balancer.failed(upstream, now_s=time.monotonic(), found=found)
                return
        back_in_s = self.balancer.back_in_s(routed, now_s=time.monotonic())
        if back_in_s:
            message = "the last calls to the engine failed, and it gets none now; try again shortly"
            raise RefusalError(503, message, headers={"Retry-After": str(math.ceil(back_in_s))})
        raise EngineError("no engine can be reached; try again shortly")

    def _candidates(self, routed: RoutedCall) -> list[Upstream]:
        now_s = time.monotonic()
        candidates = self.balancer.candidates(routed, now_s=now_s)
        candidates, late_s = self.balancer.in_time(candidates, routed, now_s=now_s)
        if late_s > 0:
            raise too_late(late_s)
        return candidates

    def _waits(self, routed: RoutedCall) -> Waits:
        text = routed.text
        first_s, between_s = self.timeouts.of(
            is_stream=text.is_stream, may_pause=text.may_pause, is_offline=routed.is_offline
        )
        if not routed.has_body:
            first_s = between_s = LIST_S
        due_s = asyncio.get_running_loop().time() + first_s
        return Waits(due_s, between_s, may_pause=text.may_pause)

    async def _send(
        self, upstream: Upstream, call: ForwardedCall, routed: RoutedCall, *, due_s: float
    ) -> aiohttp.ClientResponse | None:
        """As `_connect`; None also the first time that the call finds an engine dead. A server may
        live for a while without its core, and answer 500; what met a dying one is lost unread."""
        reply, lost, sent_s = None, None, time.monotonic()
        found = self.balancer.num_ejections_in_a_row(upstream)
        try:
            reply = await self._connect(upstream, call, due_s=due_s)
        except EngineLostError as error:
            lost = error
        # What had been there for longer may be what the engine died of.
        is_young = time.monotonic() - sent_s < YOUNG_S
        is_failed = lost is not None or (reply is not None and reply.status in {500, 503})
        may_be_dead = is_young and is_failed and not routed.has_met_death
        if may_be_dead and await self._health(upstream) is False:
            log.warning("engine %s is dead; a call goes to another one", upstream.name)
            routed.has_met_death = True
            self.balancer.mark_down(upstream, now_s=time.monotonic(), found=found)
            if reply is not None:
                reply.close()
            return None
        if lost is not None:
            raise lost
        return reply

    async def _connect(
        self, upstream: Upstream, call: ForwardedCall, *, due_s: float | None = None
    ) -> aiohttp.ClientResponse | None:
        """The reply, its headers read until `due_s`; None where no connection came about, or the
        engine's agent has none."""
        headers, body = call.headers.copy(), call.body
        found = self.balancer.num_ejections_in_a_row(upstream)
        if upstream.api_key is not None:
            headers["Authorization"] = f"Bearer {upstream.api_key}"
        if isinstance(body, SteeredBody):
            body = body.written_for(upstream)
            headers["Accept-Encoding"] = "identity"
        limit = asyncio.timeout_at(due_s)
        try:
            async with limit:
                reply = await self.session.request(
                    call.method,
                    URL(upstream.url + call.target, encoded=True),
                    headers=headers,
                    data=io.BytesIO(body) if body is not None else None,
                    allow_redirects=False,
                    ssl=upstream.tls(),
                )
            is_refused = reply.status == 503 and NO_ENGINE_HEADER in reply.headers
            if is_refused and upstream.secret_file is not None:
                reply.close()
                raise EngineError("its agent has none that takes calls")
            return reply
        except (*UNREACHED, ConfigError, EngineError) as error:
            if getattr(error, "errno", None) in OWN_SHORTAGES:
                log.error("no connection can be opened here: %s", error)
                raise EngineError("no connection can be opened here; try again shortly") from error
            log.warning("engine %s cannot be reached: %s", upstream.name, error)
            if body is not None:
                # Listing models, however often, must not eject it.
                self.balancer.mark_down(upstream, now_s=time.monotonic(), found=found)
            return None
        except TimeoutError as error:
            if not limit.expired():
                raise EngineLostError(NO_ANSWER) from error
            self.balancer.failed(upstream, now_s=time.monotonic(), found=found)
            log.warning("engine %s: a call got no answer in time", upstream.name)
            raise EngineSilentError(SILENT.format(ENGINE)) from error
        except (aiohttp.ClientError, OSError) as error:
            log.warning("engine %s gave no answer: %s", upstream.name, error)
            raise EngineLostError(NO_ANSWER) from error

    async def models(self, call: ForwardedCall, wanted: str | None = None) -> list[JsonObject]:
        """What all engines that can be reached list, each model once. Raises EngineError when none
        can, and when only others may have the model that is `wanted`."""
        upstreams = self.balancer.upstreams
        lists = await asyncio.gather(*(self._list(each, call) for each in upstreams))
        merged: dict[object, JsonObject] = {}
        for model in chain.from_iterable(filter(None, lists)):
            merged.setdefault(model["id"], model)
        silent = [each for each, models in zip(upstreams, lists, strict=True) if models is None]
        if len(silent) == len(upstreams):
            raise EngineError("no engine can be reached; try again shortly")
        may_have = any(not each.models or wanted in each.models for each in silent)
        if wanted and may_have and wanted not in merged:
            raise EngineError("an engine that may have this model lists none; try again shortly")
        return list(merged.values())

    async def _list(self, upstream: Upstream, call: ForwardedCall) -> list[JsonObject] | None:
        if upstream.is_hung:
            return None
        try:
            async with asyncio.timeout(LIST_S):
                reply = await self._connect(upstream, call)
                if reply is None or reply.status != 200:
                    return None
                return await read_models(reply)
        except (EngineError, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("engine %s does not list its models: %s", upstream.name, error)
            return None

    async def is_any_healthy(self) -> bool:
        """Whether at least one engine that calls may go to answers its health check within 2 s.

        None goes to one of several that was not asked for its models yet, nor to one that hangs or
        is ejected.
        """
        upstreams, now_s = self.balancer.upstreams, time.monotonic()
        told = [each for each in upstreams if len(upstreams) == 1 or each.models is not None]
        asked = [each for each in told if self.balancer.takes_calls(each, now_s)]
        return any(await asyncio.gather(*map(self._health, asked)))

    async def _health(self, upstream: Upstream) -> bool | None:
        """Whether an engine is well; None: it does not say so in time, and may be busy."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_S)
        try:
            health = self.session.get(upstream.url + "/health", timeout=timeout, ssl=upstream.tls())
            async with health as reply:
                return reply.status == 200
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError, ConfigError):
            return False


COUNTED_AS = web.ResponseKey("counted_as", int)
"""The status that a reply counts as which did not end as it began."""
MAX_ERROR_BYTES = 2**20


async def relay(
    request: web.BaseRequest, exchange: Exchange, *, request_id: str
) -> web.StreamResponse:
    """Answer `request` with the reply; status and end-to-end headers are its own. An error gets an
    envelope, but for an HTML page of the daemon's, and what is coded so that it cannot be read.

    A reply that breaks off is broken off for the caller too, never ended as if it were whole; a
    stream whose next piece does not come ends with an event that says so. Raises EngineError if it
    breaks off before anything was handed on.
    """
    reply, rewriting, usage, _, waits = exchange
    headers = end_to_end(reply.headers)
    headers.setdefault(REQUEST_ID, request_id)
    headers.update(request[ABOUT_CALLER].reply_headers)
    filters = [] if rewriting is None else rewriting.filters_for(reply)
    is_page = waits.sender == DAEMON and reply.content_type == "text/html"
    if reply.status >= 400 and not is_page and not is_stream(reply):
        body = _in_envelope(reply, await _read_error(reply, waits), headers)
        body = feed_all(filters, body) + end_all(filters)
        return web.Response(status=reply.status, reason=reply.reason, headers=headers, body=body)
    if filters:
        headers.popall("Content-Length", None)
    response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
    await response.prepare(request)
    try:
        due_s = waits.to_first(reply)
        while chunk := await next_piece(reply, usage, due_s, waits.sender):
            usage.feed(chunk)
            await response.write(feed_all(filters, chunk) if filters else chunk)
            if waits.is_alive_by(chunk, usage):
                due_s = waits.to_next()
        await response.write_eof(end_all(filters))
    except EngineSilentError as error:
        response[COUNTED_AS] = error.http_status
        await _end_silent(request, response, reply, error)
    except (aiohttp.ClientError, OSError) as error:
        caller = request.transport
        if caller is not None and not caller.is_closing():
            log.warning("call %s broke off at %s: %s", request_id, waits.sender, error)
            response[COUNTED_AS] = HTTPStatus.BAD_GATEWAY
            caller.abort()
    return response


async def _end_silent(
    request: web.BaseRequest,
    response: web.StreamResponse,
    reply: aiohttp.ClientResponse,
    error: EngineSilentError,
) -> None:
    """A stream ends with an event that has OpenAI's error; what is no stream is broken off."""
    log.warning("call to %s: %s", reply.host, error)
    if is_stream(reply):
        event = RefusalError(error.http_status, str(error)).body
        with suppress(OSError, aiohttp.ClientError):
            await response.write_eof(b"\n\ndata: " + event + b"\n\n")
    elif request.transport is not None:
        request.transport.abort()


async def _read_error(reply: aiohttp.ClientResponse, waits: Waits) -> bytes:
    """Nothing of an error of more than `MAX_ERROR_BYTES`, which tells nobody anything, and of a
    refusal that did not end, unless its JSON is whole. Raises EngineError for a failure that did
    not: its server may be dying."""
    body = b""
    try:
        async with asyncio.timeout(min(LIST_S, waits.between_s)):
            while len(body) <= MAX_ERROR_BYTES and (piece := await reply.content.readany()):
                body += piece
    except (aiohttp.ClientError, OSError) as error:
        if reply.status >= 500:
            raise EngineError(f"{waits.sender} closed the connection within its answer") from error
        body = body if _is_json(body) else b""
    return body if len(body) <= MAX_ERROR_BYTES else b""


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _in_envelope(reply: aiohttp.ClientResponse, body: bytes, headers: CIMultiDict[str]) -> bytes:
    """The error's body, with `headers` that fit it."""
    headers.popall("Content-Length", None)
    try:
        coding = reply.headers.get("Content-Encoding", "identity")
        text = _decoded(body, coding.lower())
    except ValueError:
        return body
    headers["Content-Type"] = "application/json"
    headers.popall("Content-Encoding", None)
    return as_envelope(reply.status, text)


def _decoded(body: bytes, coding: str) -> bytes:
    """Nothing of what is too long. Raises ValueError for what cannot be read."""
    if not body or coding == "identity":
        return body
    try:
        if coding in {"gzip", "x-gzip"}:
            with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
                text = file.read(MAX_ERROR_BYTES + 1)
        elif coding == "deflate":
            text = _inflated(body)
        else:
            raise ValueError(f"coded as {coding}")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"not {coding}") from error
    return text if len(text) <= MAX_ERROR_BYTES else b""


def _inflated(body: bytes) -> bytes:
    """Servers send it with zlib's header, as the standard says, or without one."""
    has_header = body[0] & 0x0F == zlib.DEFLATED
    decoder = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    text = decoder.decompress(body, MAX_ERROR_BYTES + 1)
    if not decoder.eof and len(text) <= MAX_ERROR_BYTES:
        raise EOFError
    return text
