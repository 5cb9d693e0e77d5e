"""Bytes on their way to a file, counted and hashed."""

from __future__ import annotations

import hashlib
from typing import BinaryIO


class HashedFile:
    """Writes to `file`, and knows how much that was and its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, content: bytes) -> None:
        """Append. Raises OSError."""
        self._file.write(content)
        self._digest.update(content)
        self.size_bytes += len(content)

    @property
    def sha256(self) -> str:
        """Hex digest of all that was written."""
        return self._digest.hexdigest()
