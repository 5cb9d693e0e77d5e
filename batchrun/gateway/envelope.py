"""OpenAI's error envelope: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from http.client import responses

from aiohttp import web

from batchrun.gateway.headers import REQUEST_ID

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
