"""Request bodies: read within bounds of size and time, and what they may say to an engine.

Callers from outside cannot send the daemon's hints: `vllm_xargs.batchrun` and `priority` go. What a
call with a class or a tier asks for reaches an engine's scheduler as a hint in `vllm_xargs`, with
the secret of that engine, so that such a body is written again for the engine that gets it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Raw

from batchrun.errors import InputError
from batchrun.hints import HINT_ARGUMENTS, FlexHint, Hint, SloBounds, SloHint, drop_hint, put_hint
from batchrun.media.fetching import FETCH_TIMEOUT_S, ImageFetcher
from batchrun.media.images import IMAGE_CODE, MEDIA_PLACES, ImageError
from batchrun.server.gateway.envelope import RefusalError
from batchrun.server.gateway.upstreams import Upstream

MIN_BYTES_PER_S = 1_024
MAX_BODY_S = 7_200
SMALL_BODY_BYTES = 1 << 20
LARGE_SHARE = 0.75
"""Of the room for bodies; the rest is for small ones alone."""
KEY_SHARE = FLEX_SHARE = 0.5


@dataclass(slots=True)
class BodiesInFlight:
    """The bodies of calls that one worker has in memory, images that were fetched for them among
    them: `max_bytes` together, large ones less, those of flex calls half of either, those of one
    API key half of all or of flex. A single one is never too large."""

    max_bytes: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sizes_bytes: Counter[tuple[str | None, bool]] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return self._sizes_bytes.total()

    @property
    def flex_bytes(self) -> int:
        """Of those of flex calls."""
        return sum(size for (_, is_flex), size in self._sizes_bytes.items() if is_flex)

    @contextmanager
    def holding(self, owner: str | None) -> Iterator[HeldBody]:
        """The body of a call with the API key `owner` (None: without one), empty at first, which
        is held within."""
        body = HeldBody(self, owner)
        try:
            yield body
        finally:
            self.change(owner, -body.size_bytes, is_flex=body.is_flex)

    def change(self, owner: str | None, num_bytes: int, *, is_flex: bool = False) -> None:
        """So many bytes came, or went where they are below 0."""
        self._sizes_bytes[owner, is_flex] += num_bytes
        if not self._sizes_bytes[owner, is_flex]:
            del self._sizes_bytes[owner, is_flex]

    def check(
        self, owner: str | None, size_bytes: int, new_bytes: int, *, is_flex: bool = False
    ) -> None:
        """Whether a body of this size may be had, of which this much is yet to come, or among those
        of flex calls. Raises RefusalError with 503."""
        room_bytes = self.max_bytes * (1 if size_bytes <= SMALL_BODY_BYTES else LARGE_SHARE)
        most, kind = (FLEX_SHARE, " of flex") if is_flex else (1.0, "")
        held = [(self.flex_bytes if is_flex else self.num_bytes, most, kind)]
        if owner is not None:
            own_bytes = self._sizes_bytes[owner, is_flex]
            held.append((own_bytes, most * KEY_SHARE, f"{kind} of this API key"))
        for held_bytes, share, whose in held:
            is_alone = held_bytes + new_bytes <= size_bytes
            if held_bytes + new_bytes > room_bytes * share and not is_alone:
                message = f"calls{whose} in flight hold {held_bytes >> 20} MiB; try again shortly"
                raise RefusalError(503, message)


@dataclass(slots=True)
class HeldBody:
    """One of `BodiesInFlight`."""

    _bodies: BodiesInFlight
    _owner: str | None
    size_bytes: int = 0
    is_flex: bool = False

    def count_as_flex(self) -> None:
        """It is whole, and may be held for hours. Raises RefusalError with 503 where it may not."""
        self._bodies.check(self._owner, self.size_bytes, self.size_bytes, is_flex=True)
        self._bodies.change(self._owner, -self.size_bytes)
        self._bodies.change(self._owner, self.size_bytes, is_flex=True)
        self.is_flex = True

    def check(self, size_bytes: int) -> None:
        """Whether it may have so many bytes in all. Raises RefusalError with 503."""
        self._bodies.check(self._owner, size_bytes, size_bytes - self.size_bytes)

    def add(self, num_bytes: int) -> None:
        """So many more are there. Raises RefusalError with 503 where they may not be."""
        self.check(self.size_bytes + num_bytes)
        self._bodies.change(self._owner, num_bytes)
        self.size_bytes += num_bytes

    async def take_turn(self, body: bytes) -> None:
        """Between two steps with a large body other calls have their turn; of several large ones
        that are there at once each takes a step in a turn of its own."""
        if len(body) > SMALL_BODY_BYTES:
            async with self._bodies.turn:
                await asyncio.sleep(0)


async def read_body(
    request: web.BaseRequest, *, max_bytes: int, idle_s: float, held: HeldBody | None = None
) -> bytes:
    """The whole body, counted in `held` as it comes. Raises RefusalError."""
    pieces = BodyStream(request, idle_s=idle_s)
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    if held is not None:
        held.check(request.content_length or 0)
    body = bytearray()
    async for piece in pieces:
        if len(body) + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        if held is not None:
            held.add(len(piece))
        body += piece
    return bytes(body)


def _too_large(max_bytes: int) -> RefusalError:
    return RefusalError(413, f"the request body is larger than the limit of {max_bytes} bytes")


class BodyStream:
    """A body piece by piece, of any size: `refusal` is why it ended early, where it did.

    A caller who sends nothing for `idle_s`, or so little that he falls as far behind 1,024 bytes a
    second, or for more than two hours, is refused; only the time that is spent waiting for the
    caller counts, and what came fast earns no later pause. So are compressed bodies: they would
    hide what the gateway must look for, and bombs. Raises RefusalError when it is made, and when it
    is read.
    """

    def __init__(self, request: web.BaseRequest, *, idle_s: float) -> None:
        codings = {
            coding.strip().lower()
            for name in ("Content-Encoding", "Transfer-Encoding")
            for value in request.headers.getall(name, [])
            for coding in value.split(",")
        }
        if request.body_exists and not codings <= {"identity", "chunked"}:
            raise RefusalError(415, "Content-Encoding is not supported; send it plain")
        self._request = request
        self._idle_s = self._left_s = idle_s
        self._whole_left_s = float(MAX_BODY_S)
        self.refusal: RefusalError | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._request.writer.output_size = 0
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                async with asyncio.timeout(min(self._left_s, self._whole_left_s)):
                    piece = await self._request.content.readany()
            except (TimeoutError, web.RequestPayloadError) as error:
                self.refusal = self._refusal_of(error)
                raise self.refusal from error
            if not piece:
                return
            waited_s = loop.time() - began_s
            self._whole_left_s -= waited_s
            earned_s = len(piece) / MIN_BYTES_PER_S
            self._left_s = min(self._idle_s, self._left_s - waited_s + earned_s)
            yield piece

    def _refusal_of(self, error: Exception) -> RefusalError:
        if not isinstance(error, TimeoutError):
            return RefusalError(400, "the request body is not valid HTTP")
        if self._whole_left_s < self._left_s:
            return RefusalError(408, f"the request body did not end within {MAX_BODY_S // 3600} h")
        if self._left_s < self._idle_s:
            slow = f"the request body comes with less than {MIN_BYTES_PER_S} bytes a second"
            return RefusalError(408, slow)
        return RefusalError(408, f"no byte of the request body came for {self._idle_s:g} s")


HINT_KEYS = (HINT_ARGUMENTS.encode(), b"priority")
MAX_VALUES = 100_000
"""Reading more would hold up all other calls of a worker for long."""
TEXT_PART, QUOTES_PART = 10, 4
"""What looks like values may be so many times more and stand in texts, with so many quotes."""
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|[67][0-9a-fA-F])")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])

Fields = dict[str, Any]
"""What an object holds by key: `Raw` where it is not read."""


def strip_hints(body: bytes) -> bytes:
    """The body without the keys that steer scheduling.

    A body that cannot hold them in any spelling is returned as it is, unparsed. Raises InputError
    if it might hold them and is not a JSON object.
    """
    return _stripped(body, _read(body)) if may_hold(body, *HINT_KEYS) else body


def _stripped(body: bytes, fields: Fields) -> bytes:
    if HINT_ARGUMENTS not in fields and "priority" not in fields:
        return body if b"\0" not in body else _written(fields)
    _strip(fields)
    return _written(fields)


def may_hold(body: bytes, *keys: bytes) -> bool:
    """Whether a JSON text could hold one of the keys, lower-case words, in some spelling.

    A NUL byte means UTF-16 or UTF-32, which JSON parsers detect and accept.
    """
    return (
        any(key in body for key in keys)
        or b"\0" in body
        or _ESCAPED_LETTER.search(body) is not None
    )


def is_too_much(text: bytes) -> bool:
    """Whether a JSON text holds so many values that reading it takes long; what stands in its texts
    is none."""
    num = _num_values(text)
    if num <= MAX_VALUES or num > TEXT_PART * MAX_VALUES:
        return num > MAX_VALUES
    return text.count(b'"') > QUOTES_PART * MAX_VALUES or _num_values(_TEXT.sub(b"", text)) > (
        MAX_VALUES
    )


def _num_values(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _strip(fields: Fields) -> None:
    fields.pop("priority", None)
    if HINT_ARGUMENTS in fields:
        fields[HINT_ARGUMENTS] = _value(fields[HINT_ARGUMENTS])
        drop_hint(fields)


def _read(body: bytes) -> Fields:
    """An object's fields, unread; read where only Python's reader takes it, as engines do: half an
    emoji, NaN, UTF-16."""
    try:
        return _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        document = _parse(body)
    if not isinstance(document, dict):
        raise InputError("the request body must be a JSON object")
    return document


def _value(part: Any) -> Any:
    return _parse(bytes(part)) if isinstance(part, Raw) else part


def _parse(text: bytes) -> Any:
    if is_too_much(text):
        raise RefusalError(
            413,
            f"images and hints may stand among {MAX_VALUES:,} values at most, and as many may be "
            "in JSON that is not RFC 8259's",
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"the request body is not valid JSON: {reason}") from error


def _written(fields: Mapping[str, Any]) -> bytes:
    pieces: list[bytes | Raw] = []
    for key, value in fields.items():
        text = value if isinstance(value, Raw) else json.dumps(value).encode()
        pieces += (b", ", json.dumps(key).encode(), b": ", text)
    return b"".join([b"{", *pieces[1:], b"}"])


_MEDIA_KEYS = (b"_url", b"uuid")
"""All keys by which a request names an image, a sound or a video end so, and what an engine would
know it by."""


async def fill_images(body: bytes, images: ImageFetcher, held: HeldBody, owner: str) -> bytes:
    """The body with what its images' addresses lead to; itself where it has none.

    Raises InputError and RefusalError.
    """
    if not may_hold(body, *_MEDIA_KEYS):
        return body
    fields = _read(body)
    shown = {}
    for place in MEDIA_PLACES:
        await held.take_turn(body)
        if place in fields and _may_hold_media(fields[place]):
            shown[place] = _value(fields[place])
    await held.take_turn(body)
    try:
        filled = await images.filled(shown, owner, on_bytes=held.add, turn_s=FETCH_TIMEOUT_S)
    except ImageError as problem:
        raise RefusalError(problem.http_status, str(problem), code=IMAGE_CODE) from problem
    if filled is shown:
        return body
    await held.take_turn(body)
    text = _written(fields | filled)
    held.add(max(0, len(text) - held.size_bytes))
    return text


def _may_hold_media(part: Any) -> bool:
    if not isinstance(part, Raw):
        return True
    text = bytes(part)
    return not text.startswith(b'"') and may_hold(text, *_MEDIA_KEYS)


RESPONSES = "/v1/responses"
STEERED_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES})
"""The routes on which vLLM hands `vllm_xargs` to its scheduler."""
TIER = "service_tier"
FLEX = "flex"
BEAMS = "use_beam_search"
TRUE_WORDS = frozenset({"true", "t", "1", "1.0", "yes", "y", "on"})
"""What pydantic, and so vLLM, takes for true."""


@dataclass(frozen=True, slots=True)
class SteeredBody:
    """The body of such a call, as it came and by its fields, and what it asks for."""

    text: bytes
    route: str
    fields: Mapping[str, Any]
    hint: Hint

    @property
    def is_flex(self) -> bool:
        return isinstance(self.hint, FlexHint)

    def tier_at(self, upstream: Upstream) -> str | None:
        """What the reply of this engine says of the tier; None where nothing was asked."""
        if not self.is_flex:
            return None
        return FLEX if upstream.runs_offline_calls else "default"

    def check_beams(self, upstreams: Iterable[Upstream]) -> None:
        """Raises RefusalError for a beam search that would lose its class or tier, where one of the
        engines of its model heeds that."""
        if str(_value(self.fields.get(BEAMS))).lower() not in TRUE_WORDS:
            return
        model = _value(self.fields.get("model"))
        if any(
            each.serves(model) and (each.runs_offline_calls if self.is_flex else each.hint_nonce)
            for each in upstreams
        ):
            why = "vLLM asks for each of its tokens anew, as calls before all others"
            message = f"{BEAMS} is not possible with a class or as flex: {why}"
            raise RefusalError(400, message, code="invalid_value", param=BEAMS)

    def written_for(self, upstream: Upstream) -> bytes:
        """The body as this engine gets it."""
        body = dict(self.fields)
        if self.is_flex:
            self._write_tier(body, upstream)
        others = body.get(HINT_ARGUMENTS)
        if upstream.hint_nonce is not None and (others is None or isinstance(others, dict)):
            put_hint(body, self.hint, upstream.hint_nonce)
        return _written(body)

    def _write_tier(self, body: dict[str, Any], upstream: Upstream) -> None:
        """vLLM repeats the tier of a response, and knows none on the other routes."""
        if self.route == RESPONSES:
            body[TIER] = self.tier_at(upstream)
        else:
            body.pop(TIER)
        if upstream.offline_priority is not None:
            body["priority"] = upstream.offline_priority


def read_call_body(route: str, body: bytes, bounds: SloBounds | None) -> bytes | SteeredBody:
    """The body without a caller's hints, steered if it asks for something that the route has.

    It is read only where it may ask or hold hints. Raises InputError and RefusalError.
    """
    if bounds is None and not may_hold(body, *HINT_KEYS, TIER.encode()):
        return body
    if route not in STEERED_ROUTES or (bounds is None and not may_hold(body, TIER.encode())):
        return strip_hints(body)
    fields = _read(body)
    is_flex = TIER in fields and _value(fields[TIER]) == FLEX
    if not is_flex and bounds is None:
        return _stripped(body, fields)
    _strip(fields)
    hint = SloHint(slo=bounds) if bounds is not None and not is_flex else FlexHint()
    return SteeredBody(body, route, fields, hint)
