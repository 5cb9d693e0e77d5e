"""API keys as text: `sk-br-ID-SECRET`. Who holds the text is the key; batchrun keeps its hash."""

from __future__ import annotations

import hashlib
import re
import secrets

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
