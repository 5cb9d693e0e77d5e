"""What an engine's HTTP reply means for the row that asked. Pure: bytes in, `Outcome` out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from batchrun.types import Outcome, OutcomeKind, Request, RowError, Usage

_RESULT_KEYS = {
    "/v1/chat/completions": "choices",
    "/v1/completions": "choices",
    "/v1/embeddings": "data",
    "/v1/responses": "output",
}
_BUSY_STATUSES = frozenset({429, 503})
_RETRY_STATUSES = frozenset({408, 409, 425})
_JOB_STATUSES = frozenset({401, 403, 404})
_UNFINISHED_REASONS = frozenset({"abort", "error"})
_MAX_MESSAGE_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Reply:
    """One whole HTTP reply. `duration_s` is the time from send to last byte."""

    status_code: int
    body: bytes
    retry_after: str | None
    duration_s: float


def classify(request: Request, reply: Reply, *, now_s: float) -> Outcome:
    """The outcome of `reply`; `now_s` (UTC epoch) turns a `Retry-After` date into seconds."""
    if 200 <= reply.status_code < 300:
        return _classify_success(request, reply)
    error = _read_error(reply)
    return failure(
        request,
        _kind_of_error(reply.status_code, error),
        error,
        duration_s=reply.duration_s,
        retry_after_s=parse_retry_after(reply.retry_after, now_s=now_s),
    )


def failure(
    request: Request,
    kind: OutcomeKind,
    error: RowError,
    *,
    duration_s: float,
    retry_after_s: float | None = None,
) -> Outcome:
    """An outcome without an answer."""
    return Outcome(
        job_id=request.job_id,
        row=request.row,
        attempt=request.attempt,
        kind=kind,
        error=error,
        duration_s=duration_s,
        retry_after_s=retry_after_s,
    )


def parse_retry_after(value: str | None, *, now_s: float) -> float | None:
    """Seconds to wait from a `Retry-After` header (seconds or a date); None when it is neither."""
    if value is None:
        return None
    try:
        wait_s = float(value)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(value).timestamp() - now_s
        except ValueError:
            return None
    return max(0.0, wait_s) if math.isfinite(wait_s) else None


def _classify_success(request: Request, reply: Reply) -> Outcome:
    document = _parse_object(reply.body)
    key = _RESULT_KEYS.get(request.endpoint)
    problem = _find_problem(document, key)
    if document is None or problem:
        error = RowError("invalid_response", problem, reply.status_code)
        return failure(request, OutcomeKind.RETRY, error, duration_s=reply.duration_s)
    finish_reason = _finish_reason(document) if key == "choices" else None
    if finish_reason in _UNFINISHED_REASONS:
        message = f"the engine gave the row up (finish_reason {finish_reason})"
        error = RowError("aborted", message, reply.status_code)
        return failure(request, OutcomeKind.RETRY, error, duration_s=reply.duration_s)
    return Outcome(
        job_id=request.job_id,
        row=request.row,
        attempt=request.attempt,
        kind=OutcomeKind.OK,
        body=reply.body,
        finish_reason=finish_reason,
        usage=_read_usage(document.get("usage")),
        duration_s=reply.duration_s,
    )


def _find_problem(document: dict[str, object] | None, key: str | None) -> str:
    if document is None:
        return "the engine's reply is not a JSON object"
    if key is None:
        return ""
    results = document.get(key)
    if not isinstance(results, list):
        return f"the engine's reply has no {key!r}"
    if key == "choices" and not (results and all(isinstance(item, dict) for item in results)):
        return "the engine's reply has no usable 'choices'"
    return ""


def _parse_object(body: bytes) -> dict[str, object] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _finish_reason(document: dict[str, object]) -> str | None:
    choices = document["choices"]
    reason = choices[0].get("finish_reason") if isinstance(choices, list) else None
    return reason if isinstance(reason, str) else None


def _read_usage(usage: object) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return Usage(
        num_prompt_tokens=_first_count(usage, "prompt_tokens", "input_tokens"),
        num_output_tokens=_first_count(usage, "completion_tokens", "output_tokens"),
        num_cached_tokens=_first_count(details, "cached_tokens"),
    )


def _first_count(counts: object, *keys: str) -> int:
    if not isinstance(counts, Mapping):
        return 0
    values = [counts.get(key) for key in keys]
    return next((value for value in values if isinstance(value, int) and value >= 0), 0)


def _kind_of_error(status_code: int, error: RowError) -> OutcomeKind:
    if status_code in _BUSY_STATUSES:
        return OutcomeKind.BUSY
    if status_code >= 500 or status_code in _RETRY_STATUSES:
        return OutcomeKind.RETRY
    if status_code < 400 or status_code in _JOB_STATUSES or _is_unknown_model(error):
        return OutcomeKind.JOB_ERROR
    return OutcomeKind.ROW_ERROR


def _is_unknown_model(error: RowError) -> bool:
    message = error.message.lower()
    return error.code == "model_not_found" or (
        message.startswith("the model ") and "does not exist" in message
    )


def _read_error(reply: Reply) -> RowError:
    """Reads OpenAI's `{"error": {...}}`, the flat `{"message": ...}` and `{"detail": ...}`."""
    document = _parse_object(reply.body) or {}
    inner = document.get("error", document)
    fields = inner if isinstance(inner, dict) else {"message": inner}
    message = fields.get("message") or fields.get("detail") or _as_text(reply.body)
    return RowError(
        code=_error_code(fields, reply.status_code),
        message=_one_line(message) or f"the engine answered HTTP {reply.status_code}",
        status_code=reply.status_code,
        type=_text_or_none(fields.get("type")),
        param=_text_or_none(fields.get("param")),
    )


def _text_or_none(value: object) -> str | None:
    return value[:_MAX_MESSAGE_CHARS] if isinstance(value, str) and value else None


def _error_code(fields: Mapping[str, object], status_code: int) -> str:
    for key in ("code", "type"):
        value = fields.get(key)
        if isinstance(value, str) and value and not value.isdigit():
            return value
    return f"http_{status_code}"


def _as_text(body: bytes) -> str:
    return body[:_MAX_MESSAGE_CHARS].decode("utf-8", errors="replace")


def _one_line(message: object) -> str:
    text = message if isinstance(message, str) else json.dumps(message)
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]
