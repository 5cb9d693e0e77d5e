"""Reading a request body within bounds of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

MIN_BYTES_PER_S = 1_024


async def read_body(request: web.BaseRequest, *, max_bytes: int, idle_s: float) -> bytes:
    """The whole body. Raises a web.HTTPException whose text is the message for the caller.

    Compressed bodies are refused: they would hide what the gateway must look for, and bombs.
    """
    _refuse_compressed(request)
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes, request.content_length or 0)
    await _invite(request)
    body = bytearray()
    pieces = _Pieces(request, idle_s=idle_s)
    while chunk := await pieces.next():
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
        pieces = _Pieces(self._request, idle_s=self._idle_s)
        try:
            while chunk := await pieces.next():
                yield chunk
        except web.HTTPException as refusal:
            self.refusal = refusal
            raise


def _refuse_compressed(request: web.BaseRequest) -> None:
    codings = {
        coding.strip().lower()
        for name in ("Content-Encoding", "Transfer-Encoding")
        for value in request.headers.getall(name, [])
        for coding in value.split(",")
    }
    if request.body_exists and not codings <= {"identity", "chunked"}:
        raise web.HTTPUnsupportedMediaType(text="Content-Encoding is not supported; send it plain")


async def _invite(request: web.BaseRequest) -> None:
    """Tell a caller that waits for it to go on with the body."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


class _Pieces:
    """The pieces of a body; a caller who sends none for `idle_s`, or too little all in all, is
    refused. Only the time that is spent waiting for the caller counts."""

    def __init__(self, request: web.BaseRequest, *, idle_s: float) -> None:
        self._request = request
        self._idle_s = idle_s
        self._left_s = idle_s

    async def next(self) -> bytes:
        """The next piece; none at the end."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(min(self._idle_s, self._left_s)):
                piece = await self._request.content.readany()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=self._why_late()) from error
        except web.RequestPayloadError as error:
            raise web.HTTPBadRequest(text="the request body is not valid HTTP") from error
        self._left_s += len(piece) / MIN_BYTES_PER_S - (loop.time() - began_s)
        return piece

    def _why_late(self) -> str:
        if self._left_s < self._idle_s:
            return f"the request body comes with less than {MIN_BYTES_PER_S} bytes a second"
        return f"no byte of the request body came for {self._idle_s:g} s"


def _too_large(max_bytes: int, actual_bytes: int) -> web.HTTPRequestEntityTooLarge:
    message = f"the request body is larger than the limit of {max_bytes} bytes"
    return web.HTTPRequestEntityTooLarge(max_bytes, actual_bytes, text=message)
