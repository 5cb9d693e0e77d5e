"""Files and batches: passed on to the daemon, bodies streamed both ways and held nowhere."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from batchrun.errors import DaemonUnavailableError
from batchrun.gateway.body import BodyStream
from batchrun.gateway.door import ABOUT_CALLER
from batchrun.gateway.headers import REQUEST_ID, SET_BY_CLIENT_LIBRARY, end_to_end
from batchrun.gateway.relay import relay
from batchrun.gateway.upstreams import DaemonAt, find_daemon
from batchrun.home import CALLER_HEADER, GATEWAY_HEADER

log = logging.getLogger(__name__)

DAEMON_ROUTES = ("/v1/files", "/v1/batches")
AWAY = "files and batches are not served at the moment; try again shortly"


def is_daemon_route(raw_path: str) -> bool:
    """Whether a path belongs to the daemon, with whatever method."""
    return any(raw_path == route or raw_path.startswith(f"{route}/") for route in DAEMON_ROUTES)


class DaemonCalls:
    """Carries calls to the daemon that the upstreams file names."""

    def __init__(
        self, session: aiohttp.ClientSession, upstreams_path: Path, *, body_idle_s: float
    ) -> None:
        self._session = session
        self._upstreams_path = upstreams_path
        self._body_idle_s = body_idle_s

    async def pass_on(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """Answer with what the daemon answers.

        Raises DaemonUnavailableError, and a web.HTTPException for a body that does not come.
        """
        daemon = await asyncio.to_thread(find_daemon, self._upstreams_path)
        if daemon is None:
            raise DaemonUnavailableError(AWAY)
        body = BodyStream(request, idle_s=self._body_idle_s)
        try:
            reply = await self._session.request(
                request.method,
                URL(daemon.url + request.rel_url.raw_path_qs, encoded=True),
                headers=_headers(request, request_id, daemon),
                data=aiter(body) if request.body_exists else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            if body.refusal is not None:
                raise body.refusal from error
            log.warning("call %s: no answer from the daemon: %s", request_id, error)
            raise DaemonUnavailableError(AWAY) from error
        async with reply:
            return await relay(request, reply, request_id=request_id)


def _headers(request: web.BaseRequest, request_id: str, daemon: DaemonAt) -> CIMultiDict[str]:
    """What the daemon sees of a caller's headers: nobody else can say that he is the gateway, nor
    whose key this is."""
    sent = end_to_end(request.headers)
    for name in (*SET_BY_CLIENT_LIBRARY, GATEWAY_HEADER, CALLER_HEADER, "Authorization"):
        sent.popall(name, None)
    key = request[ABOUT_CALLER].key
    if key is not None:
        sent[CALLER_HEADER] = key.id
    if request.body_exists and request.content_length is not None:
        sent["Content-Length"] = str(request.content_length)
    sent[REQUEST_ID] = request_id
    if daemon.gateway_key is not None:
        sent[GATEWAY_HEADER] = daemon.gateway_key
    return sent
