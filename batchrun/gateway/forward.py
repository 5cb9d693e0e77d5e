"""One call to an engine: choose it, open the exchange, close it whatever happens."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDictProxy
from yarl import URL

from batchrun.errors import EngineError
from batchrun.gateway.balancer import Balancer
from batchrun.gateway.headers import request_headers
from batchrun.gateway.rewriting import Rewriting
from batchrun.gateway.steered import SteeredBody
from batchrun.gateway.upstreams import Upstream

log = logging.getLogger(__name__)

CONNECT_S = 5.0
HEALTH_S = 2.0
# Below the 5 s after which an engine's server closes an idle connection, or a call could meet one
# that is just being closed.
KEEP_ALIVE_S = 3.0
_LIBRARY_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


@dataclass(frozen=True, slots=True)
class Call:
    """What goes to an engine: `target` is path and query exactly as the caller spelled them.

    A steered body is written for the engine that is tried.
    """

    method: str
    target: str
    headers: CIMultiDictProxy[str]
    request_id: str
    body: bytes | SteeredBody | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """An engine's reply, and what is to be changed in it."""

    reply: aiohttp.ClientResponse
    rewriting: Rewriting | None


def open_session() -> aiohttp.ClientSession:
    """A client that passes bytes on: no cookies kept, nothing unpacked, no limit on total time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_LIBRARY_HEADERS,
    )


def _rewriting(call: Call, upstream: Upstream) -> Rewriting | None:
    if not isinstance(call.body, SteeredBody):
        return None
    return Rewriting(call.body.tier_at(upstream), upstream.hint_nonce)


class Forwarder:
    """Carries calls to the engines that `balancer` knows."""

    def __init__(self, balancer: Balancer, session: aiohttp.ClientSession) -> None:
        self.balancer = balancer
        self.session = session

    @asynccontextmanager
    async def exchange(self, call: Call) -> AsyncIterator[Exchange]:
        """The engine's reply, its headers read. Leaving the block early cancels it at the engine.

        An engine that cannot be connected to is passed over; once bytes were sent no other one
        is tried. Raises EngineError.
        """
        is_offline = isinstance(call.body, SteeredBody) and call.body.is_flex
        for upstream in self.balancer.candidates(now_s=time.monotonic(), is_offline=is_offline):
            with self.balancer.call(upstream):
                reply = await self._connect(upstream, call)
                if reply is None:
                    continue
                try:
                    yield Exchange(reply, _rewriting(call, upstream))
                finally:
                    reply.close()
                return
        raise EngineError("no engine can be reached; try again shortly")

    async def _connect(self, upstream: Upstream, call: Call) -> aiohttp.ClientResponse | None:
        headers = request_headers(call.headers, request_id=call.request_id, upstream=upstream)
        body = call.body
        if isinstance(body, SteeredBody):
            body = body.written_for(upstream)
            headers["Accept-Encoding"] = "identity"
        try:
            return await self.session.request(
                call.method,
                URL(upstream.url + call.target, encoded=True),
                headers=headers,
                data=io.BytesIO(body) if body is not None else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            log.warning("engine %s cannot be reached: %s", upstream.name, error)
            self.balancer.mark_down(upstream, now_s=time.monotonic())
            return None
        except (aiohttp.ClientError, OSError) as error:
            log.warning("engine %s gave no answer: %s", upstream.name, error)
            raise EngineError("the engine closed the connection without an answer") from error

    async def is_any_healthy(self) -> bool:
        """Whether at least one engine answers its health check within 2 s."""
        checks = [self._is_healthy(upstream) for upstream in self.balancer.upstreams]
        return any(await asyncio.gather(*checks))

    async def _is_healthy(self, upstream: Upstream) -> bool:
        timeout = aiohttp.ClientTimeout(total=HEALTH_S)
        try:
            async with self.session.get(upstream.url + "/health", timeout=timeout) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError):
            return False
