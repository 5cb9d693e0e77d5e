"""Reading a request body within bounds of size and time.

Callers from outside cannot send the daemon's hints: `vllm_xargs.batchrun` and `priority` go.

Calls that ask for more than the default: bounds of a class, or to run as offline work.

What they ask for reaches an engine's scheduler as a hint in `vllm_xargs`, with the secret of that
engine, so that such a body is written again for the engine that gets it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from batchrun.errors import InputError
from batchrun.hints import HINT_ARGUMENTS, FlexHint, Hint, SloBounds, SloHint, drop_hint, put_hint
from batchrun.server.gateway.envelope import RefusalError
from batchrun.server.gateway.upstreams import Upstream

MIN_BYTES_PER_S = 1_024


async def read_body(request: web.BaseRequest, *, max_bytes: int, idle_s: float) -> bytes:
    """The whole body. Raises a web.HTTPException whose text is the message for the caller.

    Compressed bodies are refused: they would hide what the gateway must look for, and bombs.
    """
    _refuse_compressed(request)
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes, request.content_length or 0)
    await _invite(request)
    body = bytearray()
    pieces = _Pieces(request, idle_s=idle_s)
    while chunk := await pieces.next():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes, len(body))
    return bytes(body)


class BodyStream:
    """A body piece by piece, of any size: `refusal` is why it ended early, where it did.

    Raises a web.HTTPException when it is made, and the refusal when it is read.
    """

    def __init__(self, request: web.BaseRequest, *, idle_s: float) -> None:
        _refuse_compressed(request)
        self._request = request
        self._idle_s = idle_s
        self.refusal: web.HTTPException | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await _invite(self._request)
        pieces = _Pieces(self._request, idle_s=self._idle_s)
        try:
            while chunk := await pieces.next():
                yield chunk
        except web.HTTPException as refusal:
            self.refusal = refusal
            raise


def _refuse_compressed(request: web.BaseRequest) -> None:
    codings = {
        coding.strip().lower()
        for name in ("Content-Encoding", "Transfer-Encoding")
        for value in request.headers.getall(name, [])
        for coding in value.split(",")
    }
    if request.body_exists and not codings <= {"identity", "chunked"}:
        raise web.HTTPUnsupportedMediaType(text="Content-Encoding is not supported; send it plain")


async def _invite(request: web.BaseRequest) -> None:
    """Tell a caller that waits for it to go on with the body."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


class _Pieces:
    """The pieces of a body; a caller who sends none for `idle_s`, or too little all in all, is
    refused. Only the time that is spent waiting for the caller counts."""

    def __init__(self, request: web.BaseRequest, *, idle_s: float) -> None:
        self._request = request
        self._idle_s = idle_s
        self._left_s = idle_s

    async def next(self) -> bytes:
        """The next piece; none at the end."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(min(self._idle_s, self._left_s)):
                piece = await self._request.content.readany()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=self._why_late()) from error
        except web.RequestPayloadError as error:
            raise web.HTTPBadRequest(text="the request body is not valid HTTP") from error
        self._left_s += len(piece) / MIN_BYTES_PER_S - (loop.time() - began_s)
        return piece

    def _why_late(self) -> str:
        if self._left_s < self._idle_s:
            return f"the request body comes with less than {MIN_BYTES_PER_S} bytes a second"
        return f"no byte of the request body came for {self._idle_s:g} s"


def _too_large(max_bytes: int, actual_bytes: int) -> web.HTTPRequestEntityTooLarge:
    message = f"the request body is larger than the limit of {max_bytes} bytes"
    return web.HTTPRequestEntityTooLarge(max_bytes, actual_bytes, text=message)


HINT_KEYS = (HINT_ARGUMENTS.encode(), b"priority")
MAX_VALUES = 1_000_000
"""Parsing more would hold up all other calls of a worker for long."""
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|[67][0-9a-fA-F])")


def strip_hints(body: bytes) -> bytes:
    """The body without the keys that steer scheduling.

    A body that cannot hold them in any spelling is returned as it is, unparsed. Raises InputError
    if it might hold them and is not a JSON object.
    """
    if not may_hold(body, *HINT_KEYS):
        return body
    document = _parse(body)
    if HINT_ARGUMENTS not in document and "priority" not in document:
        return body if b"\0" not in body else json.dumps(document).encode()
    _strip(document)
    return json.dumps(document).encode()


def parse_without_hints(body: bytes) -> dict[str, Any]:
    """The body's object without those keys. Raises InputError if it is none."""
    document = _parse(body)
    _strip(document)
    return document


