"""What is changed in the reply to a steered call, and what a call has used: as the bytes pass.

vLLM leaves `service_tier` empty: only that key is written. vLLM repeats parts of a body that it
cannot read: an engine's secret is kept out.
"""

from __future__ import annotations

import asyncio
import logging
import re
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import aiohttp
import msgspec
from msgspec import Raw

from batchrun.errors import EngineError, EngineSilentError
from batchrun.keys import OnlineUsage, UsageFile
from batchrun.strict import parse_json
from batchrun.types import token_count

MAX_LINE_BYTES = 2**20
"""A longer line of a stream passes unread."""
MAX_REPLY_BYTES = 64 * 2**20
"""A longer reply passes unread."""
_COMPLETIONS = frozenset({
    b'"chat.completion"',
    b'"chat.completion.chunk"',
    b'"text_completion"',
    b'"response"',
})
_DATA = b"data:"


def with_tier(text: bytes, tier: str) -> bytes:
    """The JSON text of a completion, of a part of one or of an event about a response, with its
    tier; any other text as it is."""
    fields = _fields_of(text)
    if fields is None:
        return text
    target, inner = fields, None
    if bytes(fields.get("object", b"")) not in _COMPLETIONS:
        inner = _fields_of(bytes(fields.get("response", b"")))
        if inner is None or bytes(inner.get("object", b"")) not in _COMPLETIONS:
            return text
        target = inner
    target["service_tier"] = Raw(msgspec.json.encode(tier))
    if inner is not None:
        fields["response"] = Raw(msgspec.json.encode(inner))
    return msgspec.json.encode(fields)


def _fields_of(text: bytes) -> dict[str, Raw] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class TierInReply:
    """The tier in each event of a stream, or in a whole body, which is handed on when it has ended,
    however it is cut into chunks. What is too long to be kept passes unread."""

    def __init__(self, tier: str, *, is_stream: bool) -> None:
        self._tier = tier
        self._is_stream = is_stream
        self._most_bytes = MAX_LINE_BYTES if is_stream else MAX_REPLY_BYTES
        self._kept = bytearray()
        self._is_too_long = False

    def feed(self, chunk: bytes) -> bytes:
        """The lines of a stream that are whole by now; nothing of a body, as long as it is kept."""
        if not self._is_stream:
            return self._keep(chunk)
        out = bytearray()
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            out += self._keep(end)
            out += self.end()
            out += b"\n"
        out += self._keep(rest)
        return bytes(out)

    def end(self) -> bytes:
        """What was kept: the body, or the last line where nothing ended it."""
        kept = bytes(self._kept)
        self._kept.clear()
        self._is_too_long = False
        if not self._is_stream:
            return with_tier(kept, self._tier)
        if not kept.startswith(_DATA):
            return kept
        payload = kept[len(_DATA) :].strip()
        written = with_tier(payload, self._tier)
        return kept if written is payload else kept.replace(payload, written, 1)

    def _keep(self, piece: bytes) -> bytes:
        """Keep a piece; returns what of it need not be kept."""
        self._kept += piece
        if len(self._kept) <= self._most_bytes and not self._is_too_long:
            return b""
        self._is_too_long = True
        passed = bytes(self._kept)
        self._kept.clear()
        return passed


log = logging.getLogger(__name__)

OVERLAP_BYTES = 64
"""A number and its name may lie in two pieces of a reply."""
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,15})')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d{1,15})')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,15})')
_OPENINGS = (b"event: response.created\n", b"event: response.in_progress\n", b":")
"""What an engine sends before it computes anything: events, and comments."""
_TOOL_CALL = re.compile(rb'"tool_calls":\s*\[\s*\{|"type":\s*"function_call"')
"""What an engine's parser may have held back until it was whole."""
_COMMENTS = re.compile(rb"(?::[^\n]*+\n[\r\n]*+)+")


