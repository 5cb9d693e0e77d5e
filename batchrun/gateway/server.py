"""Run one gateway worker: bind, serve, drain."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

from aiohttp import web

from batchrun.errors import ConfigError
from batchrun.files import allow_many_open_files
from batchrun.gateway.app import Gateway
from batchrun.gateway.balancer import Balancer
from batchrun.gateway.callers import KeyRing, read_keys
from batchrun.gateway.door import Door
from batchrun.gateway.followed_file import FollowedFile
from batchrun.gateway.forward import Forwarder, open_session
from batchrun.gateway.protocol import GatewayServer
from batchrun.gateway.rate_limits import RequestRates
from batchrun.gateway.settings import GatewaySettings
from batchrun.gateway.upstreams import read_upstreams
from batchrun.key_usage import UsageFile

BACKLOG = 1024
RATES = ".rates"
USAGE = ".usage"
"""The endings of the files, beside that of the keys, in which workers count requests together, and
what keys have used."""
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
        door = await _make_door(settings.keys_path, exits)
        gateway = Gateway(settings, Forwarder(Balancer(), session), door)
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


async def _make_door(keys_path: Path | None, exits: AsyncExitStack) -> Door:
    keys = KeyRing()
    if keys_path is None:
        return Door(keys)
    # A gateway that does not know its keys must not open: later it keeps those that it had.
    keys.replace(read_keys(keys_path))
    await _follow(FollowedFile(keys_path, read_keys, keys.replace), exits)
    rates = exits.enter_context(closing(RequestRates(keys_path.with_suffix(RATES))))
    usage = exits.enter_context(closing(UsageFile(keys_path.with_suffix(USAGE))))
    return Door(keys, rates, usage)


async def _follow(file: FollowedFile[Any], exits: AsyncExitStack) -> None:
    await file.refresh()
    watching = asyncio.create_task(file.watch())
    exits.callback(watching.cancel)
