"""The list of engines, as the daemon writes it to a file that every worker of the gateway follows.

    {"engines": [{"name": "engine-0", "url": "http://127.0.0.1:8001", "api_key": "...",
                  "is_last_choice": false, "is_hung": false, "is_ready": true,
                  "hint_nonce": "..." | null,
                  "offline_priority": 1 | null, "models": ["tiny"] | null, "started": 17,
                  "traits": {...} | null}],
     "daemon": {"url": "http://127.0.0.1:9999", "gateway_key": "..."} | null,
     "slo": {"ttft_s": 1.0, "tpot_s": 0.05, "jct_s": null} | null,
     "slo_classes": {"fast": {"ttft_s": 0.2, "tpot_s": 0.03, "jct_s": null}},
     "image_hosts": ["images.example.com"], "router": "cost", "late_calls": "serve",
     "timeouts": {"first_token_s": 300, "between_tokens_s": 120, "answer_s": 3600,
                  "row_s": 86400}}

The writer may die at any time: the last good list stays in use. Unknown fields are ignored.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from batchrun.errors import ConfigError
from batchrun.hints import SloBounds
from batchrun.routing.engine_book import EngineTraits
from batchrun.routing.routers import DEFAULT_ROUTER

log = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.25
MAX_FILE_BYTES = 64 << 20


def _as_path(kind: type, value: object) -> Path:
    """Paths stand in the files as text."""
    if kind is not Path or not isinstance(value, str):
        raise NotImplementedError
    return Path(value)


def read_document(path: Path, kind: type[T], what: str) -> T:
    """The JSON document in a file that holds `what`. Raises ConfigError with one line."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the {what}: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes; not a {what}")
    try:
        return msgspec.json.decode(text, type=kind, dec_hook=_as_path)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a {what}: {error}") from error


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
            try:
                await self.refresh()
            except (OSError, RuntimeError, ValueError) as error:
                # No thread to be had, or no lock: the next look may find better times.
                self._seen = None
                self._complain(f"{self._path} was not taken over: {error}")

    async def refresh(self) -> None:
        """Take over the file's content if the file changed."""
        try:
            found = await asyncio.to_thread(self._read_if_changed)
        except ConfigError as error:
            self._complain(str(error))
            return
        for content in found:
            self._on_change(content)
            self._complaint = None

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            log.warning("%s; keeping what was there before", complaint)
        self._complaint = complaint

    def _read_if_changed(self) -> list[T]:
        """The content if it is new; a list of one, for it may be None."""
        try:
            seen = _stamp_of(self._path)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from error
        if seen == self._seen:
            return []
        content = self._read(self._path)
        self._seen = seen
        return [content]


def _stamp_of(path: Path) -> tuple[int, int, int]:
    """Another one when the file was written or replaced. Raises OSError."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


@lru_cache(maxsize=1024)
def _tls(secret_file: Path, certificate: Path | None, *_stamps: object) -> ssl.SSLContext:
    # Only where there are agents: what it imports takes 50 ms.
    from batchrun.mutual_tls import client_context, read_secret

    return client_context(read_secret(secret_file), certificate)


@dataclass(frozen=True, slots=True)
class Upstream:
    """One engine: the base address of its HTTP server, without `/v1`.

    One that `is_last_choice`, or `is_gone` for now, gets a call only when no other engine can, one
    that `is_hung` none; once it `is_ready` again, what failed before counts no more.
    `hint_nonce` is what hints must carry, where batchrun's scheduler runs inside it;
    `offline_priority` the value of vLLM's `priority` for offline work, where it heeds one. One
    behind an agent has a `secret_file`, and perhaps a `certificate` that vouches for the agent's.
    `models` are those it serves; empty: it does not tell; None: it was not asked yet. `started` is
    another number each time it starts, `traits` what routers know of its size and speed.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    secret_file: Path | None = None
    certificate: Path | None = None
    is_last_choice: bool = field(default=False, compare=False)
    is_hung: bool = field(default=False, compare=False)
    is_ready: bool = field(default=True, compare=False)
    is_gone: bool = field(default=False, compare=False)
    hint_nonce: str | None = field(default=None, compare=False, repr=False)
    offline_priority: int | None = field(default=None, compare=False)
    models: tuple[str, ...] | None = field(default=(), compare=False)
    started: int = field(default=0, compare=False)
    traits: EngineTraits | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for what is no address."""
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("`url` must be an http(s) address")
        object.__setattr__(self, "url", self.url.rstrip("/"))
        object.__setattr__(self, "hint_nonce", self.hint_nonce or None)

    def tls(self) -> ssl.SSLContext | bool:
        """How connections to it are secured. Raises ConfigError when its secret cannot be read."""
        if self.secret_file is None:
            return True
        stamps = []
        with suppress(OSError):
            stamps = [_stamp_of(path) for path in (self.secret_file, self.certificate) if path]
        return _tls(self.secret_file, self.certificate, *stamps)

    def serves(self, model: str | None) -> bool:
        """Whether a call for this model may go there; None: it names none."""
        return model is None or self.models == () or model in (self.models or ())

    @property
    def runs_offline_calls(self) -> bool:
        """Whether a call can give way to online ones there."""
        return self.hint_nonce is not None or self.offline_priority is not None


@dataclass(frozen=True, slots=True)
class DaemonAt:
    """The daemon's base address, what lets the gateway in there, and, where that daemon stands by,
    the gateway of the one that leads."""

    url: str
    gateway_key: str | None = field(default=None, repr=False)
    leader_gateway: str | None = None


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """How long nothing may come of a reply: of a stream until its first token, of any reply after
    its first piece, of what is no stream, or may pause, until its answer, of a call that
    may wait (flex)."""

    first_token_s: float = 300.0
    between_tokens_s: float = 120.0
    answer_s: float = 3_600.0
    row_s: float = 86_400.0

    def of(self, *, is_stream: bool, may_pause: bool, is_offline: bool) -> tuple[float, float]:
        """Seconds until the first piece, and from each piece to the next."""
        if is_offline:
            return self.row_s, self.row_s
        between_s = self.answer_s if may_pause else self.between_tokens_s
        return (self.first_token_s if is_stream else self.answer_s), between_s


SERVE, REFUSE = "serve", "refuse"
"""What may become of a call that cannot be in time; any other word serves it."""

SloClasses = Mapping[str, SloBounds]


@dataclass(frozen=True, slots=True)
class Upstreams:
    """What the file says: the engines in file order, the daemon, the bounds of calls without a
    class (None: not known) and of the SLO classes, the hosts that images may come from, who chooses
    among the engines, what becomes of calls that cannot be in time, and how long calls wait."""

    engines: tuple[Upstream, ...]
    daemon: DaemonAt | None = None
    slo: SloBounds | None = None
    slo_classes: SloClasses = field(default_factory=dict)
    image_hosts: tuple[str, ...] = ()
    router: str = DEFAULT_ROUTER
    late_calls: str = SERVE
    timeouts: CallTimeouts = field(default_factory=CallTimeouts)


def read_upstreams(path: Path) -> Upstreams:
    """What `path` says. Raises ConfigError with one line."""
    return read_document(path, Upstreams, "list of engines")


def find_daemon(path: Path) -> DaemonAt | None:
    """Where the daemon answers; None when `path` names none or cannot be read."""
    try:
        return read_upstreams(path).daemon
    except ConfigError:
        return None