def may_hold(body: bytes, *keys: bytes) -> bool:
    """Whether a JSON text could hold one of the keys, lower-case words, in some spelling.

    A NUL byte means UTF-16 or UTF-32, which JSON parsers detect and accept.
    """
    return (
        any(key in body for key in keys)
        or b"\0" in body
        or _ESCAPED_LETTER.search(body) is not None
    )


def is_too_much(body: bytes) -> bool:
    """Whether a JSON text may hold so many values that parsing takes long."""
    return body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES


def _strip(document: dict[str, Any]) -> None:
    document.pop("priority", None)
    drop_hint(document)


def _parse(body: bytes) -> dict[str, Any]:
    if is_too_much(body):
        raise RefusalError(
            413,
            f"a body with a class, a tier or a priority may hold {MAX_VALUES} values at most",
        )
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"the request body is not valid JSON: {reason}") from error
    if not isinstance(document, dict):
        raise InputError("the request body must be a JSON object")
    return document


RESPONSES = "/v1/responses"
STEERED_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES})
"""The routes on which vLLM hands `vllm_xargs` to its scheduler."""
TIER = "service_tier"
FLEX = "flex"


@dataclass(frozen=True, slots=True)
class SteeredBody:
    """The body of such a call. `bounds` None: those that the engines have by default."""

    route: str
    document: Mapping[str, Any]
    bounds: SloBounds | None
    is_flex: bool

    def tier_at(self, upstream: Upstream) -> str | None:
        """What the reply of this engine says of the tier; None where nothing was asked."""
        if not self.is_flex:
            return None
        return FLEX if upstream.runs_offline_calls else "default"

    def written_for(self, upstream: Upstream) -> bytes:
        """The body as this engine gets it."""
        body = dict(self.document)
        if self.is_flex:
            self._write_tier(body, upstream)
        others = body.get(HINT_ARGUMENTS)
        if upstream.hint_nonce is not None and (others is None or isinstance(others, dict)):
            put_hint(body, self._hint(), upstream.hint_nonce)
        return json.dumps(body).encode()

    def _write_tier(self, body: dict[str, Any], upstream: Upstream) -> None:
        """vLLM repeats the tier of a response, and knows none on the other routes."""
        if self.route == RESPONSES:
            body[TIER] = self.tier_at(upstream)
        else:
            body.pop(TIER)
        if upstream.offline_priority is not None:
            body["priority"] = upstream.offline_priority

    def _hint(self) -> Hint:
        if self.is_flex:
            return FlexHint()
        assert self.bounds is not None
        return SloHint(slo=self.bounds)


def read_call_body(route: str, body: bytes, bounds: SloBounds | None) -> bytes | SteeredBody:
    """The body without a caller's hints, steered if it asks for something that the route has.

    It is parsed only where it may ask or hold hints; one too large for that has the default
    bounds. Raises InputError and RefusalError.
    """
    if bounds is not None and is_too_much(body):
        bounds = None
    if bounds is None and not may_hold(body, *HINT_KEYS, TIER.encode()):
        return body
    if route not in STEERED_ROUTES or (bounds is None and not may_hold(body, TIER.encode())):
        return strip_hints(body)
    document = parse_without_hints(body)
    is_flex = document.get(TIER) == FLEX
    if bounds is None and not is_flex:
        return strip_hints(body)
    return SteeredBody(route, document, bounds, is_flex)
