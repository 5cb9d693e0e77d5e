"""The HTTP server below the routes: its own errors wear the envelope too."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from batchrun.gateway.app import Gateway
from batchrun.gateway.envelope import error_response
from batchrun.gateway.headers import new_request_id

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
# After a refusal the rest of an upload is read and dropped so long, or the caller would meet a
# reset connection before it reads why.
LINGER_S = 5.0


class GatewayProtocol(web.RequestHandler):
    """One connection of a caller."""

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
            logger.error("call %s failed in the gateway", request_id, exc_info=exc)
            text = "internal error in the gateway"
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun already")
        response = error_response(status, text, request_id=request_id)
        response.force_close()
        return response


class GatewayServer(web.Server):
    """Makes one protocol per connection; a caller that hangs up cancels its handler."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.handle, handler_cancellation=True)

    def __call__(self) -> web.RequestHandler:
        return GatewayProtocol(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
        )
