"""What stands around a deployment: a proxy that spoils an engine's replies, and a caller who asks
an engine that nothing is done to."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import requests

STEADY = "steady"
"""The model of the engine that nothing is done to."""
CALL_WAIT_S = 5.0
TTFT_BOUND_S = 1.0
CALL_PAUSE_S = 0.1
SPOILT = ("delay", "cut", "double", "garbage")


class Proxy:
    """Passes bytes between `port` and an engine's port; replies are spoilt as `how` says."""

    def __init__(self, port: int, engine_port: int, rng: random.Random) -> None:
        self.how = ""
        self._engine_port = engine_port
        self._rng = rng
        self._server = socket.create_server(("127.0.0.1", port), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                threading.Thread(target=self._join, args=(caller,), daemon=True).start()

    def _join(self, caller: socket.socket) -> None:
        address = ("127.0.0.1", self._engine_port)
        with caller, suppress(OSError), socket.create_connection(address) as engine:
            back = threading.Thread(target=self._pass, args=(engine, caller), daemon=True)
            back.start()
            while piece := caller.recv(1 << 16):
                engine.sendall(piece)
            engine.shutdown(socket.SHUT_WR)
            back.join()

    def _pass(self, engine: socket.socket, caller: socket.socket) -> None:
        with suppress(OSError):
            while piece := engine.recv(1 << 16):
                caller.sendall(self._spoil(piece))
        for each in (engine, caller):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _spoil(self, piece: bytes) -> bytes:
        how = self.how
        if how == "delay":
            time.sleep(self._rng.uniform(0.2, 3.0))
        elif how == "double":
            return piece * 2
        elif how == "garbage":
            return self._rng.randbytes(len(piece))
        elif how == "cut" and self._rng.random() < 0.5:
            raise ConnectionAbortedError
        return piece


class Caller:
    """Calls the steady model again and again, in a thread; `calls` are when each began, and whether
    it was answered in time."""

    def __init__(self, url: str) -> None:
        self.calls: list[tuple[float, bool]] = []
        self._url = f"{url}/v1/chat/completions"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make no more calls."""
        self._is_over.set()
        self._thread.join()

    def attainment(self, spared: Sequence[tuple[float, float]]) -> tuple[int, int]:
        """(calls, those answered in time), without calls that began within these spans."""
        counted = [
            is_well
            for at, is_well in self.calls
            if not any(begin - CALL_WAIT_S <= at <= end for begin, end in spared)
        ]
        return len(counted), sum(counted)

    def _run(self) -> None:
        while not self._is_over.wait(CALL_PAUSE_S):
            at = time.time()
            self.calls.append((at, self._call(f"call {len(self.calls)}")))

    def _call(self, text: str) -> bool:
        messages, began_s = [{"role": "user", "content": text}], time.monotonic()
        body: dict[str, Any] = {"model": STEADY, "stream": True, "max_tokens": 4}
        with (
            suppress(requests.RequestException),
            requests.post(
                self._url, json=body | {"messages": messages}, stream=True, timeout=CALL_WAIT_S
            ) as reply,
        ):
            lines = reply.iter_lines()
            first, ttft_s = next(lines, b""), time.monotonic() - began_s
            is_whole = b"data: [DONE]" in lines
            return first.startswith(b"data:") and is_whole and ttft_s <= TTFT_BOUND_S
        return False
