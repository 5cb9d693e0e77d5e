"""Reading a request body within bounds of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web


async def read_body(request: web.BaseRequest, *, max_bytes: int, idle_s: float) -> bytes:
    """The whole body. Raises a web.HTTPException whose text is the message for the caller.

    Compressed bodies are refused: they would hide what the gateway must look for, and bombs.
    """
    _refuse_compressed(request)
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes, request.content_length or 0)
    await _invite(request)
    body = bytearray()
    while chunk := await _next_chunk(request, idle_s=idle_s):
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes, len(body))
    return bytes(body)


class BodyStream:
    """A body piece by piece, of any size: `refusal` is why it ended early, where it did.

    Raises a web.HTTPException when it is made, and the refusal when it is read.
    """

    def __init__(self, request: web.BaseRequest, *, idle_s: float) -> None:
        _refuse_compressed(request)
        self._request = request
        self._idle_s = idle_s
        self.refusal: web.HTTPException | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await _invite(self._request)
        try:
            while chunk := await _next_chunk(self._request, idle_s=self._idle_s):
                yield chunk
        except web.HTTPException as refusal:
            self.refusal = refusal
            raise


def _refuse_compressed(request: web.BaseRequest) -> None:
    encoding = request.headers.get("Content-Encoding", "identity")
    if request.body_exists and encoding.strip().lower() != "identity":
        raise web.HTTPUnsupportedMediaType(text="Content-Encoding is not supported; send it plain")


async def _invite(request: web.BaseRequest) -> None:
    """Tell a caller that waits for it to go on with the body."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


async def _next_chunk(request: web.BaseRequest, *, idle_s: float) -> bytes:
    try:
        async with asyncio.timeout(idle_s):
            return await request.content.readany()
    except TimeoutError as error:
        message = f"no byte of the request body came for {idle_s:g} s"
        raise web.HTTPRequestTimeout(text=message) from error
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text="the request body is not valid HTTP") from error


def _too_large(max_bytes: int, actual_bytes: int) -> web.HTTPRequestEntityTooLarge:
    message = f"the request body is larger than the limit of {max_bytes} bytes"
    return web.HTTPRequestEntityTooLarge(max_bytes, actual_bytes, text=message)
