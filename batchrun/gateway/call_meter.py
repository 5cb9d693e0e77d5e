"""Counts what one call has used, from what its reply says as it passes: nothing is parsed."""

from __future__ import annotations

import logging
import re

from batchrun.key_usage import OnlineUsage, UsageFile

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
