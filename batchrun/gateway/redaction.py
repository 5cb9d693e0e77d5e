"""Keep an engine's secret out of its replies: vLLM repeats parts of a body that it cannot read."""

from __future__ import annotations

import re

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
