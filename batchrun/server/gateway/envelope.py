"""What the gateway answers itself: OpenAI's error envelope, headers that may cross, request ids."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping
from http.client import responses
from types import MappingProxyType

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from batchrun.errors import MAX_MESSAGE_CHARS, shortened
from batchrun.media.connections import HOP_BY_HOP

REQUEST_ID = "X-Request-Id"
CLASS_HEADER = "X-Batchrun-Class"

STEERING = ("X-Vllm-Priority", "X-Data-Parallel-Rank")
"""vLLM takes a call's priority, and which of its ranks runs it, from these headers."""
SET_BY_CLIENT_LIBRARY = frozenset({"host", "content-length", "expect"})
_USABLE_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_OWN_PREFIX = "batchrun"
_WITHIN = ("x-batchrun-", "endpoint-load-metrics")
"""What begins so never crosses: what batchrun's processes say to each other, and by what vLLM tells
a caller how busy it is."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A copy without the headers of one connection, those that `Connection` names included, and
    without those that stay within a deployment."""
    named = {
        token.strip().lower()
        for value in headers.getall("Connection", [])
        for token in value.split(",")
    }
    dropped = HOP_BY_HOP | named
    return CIMultiDict(
        (key, value)
        for key, value in headers.items()
        if (name := key.lower()) not in dropped and not name.startswith(_WITHIN)
    )


def forwarded_headers(
    request: web.BaseRequest, request_id: str, *, keeps_key: bool
) -> CIMultiDict[str]:
    """What an engine or the daemon sees of a caller's headers; without `keeps_key` no API key.

    The request id is always set: an engine would otherwise take one from the body, where a
    caller could write an id of the daemon's.
    """
    sent = end_to_end(request.headers)
    for name in (*SET_BY_CLIENT_LIBRARY, *STEERING):
        sent.popall(name, None)
    if not keeps_key:
        sent.popall("Authorization", None)
    sent[REQUEST_ID] = request_id
    return sent


def choose_request_id(headers: CIMultiDictProxy[str]) -> str:
    """The caller's id if there is exactly one and it is usable, else a new one.

    Ids that begin with `batchrun` are the daemon's and never come from outside.
    """
    given = headers.getall(REQUEST_ID, [])
    is_usable = len(given) == 1 and _USABLE_REQUEST_ID.fullmatch(given[0]) is not None
    if is_usable and not given[0].lower().startswith(_OWN_PREFIX):
        return given[0]
    return new_request_id()


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


RETRY_AFTER_S = 2


class RefusalError(Exception):
    """A call that is answered with an error; `kind` is the error's type, by default that of its
    status. A 503 and a 504 carry `Retry-After`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        kind: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        message = shortened(message, MAX_MESSAGE_CHARS)
        param = None if param is None else shortened(param)
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body = json.dumps({"error": error}).encode()
        again = {"Retry-After": str(RETRY_AFTER_S)} if status in {503, 504} else {}
        self._headers = {**again, **headers}

    def response(self, request_id: str) -> web.Response:
        return web.Response(
            status=self.status,
            body=self.body,
            content_type="application/json",
            headers={**self._headers, REQUEST_ID: request_id},
        )


class LimitError(RefusalError):
    """A call beyond a limit of its key, which has the number `seq`."""

    def __init__(self, seq: int, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", kind="requests", headers=headers)
        self.seq = seq


def as_envelope(status: int, body: bytes) -> bytes:
    """An engine's error body, unchanged if it is an envelope, else what it says in one.

    vLLM's has a number under `code`, which repeats the status; OpenAI's clients take it for text.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        text = body.decode(errors="replace").strip()
        return RefusalError(status, text or _unexplained(status)).body
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        error = _with_four_keys(document["error"], status)
        return body if document == {"error": error} else json.dumps({"error": error}).encode()
    return RefusalError(status, _message_in(document) or _unexplained(status)).body


def _with_four_keys(error: dict[str, object], status: int) -> dict[str, object]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    texts = {key: value for key, value in error.items() if isinstance(value, str)}
    return {
        "message": texts.get("message") or _unexplained(status),
        "type": texts.get("type") or kind,
        "param": texts.get("param"),
        "code": texts.get("code"),
    }


def _unexplained(status: int) -> str:
    return f"the server answered {status} {responses.get(status, '')}".rstrip()


def _message_in(document: object) -> str:
    if not isinstance(document, dict):
        return str(document)
    for key in ("message", "detail", "error"):
        if document.get(key):
            value = document[key]
            return value if isinstance(value, str) else json.dumps(value)
    return ""


def no_such_model(model: str) -> RefusalError:
    """OpenAI's answer to a call for a model that there is none of."""
    message = f"The model `{shortened(model)}` does not exist or you do not have access to it."
    return RefusalError(404, message, code="model_not_found")


LONGEST_RETRY_S = 60
"""OpenAI's clients heed no `Retry-After` of more than that."""


def too_late(late_s: float) -> RefusalError:
    """The answer to a call whose first token would be so late: by then the line is shorter."""
    retry_s = min(LONGEST_RETRY_S, math.ceil(late_s))
    message = (
        "The engines are overloaded: the first token of this call would come after its bound. "
        f"Please try again in {retry_s}s."
    )
    headers = {"Retry-After": str(retry_s)}
    return RefusalError(429, message, code="overloaded", kind="requests", headers=headers)
