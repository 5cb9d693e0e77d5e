"""What a router is told of a body: the keys of its prompt's pieces, without tokens or a full parse.

Two bodies whose text begins alike begin with the same keys. Tools stand before the messages, as
chat templates have them; the text is that of the body, so a caller must write it alike to share.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from msgspec import UNSET, Raw, Struct, UnsetType

from batchrun.pool.prefix_keys import KeyArray
from batchrun.server.gateway.bodies import is_too_much

PIECE_BYTES = 1024
MAX_TEXT_BYTES = 128 << 10
MEDIA_BYTES = 4096
"""An image, a sound or a video within a body counts as a text of so many bytes, the same for the
same one: how many tokens it is depends on its size and the model."""
_MEDIA_BEGINS = b'"data'
_MEDIA = re.compile(
    _MEDIA_BEGINS + rb'(?::(?:image|audio|video)\\?/[^"]{240,}|"\s*:\s*"[0-9A-Za-z+/=\\]{240,})'
)
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
"""A surrogate without its other half."""
MAX_HALVED_BYTES = 128 << 10
"""A longer body is not looked through for them: that takes up to 50 ns a byte."""
_SEVERAL = re.compile(rb'\[\s*(?:"(?:[^"\\]++|\\.)*+"|\[[^\]]*+\])\s*,', re.DOTALL)
"""Prompts, as texts or as lists of tokens."""
_TOOLS = re.compile(rb"\[\s*\{")
"""Parsers of engines may hold back a call of a tool until it is whole."""
NO_KEYS: KeyArray = np.empty(0, np.uint64)

Part = Raw | UnsetType


class _Body(Struct):
    """The fields that an engine's cache depends on, unread."""

    model: Part = UNSET
    cache_salt: Part = UNSET
    tools: Part = UNSET
    instructions: Part = UNSET
    messages: Part = UNSET
    prompt: Part = UNSET
    input: Part = UNSET
    stream: object = False
    echo: object = False
    prompt_logprobs: object = None
    n: object = None
    stream_interval: object = None
    include_reasoning: object = True


_DECODER = msgspec.json.Decoder(_Body)


class PromptText(NamedTuple):
    """The bytes of a body's prompt, a key for each full piece of the first 128 KiB, which holds all
    text before it, whether the reply is to come as a stream, the model that is asked for, whether
    there are images or sounds in it, and whether the reply tells of the cache: engines compute a
    prompt anew whose own tokens are asked for, and of media nobody knows the tokens. The reply has
    `num_choices` (0: nobody knows), more tokens than events where it `is_sparse`, and `may_pause`
    between them for as long as an answer takes."""

    num_bytes: int = 0
    keys: KeyArray = NO_KEYS
    is_stream: bool = False
    model: str | None = None
    has_media: bool = False
    tells_of_cache: bool = True
    num_choices: int = 0
    is_sparse: bool = False
    may_pause: bool = False


UNREAD = PromptText(may_pause=True)


def read_prompt(body: bytes, *, needs_model: bool = False) -> PromptText:
    """What there is of it in a body; nothing in what is none, but that its reply may pause. Where
    strict readers fail, all is read for the model, if that `needs_model`: engines read with
    Python's reader."""
    try:
        found = _decode(body)
        model = _name(found.model)
    except (ValueError, RecursionError):
        return _read_odd(body) if body and needs_model else UNREAD
    parts = (found.tools, found.instructions, found.messages, found.prompt, found.input)
    views = [memoryview(part) for part in parts if isinstance(part, Raw)]
    has_media = _MEDIA_BEGINS in body and _MEDIA.search(body) is not None
    if has_media:
        views = [memoryview(_MEDIA.sub(_stand_in, view)) for view in views]
    num_bytes = sum(map(len, views))
    text = views[0] if len(views) == 1 else memoryview(b"".join(v[:MAX_TEXT_BYTES] for v in views))
    key = xxhash.xxh3_64_intdigest(b"\0".join([_text(found.model), _text(found.cache_salt)]))
    keys: list[int] = []
    for start in range(0, min(num_bytes, MAX_TEXT_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        key = xxhash.xxh3_64_intdigest(text[start : start + PIECE_BYTES], key)
        keys.append(key)
    is_stream = found.stream is True
    is_sparse = _is_sparse(found.stream_interval, found.include_reasoning)
    has_tools = isinstance(found.tools, Raw) and _TOOLS.match(found.tools) is not None
    tells_of_cache = not (has_media or found.echo or found.prompt_logprobs is not None)
    return PromptText(
        num_bytes,
        np.array(keys, np.uint64),
        is_stream,
        model,
        has_media,
        tells_of_cache,
        _num_choices(found),
        is_sparse,
        is_sparse or has_tools,
    )


def _is_sparse(stream_interval: object, include_reasoning: object) -> bool:
    return stream_interval not in (None, 1) or include_reasoning is not True


def _num_choices(found: _Body) -> int:
    """Of the one prompt; 0 for several, and for an `n` that the route may not know."""
    num, prompt = 1 if found.n is None else found.n, found.prompt
    is_one = not (isinstance(prompt, Raw) and _SEVERAL.match(prompt))
    is_known = is_one and (num == 1 or found.input is UNSET)
    return num if isinstance(num, int) and is_known else 0


def _read_odd(body: bytes) -> PromptText:
    """Model and kind of stream of what has NaN in it, half an emoji, or other bytes than UTF-8's;
    nothing of what takes long to read."""
    try:
        found = None if is_too_much(body) else json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return UNREAD
    model = found.get("model")
    name = model if isinstance(model, str) else None
    is_sparse = _is_sparse(found.get("stream_interval"), found.get("include_reasoning", True))
    tools = found.get("tools")
    has_tools = isinstance(tools, list) and isinstance(next(iter(tools), None), dict)
    return PromptText(
        is_stream=found.get("stream") is True,
        model=name,
        is_sparse=is_sparse,
        may_pause=is_sparse or has_tools,
    )


def _decode(body: bytes) -> _Body:
    """Raises ValueError and RecursionError for what is none."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if len(body) > MAX_HALVED_BYTES:
            raise
        # Engines read with Python's reader, which takes half an emoji and a byte order mark.
        return _DECODER.decode(_HALF.sub(rb"\\ufffd", body.removeprefix(BOM_UTF8)))


def _stand_in(medium: re.Match[bytes]) -> bytes:
    digest = xxhash.xxh3_64_hexdigest(medium[0]).encode()
    return b'"' + digest * (MEDIA_BYTES // len(digest))


def _text(part: Part) -> bytes:
    return bytes(part) if isinstance(part, Raw) else b""


def _name(part: Part) -> str | None:
    """A JSON text; None for anything else."""
    found = msgspec.json.decode(part) if isinstance(part, Raw) else None
    return found if isinstance(found, str) else None
