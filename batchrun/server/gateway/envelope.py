"""What the gateway answers itself: OpenAI's error envelope, headers that may cross, request ids."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from http.client import responses

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from batchrun.server.gateway.upstreams import Upstream

REQUEST_ID = "X-Request-Id"
CLASS_HEADER = "X-Batchrun-Class"

HOP_BY_HOP = frozenset({
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
})
STEERING = "X-Vllm-Priority"
"""vLLM takes a call's priority from this header before it looks at the body."""
SET_BY_CLIENT_LIBRARY = frozenset({"host", "content-length", "expect"})
_USABLE_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_OWN_PREFIX = "batchrun"
_OWN_HEADERS = "x-batchrun-"


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A copy without the headers of one connection, those that `Connection` names included, and
    without those that batchrun's processes say something to each other with."""
    named = {
        token.strip().lower()
        for value in headers.getall("Connection", [])
        for token in value.split(",")
    }
    dropped = HOP_BY_HOP | named
    return CIMultiDict(
        (key, value)
        for key, value in headers.items()
        if (name := key.lower()) not in dropped and not name.startswith(_OWN_HEADERS)
    )


def without_key(headers: CIMultiDictProxy[str]) -> CIMultiDictProxy[str]:
    """A caller's headers without his API key, which is for the gateway alone."""
    rest = CIMultiDict(headers)
    rest.popall("Authorization", None)
    return CIMultiDictProxy(rest)


def request_headers(
    headers: CIMultiDictProxy[str], *, request_id: str, upstream: Upstream
) -> CIMultiDict[str]:
    """What the engine sees of a caller's headers.

    The request id is always set: the engine would otherwise take one from the body, where a
    caller could write an id of the daemon's.
    """
    sent = end_to_end(headers)
    for key in (*SET_BY_CLIENT_LIBRARY, STEERING):
        sent.popall(key, None)
    sent[REQUEST_ID] = request_id
    if upstream.api_key is not None:
        sent["Authorization"] = f"Bearer {upstream.api_key}"
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
    """An id of the gateway's own."""
    return f"req_{uuid.uuid4().hex}"


RETRY_AFTER_S = 2


def error_body(
    status: int,
    message: str,
    *,
    code: str | None = None,
    kind: str | None = None,
    param: str | None = None,
) -> bytes:
    """The envelope as JSON; `kind` is the error's type, by default that of its status."""
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def error_response(
    status: int, message: str, *, request_id: str, code: str | None = None
) -> web.Response:
    """A whole reply; a 503 carries `Retry-After`."""
    response = web.Response(
        status=status,
        body=error_body(status, message, code=code),
        content_type="application/json",
        headers={REQUEST_ID: request_id},
    )
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def as_envelope(status: int, body: bytes) -> bytes:
    """An engine's error body, unchanged if it is an envelope, else what it says in one.

    vLLM's has a number under `code`, which repeats the status; OpenAI's clients take it for text.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        text = body.decode(errors="replace").strip()
        return error_body(status, text or _unexplained(status))
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        error = _with_four_keys(document["error"], status)
        return body if document == {"error": error} else json.dumps({"error": error}).encode()
    return error_body(status, _message_in(document) or _unexplained(status))


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


class RefusalError(Exception):
    """Raised for a call that goes nowhere; `kind` is the error's type in the envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        kind: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self._body = error_body(status, message, code=code, kind=kind, param=param)
        self._headers: Mapping[str, str] = {}

    def with_headers(self, headers: Mapping[str, str]) -> RefusalError:
        """The same refusal, whose reply carries these headers too."""
        self._headers = headers
        return self

    def response(self, request_id: str) -> web.Response:
        """The whole reply."""
        return web.Response(
            status=self.status,
            body=self._body,
            content_type="application/json",
            headers={**self._headers, REQUEST_ID: request_id},
        )
