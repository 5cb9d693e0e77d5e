"""Callers from outside cannot send the daemon's hints: `vllm_xargs.batchrun` and `priority` go."""

from __future__ import annotations

import json
import re
from typing import Any

from batchrun.errors import InputError

_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|[67][0-9a-fA-F])")


def strip_hints(body: bytes) -> bytes:
    """The body without the keys that steer scheduling.

    A body that cannot hold them in any spelling is returned as it is, unparsed. Raises InputError
    if it might hold them and is not a JSON object.
    """
    if not _may_hold_hints(body):
        return body
    document = _parse(body)
    if "vllm_xargs" not in document and "priority" not in document:
        return body if b"\0" not in body else json.dumps(document).encode()
    document.pop("priority", None)
    extra = document.get("vllm_xargs")
    if isinstance(extra, dict):
        extra.pop("batchrun", None)
        if not extra:
            del document["vllm_xargs"]
    return json.dumps(document).encode()


def _may_hold_hints(body: bytes) -> bool:
    # A NUL byte means UTF-16 or UTF-32, which JSON parsers detect and accept.
    return (
        b"vllm_xargs" in body
        or b"priority" in body
        or b"\0" in body
        or _ESCAPED_LETTER.search(body) is not None
    )


def _parse(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"the request body is not valid JSON: {reason}") from error
    if not isinstance(document, dict):
        raise InputError("the request body must be a JSON object")
    return document