class ReplyUsage:
    """Sees a reply pass: when it begins, and what it says of tokens. The last numbers said count.

    `cached_tokens` is None where nothing was said. `on_begin` is called once, with the instant of
    the first piece; `began_s` and `ended_s` are those of the first and the last but comments, and
    `num_events` counts the events of a stream. `is_silent` is for who waited for the next piece in
    vain. The reply has `num_choices` (0: unknown), more tokens than events where it `is_sparse` or
    calls a tool.
    """

    def __init__(self, num_choices: int = 1, *, is_sparse: bool = False) -> None:
        self._num_choices = num_choices
        self._is_sparse = is_sparse
        self.on_begin: Callable[[float], None] = lambda now_s: None
        self.has_begun = False
        self.began_s = self.ended_s = 0.0
        self.num_events = 0
        self.is_silent = False
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens: int | None = None
        self._head = self._tail = b""
        self._end = b""

    @staticmethod
    def now_s() -> float:
        """The clock of all instants here."""
        return time.monotonic()

    @property
    def tpot_s(self) -> float | None:
        """The mean time between tokens of a choice; None where nobody can tell."""
        told = self.output_tokens or (0 if self._is_sparse else self.num_events - 1)
        tokens = told / self._num_choices if self._num_choices else 0.0
        return (self.ended_s - self.began_s) / (tokens - 1) if tokens > 1 else None

    def feed(self, chunk: bytes) -> None:
        """A piece of the reply."""
        if not self.has_begun or not is_comment(chunk):
            self.ended_s = self.now_s()
        if not self.has_begun:
            chunk = self._after_openings(chunk)
            if not chunk:
                return
            self.has_begun = True
            self.began_s = self.ended_s
            self.on_begin(self.ended_s)
        self.num_events += chunk.count(_DATA)
        text = self._tail + chunk
        if b"_call" in text and _TOOL_CALL.search(text):
            self._is_sparse = True
        if b'_tokens"' in text:
            self.prompt_tokens = _last(_PROMPT, text, self.prompt_tokens)
            self.output_tokens = _last(_OUTPUT, text, self.output_tokens)
            self.cached_tokens = _last(_CACHED, text, self.cached_tokens)
        self._tail = text[-OVERLAP_BYTES:]

    def _after_openings(self, chunk: bytes) -> bytes:
        """What follows them; nothing as long as that is open. Each byte is looked at once."""
        text = self._head + chunk
        while self._end or (text := text.lstrip(b"\r\n")).startswith(_OPENINGS):
            self._end = self._end or (b"\n" if text.startswith(b":") else b"\n\n")
            _, end, rest = text.partition(self._end)
            if not end:
                self._head = text[-1:]
                return b""
            text, self._end = rest, b""
        self._head = text
        return b"" if any(each.startswith(text) for each in _OPENINGS) else text


def is_comment(piece: bytes) -> bool:
    """Whether a piece of a stream says only that the connection is open."""
    return _COMMENTS.fullmatch(piece) is not None


ENGINE, DAEMON = "the engine", "the daemon"
"""Who sends a reply, in messages."""
SILENT = "{} took the call and did not answer in time"


class Waits(NamedTuple):
    """When the first piece of a reply of `sender` is due, on the loop's clock, and how long each
    next one may take, in seconds. One that `may_pause` does so from its opening on."""

    due_s: float
    between_s: float
    sender: str = ENGINE
    may_pause: bool = False

    def to_first(self, reply: aiohttp.ClientResponse) -> float:
        """When the first piece of the reply is due. What is no stream begins when it is whole."""
        return self.due_s if is_stream(reply) else min(self.due_s, self.to_next())

    def to_next(self) -> float:
        """When the next piece is due, if one came now."""
        return asyncio.get_running_loop().time() + self.between_s

    def is_alive_by(self, piece: bytes, usage: ReplyUsage) -> bool:
        """Whether the piece shows that the reply goes on: a comment does not of an engine's, whose
        server sends them without its core."""
        is_on = usage.has_begun or self.may_pause
        return is_on and (self.sender == DAEMON or not is_comment(piece))


def is_stream(reply: aiohttp.ClientResponse) -> bool:
    """Whether its tokens come as they are made."""
    return reply.content_type == "text/event-stream"


async def next_piece(
    reply: aiohttp.ClientResponse, usage: ReplyUsage, due_s: float, sender: str
) -> bytes:
    """What comes of the sender's reply, nothing at its end. Raises EngineSilentError at `due_s`, on
    the loop's clock; `usage` knows it then."""
    try:
        async with asyncio.timeout_at(due_s) as limit:
            return await reply.content.readany()
    except TimeoutError as error:
        if not limit.expired():
            raise
        usage.is_silent = True
        stopped = "{} stopped in the middle of its answer"
        said = stopped if usage.has_begun else SILENT
        raise EngineSilentError(said.format(sender)) from error


