"""A middleware of vLLM that notes every POST which reaches it, as the fake engine notes them.

`--middleware=benchmarks.noted_calls.NotedCalls`; the file is named by `NOTED_CALLS_FILE` in the
engine's environment. Each POST with a request id leaves a line `{"request_id": ..., "at": ...}`
before vLLM sees it. Nothing stands between caller and engine: a dead one refuses connections.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

FILE_VARIABLE = "NOTED_CALLS_FILE"
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class NotedCalls:
    """An ASGI middleware. What it has written outlives a kill: it keeps nothing back."""

    def __init__(self, app: Application) -> None:
        self._app = app
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(os.environ[FILE_VARIABLE], flags, 0o600)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Note the call and hand it on."""
        if scope["type"] == "http" and scope["method"] == "POST":
            found = (value for name, value in scope["headers"] if name == b"x-request-id")
            line = {"request_id": next(found, b"").decode(), "at": time.time()}
            os.write(self._file, f"{json.dumps(line)}\n".encode())
        await self._app(scope, receive, send)
