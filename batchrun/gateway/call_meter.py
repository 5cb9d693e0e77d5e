"""Counts what one call has used, from the end of its reply: nothing is parsed, nothing held up."""

from __future__ import annotations

import re

from batchrun.key_usage import OnlineUsage, UsageFile

TAIL_BYTES = 4_096
"""`usage` stands in the last bytes of a reply, and in the last event but one of a stream."""
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,15})')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,15})')


class CallMeter:
    """Sees the reply of one call of the key numbered `seq`."""

    def __init__(self, file: UsageFile, seq: int) -> None:
        self._file = file
        self._seq = seq
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """A piece of the reply."""
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]

    def close(self) -> None:
        """The reply is over: count it. A reply that tells no tokens counts as a call."""
        used = OnlineUsage(1, _last(_PROMPT, self._tail), _last(_OUTPUT, self._tail))
        self._file.add(self._seq, used)


def _last(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.findall(text)
    return int(found[-1]) if found else 0
