"""What is changed in the reply to a steered call, and what a call has used: as the bytes pass.

vLLM leaves `service_tier` empty: only that key is written. vLLM repeats parts of a body that it
cannot read: an engine's secret is kept out.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import msgspec
from msgspec import Raw

from batchrun.errors import EngineError
from batchrun.keys import OnlineUsage, UsageFile

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


class TierInEvents:
    """A stream of server-sent events with the tier in each, however it is cut into chunks."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._line = bytearray()
        self._is_too_long = False

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are whole by now."""
        out = bytearray()
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            out += self._add(end)
            out += self._end_line()
            out += b"\n"
        out += self._add(rest)
        return bytes(out)

    def end(self) -> bytes:
        """The last line, where nothing ended it."""
        return self._end_line()

    def _add(self, piece: bytes) -> bytes:
        """Add to the line; returns what of it need not be kept."""
        self._line += piece
        if len(self._line) <= MAX_LINE_BYTES and not self._is_too_long:
            return b""
        self._is_too_long = True
        passed = bytes(self._line)
        self._line.clear()
        return passed

    def _end_line(self) -> bytes:
        line = bytes(self._line)
        self._line.clear()
        self._is_too_long = False
        if not line.startswith(_DATA):
            return line
        payload = line[len(_DATA) :].strip()
        written = with_tier(payload, self._tier)
        return line if written is payload else line.replace(payload, written, 1)


class TierInBody:
    """A whole reply with the tier in it; handed on when it has ended."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._body = bytearray()
        self._is_too_long = False

    def feed(self, chunk: bytes) -> bytes:
        """Nothing, as long as the reply can be kept."""
        self._body += chunk
        if len(self._body) <= MAX_REPLY_BYTES and not self._is_too_long:
            return b""
        self._is_too_long = True
        passed = bytes(self._body)
        self._body.clear()
        return passed

    def end(self) -> bytes:
        """The reply."""
        return with_tier(bytes(self._body), self._tier)


log = logging.getLogger(__name__)

OVERLAP_BYTES = 64
"""A number and its name may lie in two pieces of a reply."""
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,15})')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,15})')


class CallMeter:
    """Sees the reply of one call of the key numbered `seq`. The last numbers said count."""

    def __init__(self, file: UsageFile, seq: int) -> None:
        self._file = file
        self._seq = seq
        self._tail: bytes | None = None
        self._prompt = 0
        self._output = 0

    def feed(self, chunk: bytes) -> None:
        """A piece of the reply."""
        text = (self._tail or b"") + chunk
        if b'_tokens"' in text:
            self._prompt = _last(_PROMPT, text, self._prompt)
            self._output = _last(_OUTPUT, text, self._output)
        self._tail = text[-OVERLAP_BYTES:]

    def close(self) -> None:
        """The reply is over, or the caller has left: count the call, if there was any reply.

        Where it cannot be written, the call is worth more than its count.
        """
        if self._tail is None:
            return
        try:
            self._file.add(self._seq, OnlineUsage(1, self._prompt, self._output))
        except OSError as error:
            log.warning("what key number %d uses is not counted: %s", self._seq, error)


def _last(pattern: re.Pattern[bytes], text: bytes, before: int) -> int:
    found = pattern.findall(text)
    return int(found[-1]) if found else before


MIN_SECRET_CHARS = 8
"""A piece of the secret is as good as the whole if it is long; this much of it is worth nothing."""
INSTEAD = b"..."


class Redaction:
    """Takes a secret out of a stream of bytes, also where it is cut off within the text.

    The secret is of letters, digits, `-` and `_`, so that it looks the same in every escaping.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        start = re.escape(self._secret[:MIN_SECRET_CHARS])
        self._pattern = re.compile(start + rb"[A-Za-z0-9_-]*")
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may be handed on. An end that the secret may begin with is held back."""
        text = self._held + chunk
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return self._pattern.sub(INSTEAD, text[: len(text) - num_held])

    def end(self) -> bytes:
        """What was held back."""
        held, self._held = self._held, b""
        return self._pattern.sub(INSTEAD, held)

    def _num_held(self, text: bytes) -> int:
        longest = min(len(self._secret) - 1, len(text))
        for num in range(longest, 0, -1):
            if self._secret.startswith(text[-num:]):
                return num
        return 0


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
            filters.append(TierInEvents(self.tier) if is_stream else TierInBody(self.tier))
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
