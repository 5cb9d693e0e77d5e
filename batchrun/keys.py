"""API keys as text, `sk-br-ID-SECRET`, and what online calls of each have used.

Who holds the text is the key; batchrun keeps its hash. Gateways count into a file with 24 bytes for
each key, by its number from 1 on: calls, prompt tokens, output tokens; before them stands a random
number of the file's own. Where only a few may come in, owners of keys take turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import re
import secrets
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from batchrun.files import locked_bytes

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
        with locked_bytes(self._fd, _COUNTS.size, offset):
            before = self.read(seq)
            after = _COUNTS.pack(
                before.num_calls + used.num_calls,
                before.num_prompt_tokens + used.num_prompt_tokens,
                before.num_output_tokens + used.num_output_tokens,
            )
            os.pwrite(self._fd, after, offset)

    @property
    def id(self) -> str:
        """What tells it from those of other gateways."""
        with locked_bytes(self._fd, _COUNTS.size, 0):
            found = os.pread(self._fd, _COUNTS.size, 0)
            if not any(found):
                os.pwrite(self._fd, found := secrets.token_bytes(_COUNTS.size), 0)
        return found.hex()

    def read_all(self) -> dict[str, list[int]]:
        """The counts of each key by its number, as JSON has them."""
        num = os.fstat(self._fd).st_size // _COUNTS.size
        return {str(seq): list(astuple(self.read(seq))) for seq in range(1, num)}

    def read(self, seq: int) -> OnlineUsage:
        """What the key of this number has used."""
        kept = os.pread(self._fd, _COUNTS.size, seq * _COUNTS.size).ljust(_COUNTS.size, b"\0")
        return OnlineUsage(*_COUNTS.unpack(kept))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; names but `localhost` count as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


ID_PREFIX = "key_"
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_LENGTH = 12
_TEXT = re.compile(rf"sk-br-([{_ID_ALPHABET}]{{{_ID_LENGTH}}})-[A-Za-z0-9_-]{{43}}")


def new_key() -> tuple[str, str]:
    """(id, text) of a key that nobody has: 256 random bits, so that its hash needs no salt."""
    name = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    return ID_PREFIX + name, f"sk-br-{name}-{secrets.token_urlsafe(32)}"


def id_in(text: str) -> str | None:
    """The id that a key's text names; None for what is no key."""
    found = _TEXT.fullmatch(text)
    return None if found is None else ID_PREFIX + found[1]


def digest(text: str) -> str:
    """What is kept of a key: SHA-256 in hex. Headers may hold bytes that are no text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class FairDoor:
    """Lets a few in at a time: of those who wait, the first of each owner in turn."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def passed(self, owner: str) -> AsyncIterator[None]:
        """Within, one place is taken."""
        if self._num_free and not self._waiting:
            self._num_free -= 1
        else:
            await self._wait(owner)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, owner: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        """The place goes to the first that still waits, of the owner whose turn it is."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
