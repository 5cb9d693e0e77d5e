"""One row of a result on its way into the output file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic_core import from_json

from batchrun.types import RowError, Usage


@dataclass(frozen=True, slots=True)
class ResultRow:
    """What the store holds of one finished row; `response_body` is the engine's JSON reply."""

    row: int
    response_body: bytes | None = None
    error: RowError | None = None
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    attempts: int = 1


def response_text(endpoint: str, body: bytes) -> str | None:
    """The answer in an engine's reply: the text of choice 0, tool calls as JSON text when there
    is no text, an embedding as a JSON list. None when the reply holds no answer."""
    try:
        reply = from_json(body)
    except ValueError:
        return None
    if not isinstance(reply, Mapping):
        return None
    if endpoint == "/v1/embeddings":
        return _embedding_text(reply)
    if endpoint == "/v1/responses":
        return _responses_text(reply)
    return _choice_text(_first(reply.get("choices")))


def error_text(error: RowError | None) -> str | None:
    """An error as the JSON text that the output's `error` column holds; None for none."""
    if error is None:
        return None
    fields = {"code": error.code, "message": error.message, "status_code": error.status_code}
    return json.dumps(fields, ensure_ascii=False)


def _first(items: object) -> Mapping[str, object]:
    first = items[0] if isinstance(items, list) and items else None
    return first if isinstance(first, Mapping) else {}


def _choice_text(choice: Mapping[str, object]) -> str | None:
    message = choice.get("message")
    if not isinstance(message, Mapping):
        return _text(choice.get("text"))
    text = _text(message.get("content"))
    if not text and message.get("tool_calls"):
        return json.dumps(message["tool_calls"], ensure_ascii=False)
    return text


def _embedding_text(reply: Mapping[str, object]) -> str | None:
    data = reply.get("data")
    vectors = [_first([item]).get("embedding") for item in data] if isinstance(data, list) else []
    if not vectors:
        return None
    return json.dumps(vectors[0] if len(vectors) == 1 else vectors)


def _responses_text(reply: Mapping[str, object]) -> str | None:
    items = reply.get("output")
    outputs = (
        [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
    )
    texts = [
        text
        for item in outputs
        if item.get("type") == "message" and isinstance(item.get("content"), list)
        for part in item["content"]
        if isinstance(part, Mapping) and (text := _text(part.get("text"))) is not None
    ]
    if texts:
        return "".join(texts)
    calls = [dict(item) for item in outputs if item.get("type") == "function_call"]
    return json.dumps(calls, ensure_ascii=False) if calls else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
