"""Run one gateway worker: bind, serve, drain."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable

from aiohttp import web

from batchrun.errors import ConfigError
from batchrun.gateway.app import Gateway
from batchrun.gateway.balancer import Balancer
from batchrun.gateway.forward import Forwarder, open_session
from batchrun.gateway.protocol import GatewayServer
from batchrun.gateway.settings import GatewaySettings
from batchrun.gateway.upstreams import UpstreamsFile

BACKLOG = 1024


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
    """Answer calls on `sock` until `stop` is set; then let running calls end within `drain_s`."""
    _allow_many_connections()
    balancer = Balancer()
    upstreams_file = UpstreamsFile(settings.upstreams_path, balancer.replace)
    async with open_session() as session:
        await upstreams_file.refresh()
        watching = asyncio.create_task(upstreams_file.watch())
        server = GatewayServer(Gateway(settings, Forwarder(balancer, session), upstreams_file))
        runner = web.ServerRunner(server, shutdown_timeout=settings.drain_s)
        await runner.setup()
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        on_ready()
        try:
            await stop.wait()
        finally:
            await runner.cleanup()
            watching.cancel()


def _allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
