"""One gateway worker: bind, serve, drain. Errors below the routes wear OpenAI's envelope too."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from batchrun.errors import ConfigError
from batchrun.files import allow_many_open_files
from batchrun.keys import UsageFile
from batchrun.media.connections import open_session
from batchrun.server.gateway.admission import CallsAtOnce, Door, KeyRing, RequestRates, read_keys
from batchrun.server.gateway.app import Gateway, GatewaySettings
from batchrun.server.gateway.balancer import Balancer
from batchrun.server.gateway.dashboard import read_or_make_secret
from batchrun.server.gateway.envelope import REQUEST_ID, RefusalError, new_request_id
from batchrun.server.gateway.forward import Forwarder
from batchrun.server.gateway.shared_book import SharedBook, create
from batchrun.server.gateway.tally import Tally, create_tally
from batchrun.server.gateway.upstreams import FollowedFile, read_upstreams

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
# After a refusal the rest of an upload is read and dropped so long, or the caller would meet a
# reset connection before it reads why.
LINGER_S = 5.0
CANCEL_S = 1.0
"""For what a cancelled call has still to count and to close."""


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
        self._call: asyncio.Task[Any] | None = None
        self._body: aiohttp.StreamReader | None = None

    def data_received(self, data: bytes) -> None:
        """Bytes came; of a request's head, unless one is answered or its body still comes."""
        is_body = self._body is not None and not self._body.is_eof()
        super().data_received(data)
        if self._call is None and not is_body and self._head_timer is None:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(self._head_s, self._end_slow_head)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()

    @contextmanager
    def answering(self, body: aiohttp.StreamReader) -> Iterator[None]:
        """While a request, whose headers are complete, is answered."""
        self._stop_head_timer()
        self._call, self._body = asyncio.current_task(), body
        try:
            yield
        finally:
            self._call = None

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109 - as aiohttp has it
        """Wait so long for the call under way, then cancel it: aiohttp itself waits twice. A call
        whose bytes have just come is not under way yet, and has as long."""
        if (call := self._call) is not None:
            await asyncio.wait({call}, timeout=timeout)
            call.cancel()
        await super().shutdown(timeout if call is None else CANCEL_S)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_slow_head(self) -> None:
        self._head_timer = None
        if self.transport is None:
            return
        message = f"the headers of the request did not end within {self._head_s:g} s"
        body = RefusalError(408, message).body
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
        response = RefusalError(status, text).response(request_id)
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


BACKLOG = 1024
RATES = ".rates"
CALLS = ".calls"
USAGE = ".usage"
SESSIONS = ".sessions"
"""The endings of the files, beside that of the keys, in which workers count requests, calls in
flight and what keys have used, and of the secret behind the page's sessions."""
STALLED_READER_S = 120
"""A caller who takes no byte of an answer for so long is cut off, and its call at the engine."""


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket; a `shared` one lets other workers bind the same port.

    Raises ConfigError if the address is taken or not of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--listen: no address for {host!r}: {error.strerror}") from error
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The connections that it accepts have this option too.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_READER_S * 1_000)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(_why_not_bound(host, port, error)) from error
    return sock


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: stop the program that holds it or choose another"
    return f"cannot listen on {host}:{port}: {error.strerror}"


async def serve(
    settings: GatewaySettings,
    sock: socket.socket,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None],
) -> None:
    """Answer calls on `sock` until `stop` is set; then let running calls end within `drain_s`.

    Raises ConfigError when API keys are asked for and cannot be read.
    """
    allow_many_open_files()
    async with AsyncExitStack() as exits:
        session = await exits.enter_async_context(open_session())
        door = await _make_door(settings, exits)
        book_fd = create(settings.num_workers) if settings.book_fd is None else settings.book_fd
        balancer = Balancer(SharedBook(book_fd, settings.num_workers, settings.worker))
        num_workers = settings.num_workers
        tally_fd = create_tally(num_workers) if settings.tally_fd is None else settings.tally_fd
        tally = Tally(tally_fd, num_workers, settings.worker)
        gateway = Gateway(settings, Forwarder(balancer, session), door, tally)
        exits.push_async_callback(gateway.close)
        upstreams = FollowedFile(settings.upstreams_path, read_upstreams, gateway.take_over)
        await _follow(upstreams, exits)
        server = GatewayServer(gateway, head_s=settings.body_idle_s)
        runner = web.ServerRunner(server, shutdown_timeout=settings.drain_s)
        await runner.setup()
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        on_ready()
        try:
            await stop.wait()
        finally:
            await runner.cleanup()


async def _make_door(settings: GatewaySettings, exits: AsyncExitStack) -> Door:
    keys, keys_path = KeyRing(), settings.keys_path
    if keys_path is None:
        return Door(keys)
    # A gateway that does not know its keys must not open: later it keeps those that it had.
    keys.replace(read_keys(keys_path))
    await _follow(FollowedFile(keys_path, read_keys, keys.replace), exits)
    rates = exits.enter_context(closing(RequestRates(keys_path.with_suffix(RATES))))
    usage = exits.enter_context(closing(UsageFile(keys_path.with_suffix(USAGE))))
    workers = settings.num_workers, settings.worker
    calls = exits.enter_context(closing(CallsAtOnce(keys_path.with_suffix(CALLS), *workers)))
    secret = read_or_make_secret(keys_path.with_suffix(SESSIONS))
    return Door(keys, rates, usage, calls, secret)


async def _follow(file: FollowedFile[Any], exits: AsyncExitStack) -> None:
    await file.refresh()
    watching = asyncio.create_task(file.watch())
    exits.callback(watching.cancel)
