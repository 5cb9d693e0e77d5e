"""The door of an engine that batchrun started: who comes in, and how many rows at once.

vLLM's own key guards `/v1` alone; `/invocations`, `/tokenize` or `/metrics` answer anybody. So
`EngineDoor` stands before vLLM's application (`--middleware`), in the engine's own environment:
nothing of ours is imported here. The secret comes in the environment, never as an argument.

vLLM's API server tokenizes one prompt after another, or two at once. Where hundreds of rows come
together, a call waits there behind all of them, for up to a second, before its engine knows of it.
So few rows are between the door and the engine at any time; calls are let in at once.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import ExitStack
from contextvars import ContextVar
from functools import wraps
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM reads it too, and the fake engine."""
OPEN_PATHS = frozenset({"/health"})
"""Whether an engine lives is no secret."""

ROW_ID = b"batchrun-"
"""The request ids of rows begin so; those of calls do not."""
NUM_PLACES = 4
PLACE_BYTES = 8_192
"""A row takes a place for each so many bytes of text, all places at most. They are some 2,000
tokens, which take 10 to 20 ms."""
LONGEST_S = 1.0
SLOWEST_BYTES_PER_S = 100_000
"""Whatever becomes of a row, it keeps others waiting no longer than that and what its body may
take."""
_DATA_URL = re.compile(rb'(?<!\\)"data:[^",]*;base64,[^"]*')
"""Images are decoded apart from text, several at once."""

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
        self._intake = RowIntake(app)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer 401, or hand the call on."""
        kind = scope["type"]
        is_call = kind in {"http", "websocket"}
        given = _header(scope, b"authorization")
        if is_call and self._key and not is_let_in(scope["path"], given, self._key):
            await _refuse(kind, send)
        elif kind == "http" and _header(scope, b"x-request-id").startswith(ROW_ID):
            await self._intake(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _header(scope: Message, name: bytes) -> bytes:
    headers: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
    return next((value for key, value in headers if key == name), b"")


async def _refuse(kind: str, send: Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": REFUSAL})


_PLACE: ContextVar[ExitStack | None] = ContextVar("place", default=None)
"""What the row whose work this is holds of an intake."""


class RowIntake:
    """Lets rows into vLLM's application in the order of their arrival, as others have reached the
    engine: whenever one could be worked on, one is there.

    A server that is not vLLM's, of which nobody learns when a row has reached the engine, gets all
    rows at once.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._next = asyncio.Lock()
        self._places = asyncio.Semaphore(NUM_PLACES)
        self._tells: bool | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Hand a row on once there is a place for it."""
        if self._tells is None:
            self._tells = _note_arrivals(scope)
        if not self._tells:
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            return
        data_urls = (found.end() - found.start() for found in _DATA_URL.finditer(body))
        num_places = min(NUM_PLACES, 1 + (len(body) - sum(data_urls)) // PLACE_BYTES)
        with ExitStack() as place:
            async with self._next:
                for _ in range(num_places):
                    await self._places.acquire()
                    place.callback(self._places.release)
            longest_s = LONGEST_S + len(body) / SLOWEST_BYTES_PER_S
            place.callback(asyncio.get_running_loop().call_later(longest_s, place.close).cancel)
            _PLACE.set(place)
            await self._app(scope, _again(body, receive), send)


async def _read_body(receive: Receive) -> bytes | None:
    """None: its sender has gone."""
    body, is_whole = bytearray(), False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        is_whole = not message.get("more_body", False)
    return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, then what comes after it."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return left.pop() if left else await receive()

    return receive_again


def _note_arrivals(scope: Message) -> bool:
    """From now on a row gives its place back as vLLM's `EngineClient` gets it, rendered and
    tokenized. False: there is no such client."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    if client is None:
        return False
    for name in ("generate", "encode"):
        if hasattr(client, name):
            setattr(client, name, _noted(getattr(client, name)))
    return True


def _noted(submit: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(submit)
    def noted(*args: Any, **kwargs: Any) -> Any:
        place = _PLACE.get()
        if place is not None:
            place.close()
        return submit(*args, **kwargs)

    return noted
