"""A request's text in the order in which chat templates place it, for prefix keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import xxhash


def prefix_text(body: Mapping[str, object]) -> bytes:
    """The prompt as bytes: equal leading bytes mean equal leading tokens, up to the last few.

    System messages come first, then tools, then the other messages with their roles; images
    count as a hash of their URL. Completions give their prompt, embeddings their input.
    """
    if "messages" in body:
        parts = _chat(body["messages"], body)
    elif "prompt" in body:
        parts = iter([_content(body["prompt"])])
    else:
        parts = _responses(body)
    return "".join(parts).encode("utf-8", "surrogatepass")


def _chat(messages: object, body: Mapping[str, object]) -> Iterator[str]:
    items = messages if isinstance(messages, list) else []
    num_system = 0
    while num_system < len(items) and _role(items[num_system]) in {"system", "developer"}:
        yield from _message(items[num_system])
        num_system += 1
    if body.get("tools"):
        yield f"<|tools|>{_json(body['tools'])}"
    for message in items[num_system:]:
        yield from _message(message)


def _responses(body: Mapping[str, object]) -> Iterator[str]:
    content = body.get("input")
    if body.get("instructions"):
        yield f"<|system|>{body['instructions']}"
    if isinstance(content, list) and content and isinstance(content[0], dict):
        yield from _chat(content, body)
    else:
        yield _content(content)


def _role(message: object) -> str:
    return str(message.get("role", "")) if isinstance(message, Mapping) else ""


def _message(message: object) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield _json(message)
        return
    yield f"<|{_role(message)}|>"
    yield _content(message.get("content"))
    if message.get("tool_calls"):
        yield _json(message["tool_calls"])


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "".join(_part(part) for part in content)
    return "" if content is None else _json(content)


def _part(part: Mapping[str, object]) -> str:
    if isinstance(part.get("text"), str):
        return str(part["text"])
    return f"<|{xxhash.xxh3_64_hexdigest(_json(part).encode('utf-8', 'surrogatepass'))}|>"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
