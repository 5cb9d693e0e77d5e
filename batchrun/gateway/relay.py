"""Hand an engine's reply to the caller, each piece as it comes."""

from __future__ import annotations

import logging

import aiohttp
from aiohttp import web

from batchrun.errors import EngineError
from batchrun.gateway.call_meter import CallMeter
from batchrun.gateway.door import ABOUT_CALLER
from batchrun.gateway.envelope import as_envelope
from batchrun.gateway.headers import REQUEST_ID, end_to_end
from batchrun.gateway.rewriting import Rewriting, end_all, feed_all

log = logging.getLogger(__name__)

MAX_ERROR_BYTES = 2**20


async def relay(
    request: web.BaseRequest,
    reply: aiohttp.ClientResponse,
    *,
    request_id: str,
    rewriting: Rewriting | None = None,
    meter: CallMeter | None = None,
) -> web.StreamResponse:
    """Answer `request` with `reply`; status and end-to-end headers are the engine's. `meter` sees
    an answer as it passes.

    A reply that breaks off is broken off for the caller too, never ended as if it were whole.
    Raises EngineError if it breaks off before anything was handed on.
    """
    headers = end_to_end(reply.headers)
    headers.setdefault(REQUEST_ID, request_id)
    headers.update(request[ABOUT_CALLER].reply_headers)
    filters = [] if rewriting is None else rewriting.filters_for(reply)
    if _is_short_error(reply):
        body = as_envelope(reply.status, await _read_error(reply))
        body = feed_all(filters, body) + end_all(filters)
        headers["Content-Type"] = "application/json"
        headers.popall("Content-Length", None)
        return web.Response(status=reply.status, reason=reply.reason, headers=headers, body=body)
    if filters:
        headers.popall("Content-Length", None)
    response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
    await response.prepare(request)
    try:
        async for chunk in reply.content.iter_any():
            if meter is not None:
                meter.feed(chunk)
            await response.write(feed_all(filters, chunk) if filters else chunk)
        await response.write_eof(end_all(filters))
    except (aiohttp.ClientError, OSError) as error:
        caller = request.transport
        if caller is not None and not caller.is_closing():
            log.warning("call %s broke off at the engine: %s", request_id, error)
            caller.abort()
    finally:
        if meter is not None:
            meter.close()
    return response


async def _read_error(reply: aiohttp.ClientResponse) -> bytes:
    try:
        return await reply.read()
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError("the engine closed the connection within its answer") from error


def _is_short_error(reply: aiohttp.ClientResponse) -> bool:
    length = reply.content_length
    is_plain = "Content-Encoding" not in reply.headers
    return reply.status >= 400 and is_plain and length is not None and length <= MAX_ERROR_BYTES
