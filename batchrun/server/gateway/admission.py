"""Whether a call may come in: its API key, how often that key may call, and its SLO class.

    {"keys": [{"id": "key_...", "sha256": "...", "role": "user", "slo_class": null,
               "requests_per_minute": 60, "concurrent_calls": 8, "seq": 1}] | null}

Null: none is asked for. Fields may be added; unknown ones are ignored. The writer may die at any
time: the last good list stays in use.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from batchrun.errors import shortened
from batchrun.files import locked_bytes
from batchrun.hints import SloBounds
from batchrun.keys import UsageFile, digest, id_in
from batchrun.server.gateway.envelope import CLASS_HEADER, LimitError, RefusalError
from batchrun.server.gateway.replies import KeyMeter
from batchrun.server.gateway.upstreams import SloClasses, read_document
from batchrun.types import DEFAULT_CLASS

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
    concurrent_calls: int | None = None


class _Document(msgspec.Struct, frozen=True):
    keys: tuple[ApiKey, ...] | None


@dataclass(slots=True)
class KeyRing:
    """The keys known now; `is_asked_for` tells whether a call needs one."""

    is_asked_for: bool = False
    _keys: Mapping[str, ApiKey] = field(default_factory=dict)

    def replace(self, keys: tuple[ApiKey, ...] | None) -> None:
        self.is_asked_for = keys is not None
        self._keys = {key.id: key for key in keys or ()}

    def find(self, key_id: str) -> ApiKey | None:
        """The key with this id; None where there is none, or it was revoked."""
        return self._keys.get(key_id)

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
    return read_document(path, _Document, "list of API keys").keys


def _masked(text: str) -> str:
    """Enough of a wrong key for its holder to know it by."""
    shown = text[-_SHOWN_CHARS:] if len(text) >= 5 * _SHOWN_CHARS else ""
    return "*" * 8 + (shown if shown.isascii() and shown.isprintable() else "")


def choose_class(
    headers: CIMultiDictProxy[str], key_class: str | None, classes: SloClasses
) -> SloBounds | None:
    """The bounds of a call: its header decides, then the class of its key (None: it has none),
    then the default, which is None since the engines know it.

    Raises RefusalError when the header names no class. A class of a key that is not there any
    more is the default one: its callers cannot help it.
    """
    given = headers.getall(CLASS_HEADER, [])
    if not given:
        return None if key_class is None else classes.get(key_class)
    name = given[0] if len(given) == 1 else ", ".join(given)
    if name == DEFAULT_CLASS:
        return None
    if name not in classes:
        known = ", ".join([DEFAULT_CLASS, *classes])
        raise RefusalError(
            400,
            f"{CLASS_HEADER.lower()}: no SLO class has the name '{shortened(name)}'; "
            f"there is {known}",
            code="invalid_value",
            param=CLASS_HEADER.lower(),
        )
    return classes[name]


def check_class(
    key: ApiKey | None, bounds: SloBounds | None, classes: SloClasses, default: SloBounds | None
) -> None:
    """Raises RefusalError where a user key asks for tighter bounds, or more value, than its own:
    those of its class, or `default`, which is None where the engines alone know it."""
    wanted = default if bounds is None else bounds
    if key is None or key.role == "admin" or (wanted is None and key.slo_class not in classes):
        return
    own = default if key.slo_class is None else classes.get(key.slo_class, default)
    if wanted is not None and own is not None and not _is_tighter(wanted, own):
        return
    its = DEFAULT_CLASS if key.slo_class is None else key.slo_class
    raise RefusalError(
        400,
        f"{CLASS_HEADER.lower()}: with this API key no class may have more value or tighter "
        f"bounds than '{its}'",
        code="invalid_value",
        param=CLASS_HEADER.lower(),
    )


def _is_tighter(bounds: SloBounds, own: SloBounds) -> bool:
    if bounds.value > own.value:
        return True
    pairs = ((bounds.ttft_s, own.ttft_s), (bounds.tpot_s, own.tpot_s), (bounds.jct_s, own.jct_s))
    return any(
        (math.inf if wanted is None else wanted) < (math.inf if most is None else most)
        for wanted, most in pairs
    )


def class_name(
    headers: CIMultiDictProxy[str], key_class: str | None, bounds: SloBounds | None
) -> str:
    """What a class is called that `choose_class` found."""
    if bounds is None:
        return DEFAULT_CLASS
    return headers.get(CLASS_HEADER, key_class or DEFAULT_CLASS)


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
        headers = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.num_left),
            "x-ratelimit-reset-requests": f"{math.ceil(self.full_after_s * 1e3)}ms",
        }
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
            headers["Retry-After-Ms"] = str(math.ceil(self.retry_after_s * 1e3))
        return headers


class RequestRates:
    """Requests per minute of each API key, counted by all workers of a gateway together.

    A bucket of as many requests as a minute allows, filled evenly. The workers share a file with
    16 bytes for each key: what its bucket holds, and since when (monotonic, one clock for a
    machine).
    """

    def __init__(self, path: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        os.close(self._fd)

    def take(self, seq: int, limit: int) -> Rate:
        """Ask for one request of the key that has this number."""
        offset = seq * _BUCKET.size
        with locked_bytes(self._fd, _BUCKET.size, offset):
            kept = os.pread(self._fd, _BUCKET.size, offset).ljust(_BUCKET.size, b"\0")
            held, since_s = _BUCKET.unpack(kept)
            now_s = self._clock_s()
            # Nothing was written yet, or it was before the machine started again.
            is_known = 0.0 < since_s < now_s + _MINUTE_S
            grown = held + max(0.0, now_s - since_s) * limit / _MINUTE_S
            level = min(grown, limit) if is_known else float(limit)
            left = level - 1.0 if level >= 1.0 else level
            os.pwrite(self._fd, _BUCKET.pack(left, now_s), offset)
        per_request_s = _MINUTE_S / limit
        is_late = level < 1.0
        return Rate(
            limit=limit,
            num_left=int(left),
            full_after_s=(limit - left) * per_request_s,
            retry_after_s=(1.0 - level) * per_request_s if is_late else None,
        )


_COUNT = struct.Struct("<I")
_MAX_WORKERS = 64
CALL_RETRY_S = 1
MAX_HELD_REFUSALS = 1_024
"""In a worker; others do not wait."""


class CallsAtOnce:
    """Online calls of each API key in flight, counted by all workers of a gateway together.

    They share a file with a row for each key, in which each worker has a count: one that begins
    clears its own, whatever became of the one before it.
    """

    def __init__(self, path: Path, num_workers: int, worker: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._num_workers = min(num_workers, _MAX_WORKERS)
        self._worker = worker % _MAX_WORKERS
        self._own: dict[int, int] = {}
        num_keys = -(-os.fstat(self._fd).st_size // self._row_bytes)
        for seq in range(num_keys):
            self._write(seq)

    def close(self) -> None:
        os.close(self._fd)

    @contextmanager
    def calling(self, seq: int, limit: int) -> Iterator[None]:
        """Within, the key with this number has one more. Raises LimitError where that is over
        its limit."""
        self._begin(seq, limit)
        try:
            yield
        finally:
            self._add(seq, -1)

    def num_calls(self, seq: int) -> int:
        """How many a key has now. Raises OSError."""
        kept = os.pread(self._fd, self._num_workers * _COUNT.size, seq * self._row_bytes)
        whole = kept.ljust(self._num_workers * _COUNT.size, b"\0")
        return sum(count for (count,) in _COUNT.iter_unpack(whole))

    def _begin(self, seq: int, limit: int) -> None:
        try:
            with locked_bytes(self._fd, self._row_bytes, seq * self._row_bytes):
                is_full = self.num_calls(seq) >= limit
                if not is_full:
                    self._add(seq, 1)
        except OSError as error:
            log.warning("calls of key number %d are not counted: %s", seq, error)
            is_full = self._own.get(seq, 0) >= limit
            if not is_full:
                self._own[seq] = self._own.get(seq, 0) + 1
        if is_full:
            message = (
                f"This API key may have {limit} calls at once, and has them. Please try again in "
                f"{CALL_RETRY_S}s."
            )
            raise LimitError(seq, message, {"Retry-After": str(CALL_RETRY_S)})

    def _add(self, seq: int, change: int) -> None:
        self._own[seq] = self._own.get(seq, 0) + change
        with suppress(OSError):
            self._write(seq)

    def _write(self, seq: int) -> None:
        place = seq * self._row_bytes + self._worker * _COUNT.size
        os.pwrite(self._fd, _COUNT.pack(self._own.get(seq, 0)), place)

    @property
    def _row_bytes(self) -> int:
        return _MAX_WORKERS * _COUNT.size


class SlowedKeys:
    """Slows a key down that calls on and on, whatever it is told, so that it costs the others
    little: what follows a refusal within `CALL_RETRY_S` waits for as long."""

    def __init__(self) -> None:
        self._refused_s: dict[int, float] = {}
        self._num_held = 0

    def note(self, seq: int) -> None:
        """The key with this number was refused something."""
        self._refused_s[seq] = time.monotonic()

    async def wait(self, seq: int, *, is_refused: bool = False) -> None:
        """Return when a call of the key with this number may go on, or hear that it `is_refused`
        too."""
        before_s = self._refused_s.get(seq, -math.inf)
        if is_refused:
            self.note(seq)
        if time.monotonic() - before_s >= CALL_RETRY_S or self._num_held >= MAX_HELD_REFUSALS:
            return
        self._num_held += 1
        try:
            await asyncio.sleep(CALL_RETRY_S)
        finally:
            self._num_held -= 1


log = logging.getLogger(__name__)

COUNTED_PREFIX = "/v1/"
"""Calls below this count as requests of their key."""


@dataclass(frozen=True, slots=True)
class AboutCaller:
    """What the gateway knows of a caller: his key, None where none is asked for, the headers that
    every reply tells him of his limits, and what counts the call."""

    key: ApiKey | None = None
    reply_headers: Mapping[str, str] = field(default_factory=dict)
    meter: KeyMeter | None = None


ABOUT_CALLER = web.RequestKey("about_caller", AboutCaller)
"""Where a request keeps it."""


@dataclass(frozen=True, slots=True)
class Door:
    """Lets callers in; `rates`, `usage` and `calls` are None where no keys can be asked for.

    `limited` are calls beyond the limits of their key, `refused` what the daemon did not take.
    `session_secret` is common to all workers.
    """

    keys: KeyRing
    rates: RequestRates | None = None
    usage: UsageFile | None = None
    calls: CallsAtOnce | None = None
    session_secret: bytes = field(default=b"", repr=False)
    limited: SlowedKeys = field(default_factory=SlowedKeys)
    refused: SlowedKeys = field(default_factory=SlowedKeys)

    def admit(self, request: web.BaseRequest) -> AboutCaller:
        """Who calls. Raises RefusalError with 401 or 403, LimitError."""
        path = request.rel_url.raw_path
        key = self.keys.admit(request.headers.get("Authorization"), path)
        if key is None or self.rates is None or self.usage is None:
            return AboutCaller(key)
        meter = KeyMeter(self.usage, key.seq)
        if key.requests_per_minute is None or not path.startswith(COUNTED_PREFIX):
            return AboutCaller(key, meter=meter)
        try:
            rate = self.rates.take(key.seq, key.requests_per_minute)
        except OSError as error:
            log.warning("requests of key %s are not counted: %s", key.id, error)
            return AboutCaller(key, meter=meter)
        if rate.retry_after_s is not None:
            message = (
                f"Rate limit reached for requests of this API key. Limit: {rate.limit} a minute. "
                f"Please try again in {rate.retry_after_s:.3g}s."
            )
            raise LimitError(key.seq, message, rate.headers)
        return AboutCaller(key, rate.headers, meter)

    def calling(self, key: ApiKey | None) -> AbstractContextManager[None]:
        """Within, a call of this key is in flight. Entering raises LimitError where it has too
        many."""
        if key is None or self.calls is None or key.concurrent_calls is None:
            return nullcontext()
        return self.calls.calling(key.seq, key.concurrent_calls)
