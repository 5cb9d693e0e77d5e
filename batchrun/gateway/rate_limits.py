"""Requests per minute of each API key, counted by all workers of a gateway together.

A bucket of as many requests as a minute allows, filled evenly. The workers share a file with 16
bytes for each key: what its bucket holds, and since when (monotonic, one clock for a machine).
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

_BUCKET = struct.Struct("<dd")
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Rate:
    """A key's bucket after a request asked: `retry_after_s` is None where it was let through."""

    limit: int
    num_left: int
    full_after_s: float
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What OpenAI's replies say of it."""
        told = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.num_left),
            "x-ratelimit-reset-requests": f"{math.ceil(self.full_after_s * 1e3)}ms",
        }
        if self.retry_after_s is not None:
            told["Retry-After"] = str(math.ceil(self.retry_after_s))
            told["Retry-After-Ms"] = str(math.ceil(self.retry_after_s * 1e3))
        return told


class RequestRates:
    """The buckets of all keys."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def take(self, seq: int, limit: int, *, now_s: float) -> Rate:
        """Ask for one request of the key that has this number; `now_s` is CLOCK_MONOTONIC."""
        offset = seq * _BUCKET.size
        fcntl.lockf(self._fd, fcntl.LOCK_EX, _BUCKET.size, offset)
        try:
            kept = os.pread(self._fd, _BUCKET.size, offset).ljust(_BUCKET.size, b"\0")
            held, since_s = _BUCKET.unpack(kept)
            # Nothing was written yet, or it was before the machine started anew.
            is_known = 0.0 < since_s <= now_s
            grown = held + (now_s - since_s) * limit / _MINUTE_S
            level = min(grown, limit) if is_known else float(limit)
            left = level - 1.0 if level >= 1.0 else level
            os.pwrite(self._fd, _BUCKET.pack(left, now_s), offset)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, _BUCKET.size, offset)
        per_request_s = _MINUTE_S / limit
        is_late = level < 1.0
        return Rate(
            limit=limit,
            num_left=int(left),
            full_after_s=(limit - left) * per_request_s,
            retry_after_s=(1.0 - level) * per_request_s if is_late else None,
        )
