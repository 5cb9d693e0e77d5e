"""What every daemon process needs, whether it leads or stands by: an HTTP server on loopback, the
address that it leaves in the home, and ears for signals."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import uvicorn
from fastapi import FastAPI

from batchrun.files import write_atomically
from batchrun.home import DaemonAddress, Home


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LocalServer:
    """A free port on loopback with two secrets: `address` holds that of the command line."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.address = DaemonAddress(os.getpid(), url, secrets.token_urlsafe(32))
        self.gateway_key = secrets.token_urlsafe(32)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def for_gateway(self) -> dict[str, str]:
        """Where the gateway finds it, and what lets it in."""
        return {"url": self.address.url, "gateway_key": self.gateway_key}

    def start(self, app: FastAPI, home: Home) -> None:
        """Serve `app`, and leave the address in the home."""
        # httptools reads on after an early answer, so that a refused upload hears why.
        config = uvicorn.Config(app, http="httptools", log_level="warning", access_log=False)
        self._server = _Server(config)
        record = json.dumps(asdict(self.address)).encode()
        write_atomically(home.daemon_record, record, mode=0o600)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Answer what is being answered, and no more."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


def catch_signals() -> asyncio.Future[int]:
    """The first of SIGTERM and SIGINT that comes."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return ended
