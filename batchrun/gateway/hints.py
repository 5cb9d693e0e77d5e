"""Callers from outside cannot send the daemon's hints: `vllm_xargs.batchrun` and `priority` go."""

from __future__ import annotations

import json
import re
from typing import Any

from batchrun.errors import InputError
from batchrun.gateway.refusal import RefusalError
from batchrun.types import HINT_KEY

HINT_KEYS = (b"vllm_xargs", b"priority")
MAX_VALUES = 1_000_000
"""Parsing more would hold up all other calls of a worker for long."""
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|[67][0-9a-fA-F])")


def strip_hints(body: bytes) -> bytes:
    """The body without the keys that steer scheduling.

    A body that cannot hold them in any spelling is returned as it is, unparsed. Raises InputError
    if it might hold them and is not a JSON object.
    """
    if not may_hold(body, *HINT_KEYS):
        return body
    document = _parse(body)
    if "vllm_xargs" not in document and "priority" not in document:
        return body if b"\0" not in body else json.dumps(document).encode()
    _strip(document)
    return json.dumps(document).encode()


def parse_without_hints(body: bytes) -> dict[str, Any]:
    """The body's object without those keys. Raises InputError if it is none."""
    document = _parse(body)
    _strip(document)
    return document


def may_hold(body: bytes, *keys: bytes) -> bool:
    """Whether a JSON text could hold one of the keys, lower-case words, in some spelling.

    A NUL byte means UTF-16 or UTF-32, which JSON parsers detect and accept.
    """
    return (
        any(key in body for key in keys)
        or b"\0" in body
        or _ESCAPED_LETTER.search(body) is not None
    )


def is_too_much(body: bytes) -> bool:
    """Whether a JSON text may hold so many values that parsing takes long."""
    return body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES


def _strip(document: dict[str, Any]) -> None:
    document.pop("priority", None)
    extra = document.get("vllm_xargs")
    if isinstance(extra, dict):
        extra.pop(HINT_KEY, None)
        if not extra:
            del document["vllm_xargs"]


def _parse(body: bytes) -> dict[str, Any]:
    if is_too_much(body):
        raise RefusalError(
            413,
            f"a body with a class, a tier or a priority may hold {MAX_VALUES} values at most",
        )
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"the request body is not valid JSON: {reason}") from error
    if not isinstance(document, dict):
        raise InputError("the request body must be a JSON object")
    return document
