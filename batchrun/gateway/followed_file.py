"""A file that the daemon writes and every worker of the gateway follows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.25


def read_bounded(path: Path, max_bytes: int, what: str) -> bytes:
    """The content of a file that holds `what`. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the {what}: {error.strerror}") from error
    if len(text) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes} bytes; not a {what}")
    return text


class FollowedFile(Generic[T]):
    """Hands each new good content to `on_change`; what cannot be used leaves the last one.

    `read` raises ConfigError.
    """

    def __init__(
        self, path: Path, read: Callable[[Path], T], on_change: Callable[[T], None]
    ) -> None:
        self._path = path
        self._read = read
        self._on_change = on_change
        self._seen: tuple[int, int, int] | None = None
        self._complaint: str | None = None

    async def watch(self) -> None:
        """Look at the file a few times a second, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Take over the file's content if the file changed."""
        try:
            found = await asyncio.to_thread(self._read_if_changed)
        except ConfigError as error:
            if str(error) != self._complaint:
                log.warning("%s; keeping what was there before", error)
            self._complaint = str(error)
            return
        for content in found:
            self._complaint = None
            self._on_change(content)

    def _read_if_changed(self) -> list[T]:
        """The content if it is new; a list of one, for it may be None."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from error
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return []
        content = self._read(self._path)
        self._seen = seen
        return [content]
