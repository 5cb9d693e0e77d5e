"""What all routes of OpenAI's API share: who calls, errors, values checked one by one.

Every failure leaves in OpenAI's error envelope: `{"error": {message, type, param, code}}`. Who
calls, the gateway says: it shows a key of its own. It also gives every reply an `x-request-id`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from batchrun.errors import (
    MAX_MESSAGE_CHARS,
    BatchrunError,
    NotLeadingError,
    OverloadedError,
    QuotaError,
    StorageError,
    StorageUnreachableError,
    StoreFullError,
    StoreLockedError,
    StoreUnreachableError,
    shortened,
)
from batchrun.home import CALLER_HEADER, CONTROL_PREFIX, GATEWAY_HEADER
from batchrun.jobs.inputs.rows import type_name
from batchrun.store import api_keys
from batchrun.store.api_keys import NO_LIMITS, KeyLimits, limits_of
from batchrun.store.database import Store

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2
PASSING = frozenset({408, 429, 502, 503, 504})
"""Statuses after which the same call may work; after others OpenAI's client is told not to try."""
STANDS_BY = "this daemon stands by; ask the gateway of the one that leads"
_PLAIN_WORDS: tuple[tuple[type[BatchrunError], str], ...] = (
    (StoreFullError, "the server's disk is full; nothing was changed"),
    (StoreUnreachableError, "the server's database does not answer; try again shortly"),
    (NotLeadingError, STANDS_BY),
    (StoreLockedError, "the server's database is busy; try again shortly"),
    (StorageUnreachableError, "the server's file storage does not answer; try again shortly"),
    (OverloadedError, "the server has too much to do at once; try again shortly"),
    (StorageError, "the server's file storage cannot be used; the server's log has more"),
)


