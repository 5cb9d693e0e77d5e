"""The door of an engine that batchrun started: its secret is asked for on every route.

vLLM's own key guards `/v1` alone; `/invocations`, `/tokenize` or `/metrics` answer anybody. So
`EngineDoor` stands before vLLM's application (`--middleware`), in the engine's own environment:
nothing of ours is imported here. The secret comes in the environment, never as an argument.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM reads it too, and the fake engine."""
OPEN_PATHS = frozenset({"/health"})
"""Whether an engine lives is no secret."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
REFUSAL = json.dumps({
    "error": {
        "message": "this engine is batchrun's; ask the gateway",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
}).encode()


def is_let_in(path: str, authorization: bytes, key: str) -> bool:
    """Whether a call with this header may go on."""
    return path in OPEN_PATHS or hmac.compare_digest(authorization, f"Bearer {key}".encode())


class EngineDoor:
    """An ASGI middleware. Without a secret in the environment it lets everybody in."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer 401, or hand the call on."""
        kind = scope["type"]
        given = next((v for k, v in scope.get("headers", ()) if k == b"authorization"), b"")
        is_call = kind in {"http", "websocket"}
        if not is_call or not self._key or is_let_in(scope["path"], given, self._key):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