MAX_LIST_BYTES = 4 * 2**20


async def read_models(reply: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """The models that an engine's reply lists, each with an `id`. Raises EngineError."""
    try:
        text = await reply.content.read(MAX_LIST_BYTES)
        while not reply.content.at_eof() and len(text) < MAX_LIST_BYTES:
            text += await reply.content.read(MAX_LIST_BYTES - len(text))
        document: Any = parse_json(text)
        models: list[dict[str, Any]] = document["data"]
        assert all(isinstance(model["id"], str) for model in models)
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise EngineError("the engine did not list its models") from error
    return models


class KeyMeter:
    """Counts the calls of the key numbered `seq`."""

    def __init__(self, file: UsageFile, seq: int) -> None:
        self._file = file
        self._seq = seq

    def count(self, usage: ReplyUsage) -> None:
        """A reply is over, or its caller has left: count the call, if there was any reply.

        Where it cannot be written, the call is worth more than its count.
        """
        if not usage.has_begun:
            return
        try:
            self._file.add(self._seq, OnlineUsage(1, usage.prompt_tokens, usage.output_tokens))
        except OSError as error:
            log.warning("what key number %d uses is not counted: %s", self._seq, error)


Count = TypeVar("Count", int, int | None)


def _last(pattern: re.Pattern[bytes], text: bytes, before: Count) -> int | Count:
    found = pattern.findall(text)
    return token_count(int(found[-1])) if found else before


MIN_SECRET_CHARS = 8
"""A piece of the secret is as good as the whole if it is long; this much of it is worth nothing."""
INSTEAD = b"..."
_LETTERS = (string.ascii_letters + string.digits + "-_").encode()


class Redaction:
    """Takes a secret out of a stream of bytes, also where it is cut off within the text.

    The secret is of letters, digits, `-` and `_`, so that it looks the same in every escaping.
    """

    def __init__(self, secret: str) -> None:
        self._start = secret.encode()[:MIN_SECRET_CHARS]
        self._pattern = re.compile(re.escape(self._start) + rb"[A-Za-z0-9_-]*")
        self._held = b""
        self._is_inside = False

    def feed(self, chunk: bytes) -> bytes:
        """What may be handed on. An end that the secret may begin with is held back."""
        text = self._held + chunk
        if self._is_inside:
            text = text.lstrip(_LETTERS)
            if not text:
                return b""
        self._is_inside = any(each.end() == len(text) for each in self._pattern.finditer(text))
        passed = text if self._is_inside else text[: len(text) - self._num_held(text)]
        self._held = text[len(passed) :]
        return self._pattern.sub(INSTEAD, passed)

    def end(self) -> bytes:
        """What was held back: too little of the secret to be worth anything."""
        held, self._held = self._held, b""
        return held

    def _num_held(self, text: bytes) -> int:
        longest = min(len(self._start) - 1, len(text))
        lengths = range(longest, 0, -1)
        return next((num for num in lengths if self._start.startswith(text[-num:])), 0)


class Filter(Protocol):
    """Changes a stream of bytes."""

    def feed(self, chunk: bytes) -> bytes:
        """What can be handed on once `chunk` has come."""
        ...

    def end(self) -> bytes:
        """The rest."""
        ...


@dataclass(frozen=True, slots=True)
class Rewriting:
    """`tier`: what the reply is to say (None: nothing); `secret`: what it must not say."""

    tier: str | None = None
    secret: str | None = field(default=None, repr=False)

    def filters_for(self, reply: aiohttp.ClientResponse) -> list[Filter]:
        """What the reply runs through, in order. Raises EngineError if it cannot be read."""
        if reply.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise EngineError("the engine compressed its answer, though it was asked not to")
        filters: list[Filter] = []
        if self.tier is not None and reply.status == 200:
            is_stream = reply.content_type == "text/event-stream"
            filters.append(TierInReply(self.tier, is_stream=is_stream))
        if self.secret is not None:
            filters.append(Redaction(self.secret))
        return filters


def feed_all(filters: list[Filter], chunk: bytes) -> bytes:
    """The chunk after all filters."""
    for each in filters:
        chunk = each.feed(chunk)
    return chunk


def end_all(filters: list[Filter]) -> bytes:
    """What the filters still held, in order."""
    rest = b""
    for each in filters:
        rest = each.feed(rest) + each.end()
    return rest
