"""HTTP connections that calls are passed on over, and are kept for later calls only while nothing
unasked comes on them."""

from __future__ import annotations

import math
import socket
from email.utils import parsedate_to_datetime
from errno import EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp.client import ClientTimeout
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from aiohttp.typedefs import LooseHeaders
from multidict import CIMultiDict

OWN_SHORTAGES = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM, EADDRNOTAVAIL})
"""What is wrong with this process or machine where a connection did not come about so."""
UNREACHED = aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError
"""No connection came about: nothing was sent."""
HOP_BY_HOP = frozenset({
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
})
"""The headers of one connection, in lower case."""
CONNECT_S = 5.0
_PROBES = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""A silent connection is probed after 30 s, and is broken when three probes are not answered."""
# Below the 5 s after which an engine's server closes an idle connection, or a call could meet one
# that is just being closed.
KEEP_ALIVE_S = 3.0
_LIBRARY_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class CleanConnector(aiohttp.TCPConnector):
    """Gives no connection out again on which bytes came after its last reply: what a server sent
    twice would be taken for the reply to the next call, and so on with all calls after that."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of aiohttp's."""
        super().__init__(**{"socket_factory": _watched_socket, **options})
        self._given: WeakSet[object] = WeakSet()
        self._doubted: WeakSet[object] = WeakSet()

    def doubt_all(self) -> None:
        """A reply was to another call: give no connection out again that was given out before, as
        one of them is a reply behind."""
        self._doubted |= self._given

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: ClientTimeout,  # noqa: ASYNC109 - as aiohttp has it
    ) -> Connection:
        """A connection, kept or new."""
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            if protocol is None:
                return connection
            if not protocol.should_close and protocol not in self._doubted:
                self._given.add(protocol)
                return connection
            connection.close()


def end_to_end(headers: CIMultiDict[str] | LooseHeaders) -> CIMultiDict[str]:
    """Those that are passed on with a message."""
    kept = CIMultiDict(headers)
    for name in (*HOP_BY_HOP, "host"):
        kept.popall(name, None)
    return kept


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One that finds out within a minute that the other machine is gone, though nothing is sent."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def open_session(*, keep_alive_s: float = KEEP_ALIVE_S) -> aiohttp.ClientSession:
    """A client that passes bytes on: no cookies kept, nothing unpacked, no limit on total time."""
    return aiohttp.ClientSession(
        connector=CleanConnector(limit=0, keepalive_timeout=keep_alive_s),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_LIBRARY_HEADERS,
    )


def parse_retry_after(value: str | None, *, now_s: float) -> float | None:
    """Seconds to wait from a `Retry-After` header (seconds or a date); None when it is neither."""
    if value is None:
        return None
    try:
        wait_s = float(value)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, OverflowError):
            return None
    return max(0.0, wait_s) if math.isfinite(wait_s) else None
