"""Files and batches: calls that the gateway passes on to the daemon, or to the gateway of the one
that leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from batchrun.errors import DaemonUnavailableError
from batchrun.home import CALLER_HEADER, GATEWAY_HEADER
from batchrun.media.connections import CONNECT_S
from batchrun.server.gateway.admission import ABOUT_CALLER
from batchrun.server.gateway.bodies import BodyStream
from batchrun.server.gateway.envelope import forwarded_headers
from batchrun.server.gateway.forward import Exchange, relay
from batchrun.server.gateway.replies import DAEMON, ReplyUsage, Waits
from batchrun.server.gateway.upstreams import DaemonAt, find_daemon

log = logging.getLogger(__name__)

DAEMON_ROUTES = ("/v1/files", "/v1/batches")
UPLOADS = frozenset({("POST", "/v1/files"), ("POST", "/dashboard/uploads")})
DAEMON_HEAD_S = 30.0
"""A daemon that has a whole request and does not begin its answer in so long is away."""
PASSED_ON_HEADER = "X-Batchrun-Passed-On"
"""From one gateway to that of the daemon that leads: it goes no further."""
PROBE_AFTER_S, PROBE_S = 1.5, 3.0
"""A call that waits asks so often whether the daemon does anything: one that answers nothing at all
in so long is stuck."""
AWAY = "batchrun's daemon does not answer at the moment; try again shortly"


def is_daemon_route(raw_path: str) -> bool:
    """Whether a path belongs to the daemon, with whatever method."""
    return any(raw_path == route or raw_path.startswith(f"{route}/") for route in DAEMON_ROUTES)


class DaemonCalls:
    """Carries calls to the daemon that the upstreams file names."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        upstreams_path: Path,
        *,
        body_idle_s: float,
        head_s: float = DAEMON_HEAD_S,
    ) -> None:
        self._session = session
        self._upstreams_path = upstreams_path
        self._body_idle_s = body_idle_s
        self._head_s = head_s
        self._probes: dict[str, asyncio.Task[bool]] = {}

    async def pass_on(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """Answer with what the daemon answers.

        Raises DaemonUnavailableError, and RefusalError for a body that does not come.
        """
        daemon = await asyncio.to_thread(find_daemon, self._upstreams_path)
        if daemon is None:
            raise DaemonUnavailableError(AWAY)
        goes_on = _goes_on(request, daemon)
        base_url = daemon.leader_gateway if goes_on and daemon.leader_gateway else daemon.url
        body = BodyStream(request, idle_s=self._body_idle_s)
        is_upload = (request.method, request.rel_url.raw_path) in UPLOADS
        try:
            first_s = self._body_idle_s if request.body_exists else 0.0
            async with (
                asyncio.timeout(first_s + self._head_s) as limit,
                self._watched(base_url, limit),
            ):
                reply = await self._session.request(
                    request.method,
                    URL(base_url + request.rel_url.raw_path_qs, encoded=True),
                    headers=_headers(request, request_id, daemon),
                    data=(
                        self._sent(body, limit, is_upload=is_upload)
                        if request.body_exists
                        else None
                    ),
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                )
        except (aiohttp.ClientError, OSError) as error:
            if body.refusal is not None:
                raise body.refusal from error
            log.warning("call %s: no answer from the daemon: %s", request_id, error)
            raise DaemonUnavailableError(AWAY) from error
        between_s = max(self._head_s, DAEMON_HEAD_S)
        waits = Waits(asyncio.get_running_loop().time() + between_s, between_s, DAEMON)
        async with reply:
            exchange = Exchange(reply, None, ReplyUsage(), "", waits)
            return await relay(request, exchange, request_id=request_id)

    async def _sent(
        self, body: BodyStream, limit: asyncio.Timeout, *, is_upload: bool
    ) -> AsyncIterator[bytes]:
        """The body, which a daemon that lives takes piece by piece, and then answers in time. A
        file may have a long way to go then: for it the daemon has as long as it lives."""
        loop = asyncio.get_running_loop()
        async for piece in body:
            # The caller has `body_idle_s` for each piece, the daemon as long as for an answer.
            limit.reschedule(loop.time() + self._body_idle_s + self._head_s)
            yield piece
        limit.reschedule(None if is_upload else loop.time() + self._head_s)

    @asynccontextmanager
    async def _watched(self, base_url: str, limit: asyncio.Timeout) -> AsyncIterator[None]:
        """Within, `limit` expires as soon as the daemon is found to be stuck."""
        watch = asyncio.create_task(self._watch(base_url, limit))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, base_url: str, limit: asyncio.Timeout) -> None:
        is_alive = True
        while is_alive:
            await asyncio.sleep(PROBE_AFTER_S)
            probe = self._probes.get(base_url)
            if probe is None or probe.done():
                self._probes = {base_url: asyncio.create_task(self._is_alive(base_url))}
            is_alive = await asyncio.shield(self._probes[base_url])
        limit.reschedule(asyncio.get_running_loop().time())

    async def _is_alive(self, base_url: str) -> bool:
        """Whether it answers anything: there is nothing at its root, and it says so."""
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        with suppress(aiohttp.ClientError, OSError):
            async with self._session.get(base_url + "/", timeout=timeout):
                return True
        return False

    async def read(self, path: str, *, read_s: float) -> bytes | None:
        """What the daemon answers to a GET of this path; None for anything but a whole 200."""
        daemon = await asyncio.to_thread(find_daemon, self._upstreams_path)
        if daemon is None:
            return None
        timeout = aiohttp.ClientTimeout(total=read_s, sock_connect=CONNECT_S)
        shown = {} if daemon.gateway_key is None else {GATEWAY_HEADER: daemon.gateway_key}
        try:
            url = daemon.url + path
            async with self._session.get(url, headers=shown, timeout=timeout) as reply:
                return await reply.read() if reply.status == 200 else None
        except (aiohttp.ClientError, OSError) as error:
            log.warning("GET %s: no answer from the daemon: %s", path, error)
            return None


def _goes_on(request: web.BaseRequest, daemon: DaemonAt) -> bool:
    """Whether the leader's gateway answers: of files and batches, and once."""
    is_ours = daemon.leader_gateway is None or PASSED_ON_HEADER in request.headers
    return not is_ours and is_daemon_route(request.rel_url.raw_path)


def _headers(request: web.BaseRequest, request_id: str, daemon: DaemonAt) -> CIMultiDict[str]:
    """What the daemon sees of a caller's headers: nobody else can say that he is the gateway, nor
    whose key this is."""
    goes_on = _goes_on(request, daemon)
    sent = forwarded_headers(request, request_id, keeps_key=goes_on)
    for name in (GATEWAY_HEADER, CALLER_HEADER, PASSED_ON_HEADER):
        sent.popall(name, None)
    if goes_on:
        sent[PASSED_ON_HEADER] = "1"
    key = request[ABOUT_CALLER].key
    if key is not None and not goes_on:
        sent[CALLER_HEADER] = key.id
    if request.body_exists and request.content_length is not None:
        sent["Content-Length"] = str(request.content_length)
    if daemon.gateway_key is not None and not goes_on:
        sent[GATEWAY_HEADER] = daemon.gateway_key
    return sent
