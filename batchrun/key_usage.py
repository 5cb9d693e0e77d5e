"""What online calls of each API key have used: counted by gateways, read by `batchrun keys list`.

A file with 24 bytes for each key, by its number: calls, prompt tokens, output tokens.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

_COUNTS = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class OnlineUsage:
    """Calls that were answered, and the tokens that their replies told."""

    num_calls: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class UsageFile:
    """The counts of all keys; several processes may add to it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def add(self, seq: int, used: OnlineUsage) -> None:
        """Count for the key of this number."""
        offset = seq * _COUNTS.size
        fcntl.lockf(self._fd, fcntl.LOCK_EX, _COUNTS.size, offset)
        try:
            before = self.read(seq)
            after = _COUNTS.pack(
                before.num_calls + used.num_calls,
                before.num_prompt_tokens + used.num_prompt_tokens,
                before.num_output_tokens + used.num_output_tokens,
            )
            os.pwrite(self._fd, after, offset)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, _COUNTS.size, offset)

    def read(self, seq: int) -> OnlineUsage:
        """What the key of this number has used."""
        kept = os.pread(self._fd, _COUNTS.size, seq * _COUNTS.size).ljust(_COUNTS.size, b"\0")
        return OnlineUsage(*_COUNTS.unpack(kept))
