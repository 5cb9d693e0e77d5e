"""This machine's end of the wire to the scheduler in an engine: telemetry in, orders out.

Messages are those of `wire`, as they are; nothing here looks into them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from batchrun.files import short_path
from batchrun.wire import MAX_MESSAGE_BYTES, ORDERS_SUFFIX, TELEMETRY_SUFFIX

MAX_QUEUED = 16
MAX_RECONNECT_MS = 1_000

Hear = Callable[[bytes], None]


class EngineWire(Protocol):
    """How messages of a scheduler come and go."""

    async def run(self, on_telemetry: Hear, on_answer: Hear) -> None:
        """Hand over what comes in, until cancelled."""
        ...

    async def send(self, orders: bytes) -> bool:
        """Send orders; False when nobody is there to take them."""
        ...


class EngineSockets:
    """One engine's sockets, at `path` with two endings; it may not be there, or come and go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._orders: zmq.asyncio.Socket | None = None

    async def run(self, on_telemetry: Hear, on_answer: Hear) -> None:
        """Hand over what comes in, until cancelled."""
        with ExitStack() as exits:
            base = "ipc://" + exits.enter_context(short_path(self._path))
            context = exits.enter_context(zmq.asyncio.Context())
            orders = exits.enter_context(_socket(context, zmq.DEALER, base + ORDERS_SUFFIX))
            telemetry = exits.enter_context(_socket(context, zmq.SUB, base + TELEMETRY_SUFFIX))
            telemetry.subscribe(b"")
            self._orders = orders
            exits.callback(setattr, self, "_orders", None)
            async with asyncio.TaskGroup() as group:
                group.create_task(_hear(orders, on_answer))
                group.create_task(_hear(telemetry, on_telemetry))

    async def send(self, orders: bytes) -> bool:
        """Send orders; False when nobody is there to take them."""
        if self._orders is None:
            return False
        try:
            await self._orders.send(orders, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


async def _hear(socket: zmq.asyncio.Socket, hear: Hear) -> None:
    while True:
        hear(await socket.recv())


def _socket(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = MAX_QUEUED
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    # Without a peer nothing is queued, so that no engine ever gets orders of long ago.
    socket.immediate = 1
    socket.reconnect_ivl_max = MAX_RECONNECT_MS
    socket.connect(address)
    return socket
