"""The engine's end of the wire: telemetry out, orders in, on a thread of its own.

The scheduler never waits for it: it leaves its newest telemetry in a variable and finds checked
orders in a queue. So an engine that sleeps answers too, and the orders hold from its next step on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from batchrun.wire import (
    CHANNEL_VARIABLE,
    MAX_MESSAGE_BYTES,
    ORDERS_SUFFIX,
    TELEMETRY_SUFFIX,
    Telemetry,
    encode,
)

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
"""Telemetry goes out at most so often."""
REPEAT_S = 1.0
"""Unchanged telemetry goes out so often, so that a daemon that comes later sees it."""
ORDERS_PAUSE_S = 0.02
"""Rest after each `MAX_QUEUED` orders, so that a flood of them takes no time from the steps."""
MAX_QUEUED = 16


class EngineChannel:
    """Two sockets at `path` (+ `.telemetry`, `.orders`), open until `close`.

    `receive` gets each message that came in and returns the answer; it must not raise. Telemetry
    for which a peer has no room is dropped. Raises OSError when the sockets cannot be bound.
    """

    def __init__(self, path: Path, receive: Callable[[bytes], bytes]) -> None:
        self._receive = receive
        self._telemetry: Telemetry | None = None
        self._is_closing = threading.Event()
        # A unix socket's path has room for about 100 characters, a home may be longer.
        self._folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._context = zmq.Context()
        self._names = [path.name + ORDERS_SUFFIX, path.name + TELEMETRY_SUFFIX]
        try:
            self._orders = self._bind(zmq.ROUTER, self._names[0])
            self._publisher = self._bind(zmq.PUB, self._names[1])
        except zmq.ZMQError as error:
            self._release()
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._thread = threading.Thread(target=self._run, name="batchrun-channel", daemon=True)
        self._thread.start()

    def publish(self, telemetry: Telemetry) -> None:
        """Send this, or something newer, within `INTERVAL_S`. Costs nothing here."""
        self._telemetry = telemetry

    def close(self) -> None:
        """End the thread and remove the sockets."""
        self._is_closing.set()
        self._thread.join()
        self._release()

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = MAX_QUEUED
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.bind(f"ipc:///proc/self/fd/{self._folder_fd}/{name}")
        os.chmod(name, 0o600, dir_fd=self._folder_fd)
        return socket

    def _run(self) -> None:
        sent: Telemetry | None = None
        sent_at_s = float("-inf")
        while not self._is_closing.is_set():
            if self._orders.poll(int(INTERVAL_S * 1000)):
                self._answer_all()
                self._is_closing.wait(ORDERS_PAUSE_S)
            age_s = time.monotonic() - sent_at_s
            latest = self._telemetry
            if latest is not None and age_s >= (REPEAT_S if latest is sent else INTERVAL_S):
                sent, sent_at_s = latest, time.monotonic()
                with suppress(zmq.ZMQError):
                    self._publisher.send(encode(latest), zmq.NOBLOCK)

    def _answer_all(self) -> None:
        for _ in range(MAX_QUEUED):
            try:
                sender, *parts = self._orders.recv_multipart(zmq.NOBLOCK)
                answer = self._receive(b"".join(parts))
                self._orders.send_multipart((sender, answer), zmq.NOBLOCK)
            except zmq.ZMQError:
                return

    def _release(self) -> None:
        self._context.destroy(linger=0)
        for name in self._names:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._folder_fd)
        os.close(self._folder_fd)


def names_channel() -> bool:
    """Whether the environment names a path for a channel."""
    return bool(os.environ.get(CHANNEL_VARIABLE))


def open_channel(receive: Callable[[bytes], bytes]) -> EngineChannel | None:
    """The channel at the path that the environment names; None when it cannot be opened there."""
    try:
        return EngineChannel(Path(os.environ[CHANNEL_VARIABLE]), receive)
    except OSError as error:
        log.warning("batchrun: no telemetry and no orders: %s", error)
        return None
