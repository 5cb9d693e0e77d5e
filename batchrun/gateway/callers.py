"""Who calls: the API keys that the daemon lists in a file, and the key that a call shows.

    {"keys": [{"id": "key_...", "sha256": "...", "role": "user", "slo_class": null,
               "requests_per_minute": 60, "seq": 1}] | null}

Null: none is asked for. Fields may be added; unknown ones are ignored. The writer may die at any
time: the last good list stays in use.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from batchrun.api_keys import digest, id_in
from batchrun.errors import ConfigError
from batchrun.gateway.followed_file import read_bounded
from batchrun.gateway.refusal import RefusalError

MAX_FILE_BYTES = 64 << 20
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""What everybody may ask, also where keys are demanded."""
ADMIN_PATHS = frozenset({"/metrics"})
_SHOWN_CHARS = 4
_NOBODY = "0" * 64


class ApiKey(msgspec.Struct, frozen=True):
    """A key that is not revoked; see `store/api_keys.py`. `seq` numbers keys from 1."""

    id: str
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    role: Literal["user", "admin"]
    slo_class: str | None
    requests_per_minute: int | None
    seq: int


class _Document(msgspec.Struct, frozen=True):
    keys: tuple[ApiKey, ...] | None


@dataclass(slots=True)
class KeyRing:
    """The keys known now; `is_asked_for` tells whether a call needs one."""

    is_asked_for: bool = False
    _keys: Mapping[str, ApiKey] = field(default_factory=dict)

    def replace(self, keys: tuple[ApiKey, ...] | None) -> None:
        """Take over a new list."""
        self.is_asked_for = keys is not None
        self._keys = {key.id: key for key in keys or ()}

    def admit(self, authorization: str | None, path: str) -> ApiKey | None:
        """The key of a call that may go on; None where none is asked for.

        Raises RefusalError with 401, or 403 for what only an admin may.
        """
        if not self.is_asked_for or path in OPEN_PATHS:
            return None
        scheme, _, text = (authorization or "").partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not text:
            raise RefusalError(401, "Missing bearer or basic authentication in header")
        key = self._keys.get(id_in(text) or "")
        is_right = hmac.compare_digest(digest(text), _NOBODY if key is None else key.sha256)
        if key is None or not is_right:
            message = f"Incorrect API key provided: {_masked(text)}."
            raise RefusalError(401, message, code="invalid_api_key")
        if path in ADMIN_PATHS and key.role != "admin":
            raise RefusalError(403, "This needs an API key of the role 'admin'.")
        return key


def read_keys(path: Path) -> tuple[ApiKey, ...] | None:
    """The keys that `path` lists. Raises ConfigError with one line."""
    text = read_bounded(path, MAX_FILE_BYTES, "list of API keys")
    try:
        return msgspec.json.decode(text, type=_Document).keys
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a list of API keys: {error}") from error


def _masked(text: str) -> str:
    """Enough of a wrong key for its holder to know it by."""
    shown = text[-_SHOWN_CHARS:] if len(text) >= 5 * _SHOWN_CHARS else ""
    return "*" * 8 + (shown if shown.isascii() and shown.isprintable() else "")