class ApiError(Exception):
    """A call that cannot be answered as asked."""

    def __init__(
        self, status_code: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        self.message = shortened(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.status_code = status_code
        self.code = code
        self.param = None if param is None else shortened(param)


def ascii_json(content: object) -> bytes:
    """JSON without a byte above 127: text that UTF-8 cannot hold passes, too."""
    return json.dumps(content, separators=(",", ":")).encode()


class AsciiJson(JSONResponse):
    """A reply of `ascii_json`."""

    def render(self, content: object) -> bytes:
        return ascii_json(content)


def envelope(
    status_code: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    kind: str | None = None,
) -> AsciiJson:
    """A whole error reply, with what tells a client whether to try again; `kind` is the error's
    type, by default that of its status."""
    kind = kind or ("server_error" if status_code >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    headers = {}
    if status_code == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    elif status_code == 409 or (status_code >= 500 and status_code not in PASSING):
        headers["X-Should-Retry"] = "false"
    return AsciiJson({"error": error}, status_code=status_code, headers=headers)


def missing_parameter(name: str) -> ApiError:
    message = f"Missing required parameter: '{name}'."
    return ApiError(400, message, code="missing_required_parameter", param=name)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception with an envelope."""

    @app.exception_handler(ApiError)
    async def on_api_error(_request: Request, error: ApiError) -> JSONResponse:
        return envelope(error.status_code, error.message, code=error.code, param=error.param)

    @app.exception_handler(BatchrunError)
    async def on_our_error(request: Request, error: BatchrunError) -> JSONResponse:
        return _answer(request, error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404 and message == "Not Found":
            message = f"Invalid URL ({request.method} {request.url.path})"
        reply = envelope(error.status_code, message)
        allowed: Mapping[str, str] = error.headers or {}
        reply.headers.update(allowed)
        return reply

    @app.exception_handler(RequestValidationError)
    async def on_bad_request(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "body")
        return envelope(400, f"{key}: {first['msg']}")

    @app.exception_handler(ClientDisconnect)
    async def on_hang_up(_request: Request, _error: ClientDisconnect) -> JSONResponse:
        return envelope(400, "the request broke off")

    @app.exception_handler(Exception)
    async def on_bug(_request: Request, _error: Exception) -> JSONResponse:
        return envelope(500, "internal error; the server's log has more")


def _answer(request: Request, error: BatchrunError) -> JSONResponse:
    """What the command line reads as it is, and other callers without what is not for them."""
    if request.url.path.startswith(CONTROL_PREFIX):
        return envelope(error.http_status, str(error), code=type(error).__name__)
    if isinstance(error, QuotaError):
        # It passes when a batch ends, and so not in the seconds in which a client tries again.
        reply = envelope(429, str(error), code="rate_limit_exceeded", kind="requests")
        reply.headers["X-Should-Retry"] = "false"
        return reply
    if error.http_status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, error)
    return envelope(error.http_status, for_strangers(error))


def for_strangers(error: BatchrunError) -> str:
    """What a caller without an admin key may read: no path of the server's."""
    if error.http_status < 500:
        return str(error)
    known = (words for kind, words in _PLAIN_WORDS if isinstance(error, kind))
    return next(known, "internal error; the server's log has more")


MIN_EXPIRY_S = 3_600
MAX_EXPIRY_S = 2_592_000


def wrong_type(param: str, expected: str, value: object) -> ApiError:
    """`expected` has its article: `a string`."""
    message = (
        f"Invalid type for '{param}': expected {expected}, but got {type_name(value)} instead."
    )
    return ApiError(400, message, code="invalid_type", param=param)


def object_of(value: object, keys: Container[str], param: str) -> dict[str, object] | None:
    """An object that has none but these keys, as JSON; None for null."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    refuse_unknown(value, keys, f"{param}.")
    return value


def refuse_unknown(document: Mapping[str, object], keys: Container[str], prefix: str = "") -> None:
    """Refuse an object that has other keys than these."""
    for key in document:
        if key not in keys:
            name = shortened(prefix + key)
            message = f"Unknown parameter: '{name}'."
            raise ApiError(400, message, code="unknown_parameter", param=name)


def required_text(document: Mapping[str, object], key: str) -> str:
    """The text under a key that must be there."""
    if key not in document:
        raise missing_parameter(key)
    return _text(key, document[key])


def _text(param: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    return value


def check_choice(param: str, value: str, choices: Sequence[str]) -> None:
    """Refuse what is not one of a few values."""
    if value in choices:
        return
    *most, last = (f"'{choice}'" for choice in choices)
    joint = ", and " if len(most) > 1 else " and "
    listed = f"{', '.join(most)}{joint}{last}" if most else last
    message = f"Invalid value: '{shortened(value)}'. Supported values are: {listed}."
    raise ApiError(400, message, code="invalid_value", param=param)


def check_range(param: str, value: int, low: int, high: int) -> None:
    if value < low:
        word, bound, code = "below minimum", f">= {low}", "integer_below_min_value"
    elif value > high:
        word, bound, code = "above maximum", f"<= {high}", "integer_above_max_value"
    else:
        return
    message = (
        f"Invalid '{param}': integer {word} value. Expected a value {bound}, but got {value} "
        "instead."
    )
    raise ApiError(400, message, code=code, param=param)


def check_expiry(param: str, anchor: object, seconds: object) -> int:
    """The seconds of an `expires_after`, whose parts were given as they are."""
    if anchor is None:
        raise missing_parameter(f"{param}.anchor")
    check_choice(f"{param}.anchor", _text(f"{param}.anchor", anchor), ["created_at"])
    if seconds is None:
        raise missing_parameter(f"{param}.seconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        raise wrong_type(f"{param}.seconds", "an integer", seconds)
    check_range(f"{param}.seconds", seconds, MIN_EXPIRY_S, MAX_EXPIRY_S)
    return seconds


def limit_in(query: QueryParams, default: int) -> int | None:
    """The query's `limit`; None when it is no number that a page could have."""
    text = query.get("limit")
    if text is None:
        return default
    is_number = text.isascii() and text.removeprefix("-").isdigit() and len(text) < 10
    return int(text) if is_number else None


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call this is: `owner` is the id of his API key, None where no key is asked for.

    `scope` is whose files and batches he sees, as in `store/files.py`.
    """

    owner: str | None = None
    scope: str | None = None
    limits: KeyLimits = NO_LIMITS

    @property
    def is_admin(self) -> bool:
        """Whether he holds an admin key, or no key is asked for."""
        return self.scope is None


ANYBODY = Caller()


@dataclass(frozen=True, slots=True)
class Callers:
    """Lets calls in that carry `gateway_key`, and leaves their caller in `request.state`.

    `key_limits` are those of user keys that have none of their own.
    """

    store: Store
    gateway_key: str
    key_limits: KeyLimits = NO_LIMITS

    async def check(self, request: Request) -> None:
        """A dependency of every route. Raises HTTPException and ApiError."""
        given = request.headers.get(GATEWAY_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.gateway_key.encode()):
            raise HTTPException(401, "ask the gateway, not the daemon")
        request.state.caller = await asyncio.to_thread(
            self._caller, request.headers.get(CALLER_HEADER)
        )

    def _caller(self, key_id: str | None) -> Caller:
        """A gateway that does not know the newest keys lets nobody in here."""
        if key_id is None:
            if api_keys.is_any(self.store):
                raise ApiError(401, "Missing bearer or basic authentication in header")
            return ANYBODY
        key = api_keys.find(self.store, key_id)
        if key is None or key.revoked_at is not None:
            raise ApiError(401, "Incorrect API key provided: revoked.", code="invalid_api_key")
        return Caller(key.id, key.scope, limits_of(key, self.key_limits))


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller
