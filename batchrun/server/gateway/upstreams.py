"""The list of engines, as the daemon writes it to a file.

    {"engines": [{"name": "engine-0", "url": "http://127.0.0.1:8001", "api_key": "...",
                  "is_last_choice": false, "hint_nonce": "..." | null,
                  "offline_priority": 1 | null}],
     "daemon": {"url": "http://127.0.0.1:9999", "gateway_key": "..."} | null,
     "slo_classes": {"fast": {"ttft_s": 0.2, "tpot_s": 0.03, "jct_s": null}}}

The writer may die at any time: the last good list stays in use.

A file that the daemon writes and every worker of the gateway follows.

SLO classes as the upstreams file names them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar
from urllib.parse import urlsplit

from batchrun.errors import ConfigError
from batchrun.hints import SloBounds

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


SloClasses = Mapping[str, SloBounds]


def read_classes(document: object, where: str) -> SloClasses:
    """The classes of the upstreams file. Raises ConfigError."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{where} must be an object")
    return {name: _bounds(entry, f"{where}.{name}") for name, entry in document.items()}


def _bounds(entry: object, where: str) -> SloBounds:
    values = entry if isinstance(entry, dict) else {}
    ttft_s, tpot_s, jct_s = (values.get(key) for key in ("ttft_s", "tpot_s", "jct_s"))
    if _is_bound(ttft_s) and _is_bound(tpot_s) and (jct_s is None or _is_bound(jct_s)):
        return SloBounds(ttft_s, tpot_s, jct_s)
    raise ConfigError(f"{where}: `ttft_s` and `tpot_s` must be seconds, `jct_s` seconds or null")


def _is_bound(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Upstream:
    """One engine: the base address of its HTTP server, without `/v1`.

    One that `is_last_choice` gets a call only when no other engine can. `hint_nonce` is what hints
    must carry, where batchrun's scheduler runs inside it; `offline_priority` the value of vLLM's
    `priority` for offline work, where it heeds one.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    is_last_choice: bool = field(default=False, compare=False)
    hint_nonce: str | None = field(default=None, compare=False, repr=False)
    offline_priority: int | None = field(default=None, compare=False)

    @property
    def runs_offline_calls(self) -> bool:
        """Whether a call can give way to online ones there."""
        return self.hint_nonce is not None or self.offline_priority is not None


@dataclass(frozen=True, slots=True)
class DaemonAt:
    """The daemon's base address, and what lets the gateway in there."""

    url: str
    gateway_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Upstreams:
    """What the file says but for the daemon: the engines in file order, and the SLO classes."""

    engines: tuple[Upstream, ...] = ()
    slo_classes: SloClasses = field(default_factory=dict)


def read_upstreams(path: Path) -> Upstreams:
    """What `path` says. Raises ConfigError with one line."""
    document = _read_document(path)
    engines = document.get("engines")
    if not isinstance(engines, list):
        raise ConfigError(f"{path}: key `engines` must be a list")
    return Upstreams(
        tuple(
            _upstream(entry, where=f"{path}: engines[{index}]")
            for index, entry in enumerate(engines)
        ),
        read_classes(document.get("slo_classes"), f"{path}: slo_classes"),
    )


def find_daemon(path: Path) -> DaemonAt | None:
    """Where the daemon answers; None when `path` names none or cannot be read."""
    try:
        daemon = _read_document(path).get("daemon")
    except ConfigError:
        return None
    if not isinstance(daemon, dict):
        return None
    url, key = daemon.get("url"), daemon.get("gateway_key")
    if not isinstance(url, str) or not _is_http_url(url):
        return None
    return DaemonAt(url.rstrip("/"), key if isinstance(key, str) else None)


def _read_document(path: Path) -> dict[str, Any]:
    text = read_bounded(path, MAX_FILE_BYTES, "list of engines")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: key `engines` must be a list")
    return document


def _upstream(entry: object, *, where: str) -> Upstream:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object with `name` and `url`")
    name, url, api_key = entry.get("name"), entry.get("url"), entry.get("api_key")
    if not isinstance(name, str) or not isinstance(url, str) or not _is_http_url(url):
        raise ConfigError(f"{where}: `name` must be text and `url` an http(s) address")
    if api_key is not None and not isinstance(api_key, str):
        raise ConfigError(f"{where}: `api_key` must be text or null")
    nonce, priority = entry.get("hint_nonce"), entry.get("offline_priority")
    return Upstream(
        name,
        url.rstrip("/"),
        api_key,
        is_last_choice=entry.get("is_last_choice") is True,
        hint_nonce=nonce if isinstance(nonce, str) and nonce else None,
        offline_priority=priority if isinstance(priority, int) else None,
    )


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)
