"""The HTTP server below the routes: its own errors wear the envelope too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from batchrun.gateway.app import Gateway
from batchrun.gateway.envelope import error_body, error_response
from batchrun.gateway.headers import REQUEST_ID, new_request_id

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
# After a refusal the rest of an upload is read and dropped so long, or the caller would meet a
# reset connection before it reads why.
LINGER_S = 5.0


class GatewayProtocol(web.RequestHandler):
    """One connection of a caller, who has `head_s` from the first byte of a request to the end of
    its headers."""

    def __init__(self, server: web.Server, *, head_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's types leave None out
        )
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_answering = False
        self._body: aiohttp.StreamReader | None = None

    def data_received(self, data: bytes) -> None:
        """Bytes came; of a request's head, unless one is answered or its body still comes."""
        is_body = self._body is not None and not self._body.is_eof()
        super().data_received(data)
        if not self._is_answering and not is_body and self._head_timer is None:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(self._head_s, self._end_slow_head)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The caller is gone."""
        super().connection_lost(exc)
        self._stop_head_timer()

    @contextmanager
    def answering(self, body: aiohttp.StreamReader) -> Iterator[None]:
        """While a request, whose headers are complete, is answered."""
        self._stop_head_timer()
        self._is_answering, self._body = True, body
        try:
            yield
        finally:
            self._is_answering = False

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_slow_head(self) -> None:
        self._head_timer = None
        if self.transport is None:
            return
        message = f"the headers of the request did not end within {self._head_s:g} s"
        body = error_body(408, message)
        head = (
            "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{REQUEST_ID}: {new_request_id()}\r\n"
            "Connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not valid HTTP, and what went wrong in the gateway itself."""
        request_id = new_request_id()
        text = "the request is not valid HTTP"
        if status >= 500:
            log.error("call %s failed in the gateway", request_id, exc_info=exc)
            text = "internal error in the gateway"
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun already")
        response = error_response(status, text, request_id=request_id)
        response.force_close()
        return response


class GatewayServer(web.Server):
    """Makes one protocol per connection; a caller that hangs up cancels its handler."""

    def __init__(self, gateway: Gateway, *, head_s: float) -> None:
        super().__init__(self._answer, handler_cancellation=True)
        self._gateway = gateway
        self._head_s = head_s

    def __call__(self) -> web.RequestHandler:
        return GatewayProtocol(self, head_s=self._head_s)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request.protocol, GatewayProtocol)
        with request.protocol.answering(request.content):
            return await self._gateway.handle(request)
