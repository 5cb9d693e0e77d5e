"""A request's text in the order in which chat templates place it, for prefix keys.

Where a model's own template is at hand, `chat_template` renders it instead. Where it is not, all
chats are laid out in the most common order: system text, tools, messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import xxhash

Part = tuple[str, str]
"""(kind, text): `text`, or `image`, `audio`, `video` with a mark for the text."""

_OPEN_END = "\ue000open end\ue000"
SYSTEM_ROLES = frozenset({"system", "developer"})
_MEDIA = ("image", "audio", "video")
_TEXT_KINDS = frozenset({"refusal", "thinking"})
_KEPT_FIELDS = ("name", "reasoning", "tool_call_id")


def prefix_text(body: Mapping[str, object]) -> bytes:
    """The prompt as bytes: equal leading bytes mean equal leading tokens, up to the last few.

    Chats give their messages with roles; images count as a hash of their URL. Completions give
    their prompt, embeddings their input.
    """
    if "messages" in body:
        parts = _chat(body["messages"], body)
    elif "prompt" in body:
        parts = iter([_text(body["prompt"])])
    else:
        parts = _responses(body)
    return "".join(parts).encode("utf-8", "surrogatepass")


def content_parts(content: object) -> list[Part]:
    """The parts of a message's content, or of a prompt: text as it is, and for all else its kind
    with a mark that is equal for equal URLs."""
    if isinstance(content, str):
        return [("text", content)]
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return [_part(part) for part in content]
    return [] if content is None else [("text", _json(content))]


def template_messages(
    messages: object, *, in_parts: bool, keep_developer: bool
) -> list[dict[str, object]]:
    """The messages of a chat as vLLM hands them to a template; the given ones are left alone.

    `in_parts`: contents are lists of parts, else text in which media come first. Without
    `keep_developer`, developer messages become system messages, and all of these one. Raises
    LookupError, TypeError or ValueError when these are no messages.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a list of at least one message")
    told = [_template_message(message, in_parts=in_parts) for message in messages]
    if keep_developer or not any(message["role"] == "developer" for message in told):
        return told
    system = [_lines(message["content"]) for message in told if message["role"] in SYSTEM_ROLES]
    rest = [message for message in told if message["role"] not in SYSTEM_ROLES]
    return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *rest]


def with_open_end(message: dict[str, object]) -> dict[str, object]:
    """A message of `template_messages` with a mark where its text ends."""
    content = message["content"]
    if not isinstance(content, list):
        return {**message, "content": f"{content}{_OPEN_END} "}
    last = max(index for index, part in enumerate(content) if "text" in part)
    marked = {**content[last], "text": f"{content[last]['text']}{_OPEN_END} "}
    return {**message, "content": [*content[:last], marked, *content[last + 1 :]]}


def until_open_end(text: str) -> str:
    """The text before the mark. Raises ValueError when the template dropped it."""
    end = text.rindex(_OPEN_END)
    # A template that strips the message also strips the space after the mark.
    is_stripped = not text.startswith(f"{_OPEN_END} ", end)
    return text[:end].rstrip() if is_stripped else text[:end]


def _chat(messages: object, body: Mapping[str, object]) -> Iterator[str]:
    items = messages if isinstance(messages, list) else []
    is_system = [_role(item) in SYSTEM_ROLES for item in items]
    num_system = [*is_system, False].index(False)
    yield from (text for item in items[:num_system] for text in _message(item))
    if body.get("tools"):
        yield f"<|tools|>{_json(body['tools'])}"
    yield from (text for item in items[num_system:] for text in _message(item))


def _responses(body: Mapping[str, object]) -> Iterator[str]:
    content = body.get("input")
    if body.get("instructions"):
        yield f"<|system|>{body['instructions']}"
    if isinstance(content, list) and content and isinstance(content[0], dict):
        yield from _chat(content, body)
    else:
        yield _text(content)


def _role(message: object) -> str:
    return str(message.get("role", "")) if isinstance(message, Mapping) else ""


def _message(message: object) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield _json(message)
        return
    yield f"<|{_role(message)}|>"
    yield _text(message.get("content"))
    if message.get("tool_calls"):
        yield _json(message["tool_calls"])


def _text(content: object) -> str:
    return "".join(text for _, text in content_parts(content))


def _part(part: Mapping[str, object]) -> Part:
    kind = str(part.get("type", ""))
    text = part.get("text", part.get(kind) if kind in _TEXT_KINDS else None)
    if isinstance(text, str):
        return "text", text
    media = next((name for name in _MEDIA if name in kind or f"{name}_url" in part), kind)
    source = part.get(f"{media}_url", part)
    url = source.get("url", source) if isinstance(source, Mapping) else source
    data = url if isinstance(url, str) else _json(url)
    return media, f"<|{xxhash.xxh3_64_hexdigest(data.encode('utf-8', 'surrogatepass'))}|>"


def _template_message(message: Mapping[str, object], *, in_parts: bool) -> dict[str, object]:
    role, parts = message["role"], content_parts(message.get("content"))
    has_media = any(kind != "text" for kind, _ in parts)
    told: dict[str, object] = {"role": role}
    if in_parts and (has_media or role != "tool"):
        told["content"] = [item for kind, text in parts for item in _template_parts(kind, text)]
    else:
        told["content"] = _lines(message.get("content"))
    told |= {name: message[name] for name in _KEPT_FIELDS if message.get(name) is not None}
    if "reasoning" in told:
        told["reasoning_content"] = told["reasoning"]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        told["tool_calls"] = [_with_arguments(call) for call in calls]
    return told


def _lines(content: object) -> str:
    parts = sorted(content_parts(content), key=lambda part: part[0] == "text")
    return "\n".join(text for _, text in parts)


def _template_parts(kind: str, text: str) -> list[dict[str, object]]:
    words: dict[str, object] = {"type": "text", "text": text}
    return [words] if kind == "text" else [words, {"type": kind}]


def _with_arguments(call: Mapping[str, object]) -> dict[str, object]:
    """A tool call in vLLM's order of fields, its arguments an object: empty when they are none."""
    function = call["function"]
    if not isinstance(function, Mapping):
        raise TypeError("'function' of a tool call must be an object")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    told = arguments if isinstance(arguments, Mapping) else {}
    named = {"arguments": told, "name": function["name"]}
    return {"id": call.get("id"), "function": named, "type": "function"}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
