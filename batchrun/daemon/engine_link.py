"""The daemon's end of the wire to one engine: the newest telemetry, orders and their answers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from batchrun.wire import (
    MAX_MESSAGE_BYTES,
    ORDERS_SUFFIX,
    TELEMETRY_SUFFIX,
    Answer,
    Orders,
    Telemetry,
    encode,
    read_answer,
    read_telemetry,
)

log = logging.getLogger(__name__)

ANSWER_WAIT_S = 2.0
HISTORY_S = 30.0
HISTORY_STEP_S = 1.0
STALE_S = 5.0
"""An engine that was not heard for so long shows nothing."""
MAX_QUEUED = 16


class EngineLink:
    """One engine's sockets, at `path` with two endings; it may not be there, or come and go.

    Orders that nobody is there to take are lost: the next ones say everything anew. Call `run` to
    hear anything. `on_start` is called when an engine is heard for the first time.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self._latest: tuple[float, Telemetry] | None = None
        self._history: deque[tuple[float, Telemetry]] = deque()
        self._answer: tuple[float, Answer] | None = None
        self._awaited: dict[int, asyncio.Future[Answer]] = {}
        self._orders: zmq.asyncio.Socket | None = None

    @property
    def telemetry(self) -> Telemetry | None:
        """What the engine said last; None when it has not been heard for `STALE_S`.

        What is in force is corrected by a newer answer: an engine that sleeps says nothing new.
        """
        if self._latest is None or time.monotonic() - self._latest[0] > STALE_S:
            return None
        telemetry = self._latest[1]
        if self._answer is None or self._answer[0] <= telemetry.sent_at:
            return telemetry
        answer = self._answer[1]
        return msgspec.structs.replace(
            telemetry,
            policy=answer.policy,
            token_budget=answer.token_budget,
            is_offline_on=answer.is_offline_on,
        )

    @property
    def history(self) -> tuple[float, Telemetry, Telemetry] | None:
        """(seconds between them, oldest, newest) of the last `HISTORY_S` of one engine's life."""
        if len(self._history) < 2:
            return None
        (first_s, first), (last_s, last) = self._history[0], self._history[-1]
        return last_s - first_s, first, last

    async def run(self, on_start: Callable[[], None]) -> None:
        """Listen until cancelled."""
        # A unix socket's path has room for about 100 characters, a home may be longer.
        folder_fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with zmq.asyncio.Context() as context:
                context.linger = 0
                base = f"ipc:///proc/self/fd/{folder_fd}/{self._path.name}"
                self._orders = _socket(context, zmq.DEALER, base + ORDERS_SUFFIX)
                telemetry = _socket(context, zmq.SUB, base + TELEMETRY_SUFFIX)
                telemetry.subscribe(b"")
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._hear_answers(self._orders))
                        group.create_task(self._hear_telemetry(telemetry, on_start))
                finally:
                    self._orders.close(linger=0)
                    telemetry.close(linger=0)
                    self._orders = None
        finally:
            os.close(folder_fd)

    async def order(self, orders: Orders) -> Answer | None:
        """Send orders; returns the engine's answer, None when there is none in `ANSWER_WAIT_S`."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._awaited[orders.number] = answered
        try:
            if self._orders is None:
                return None
            await self._orders.send(encode(orders), zmq.NOBLOCK)
            async with asyncio.timeout(ANSWER_WAIT_S):
                answer = await answered
        except (zmq.ZMQError, TimeoutError):
            return None
        finally:
            del self._awaited[orders.number]
        self._answer = (time.time(), answer)
        return answer

    async def _hear_answers(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = await socket.recv()
            with suppress(ValueError):
                answer = read_answer(message)
                answered = self._awaited.get(answer.number)
                if answered is not None and not answered.done():
                    answered.set_result(answer)

    async def _hear_telemetry(
        self, socket: zmq.asyncio.Socket, on_start: Callable[[], None]
    ) -> None:
        while True:
            message = await socket.recv()
            try:
                telemetry = read_telemetry(message)
            except ValueError as error:
                log.warning("engine %s sent telemetry that cannot be read: %s", self.name, error)
                continue
            is_new = self._latest is None or self._latest[1].start_id != telemetry.start_id
            self._remember(time.monotonic(), telemetry, is_new=is_new)
            if is_new:
                on_start()

    def _remember(self, now_s: float, telemetry: Telemetry, *, is_new: bool) -> None:
        self._latest = (now_s, telemetry)
        history = self._history
        if is_new:
            history.clear()
            self._answer = None
        if not history or now_s - history[-1][0] >= HISTORY_STEP_S:
            history.append(self._latest)
        while history[0][0] < now_s - HISTORY_S:
            history.popleft()


def _socket(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = MAX_QUEUED
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    # Without a peer nothing is queued, so that no engine ever gets orders of long ago.
    socket.immediate = 1
    socket.reconnect_ivl_max = 1_000
    socket.connect(address)
    return socket
