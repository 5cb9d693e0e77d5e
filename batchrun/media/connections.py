"""HTTP connections that are kept for later calls only while nothing unasked comes on them."""

from __future__ import annotations

from errno import EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM

import aiohttp
from aiohttp.client import ClientTimeout
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

OWN_SHORTAGES = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM, EADDRNOTAVAIL})
"""What is wrong with this process or machine where a connection did not come about so."""
UNREACHED = aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError
"""No connection came about: nothing was sent."""


class CleanConnector(aiohttp.TCPConnector):
    """Gives no connection out again on which bytes came after its last reply: what a server sent
    twice would be taken for the reply to the next call, and so on with all calls after that."""

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: ClientTimeout,  # noqa: ASYNC109 - as aiohttp has it
    ) -> Connection:
        """A connection, kept or new."""
        while True:
            connection = await super().connect(req, traces, timeout)
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()
