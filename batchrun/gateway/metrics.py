"""`GET /metrics`: the daemon's page, at the address that everybody knows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from aiohttp import web

from batchrun.errors import DaemonUnavailableError
from batchrun.gateway.headers import REQUEST_ID
from batchrun.gateway.upstreams import find_daemon

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
