"""Writes `service_tier` into an engine's reply: vLLM leaves it empty.

Only what it belongs to is touched, and of that only this key: every other value keeps its bytes.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

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
