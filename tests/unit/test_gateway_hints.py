"""Hints go in every spelling that a JSON parser would accept; nothing else changes."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.errors import InputError
from batchrun.hints import SloBounds
from batchrun.media.fetching import ImageFetcher
from batchrun.server.gateway.bodies import (
    BodiesInFlight,
    SteeredBody,
    fill_images,
    read_call_body,
    strip_hints,
)
from batchrun.server.gateway.envelope import RefusalError
from batchrun.server.gateway.upstreams import Upstream


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "priority": -9}',
        b'{"a": 1, "vllm_xargs": {"batchrun": "{}"}}',
        b'{"a": 1,\n\t"priority"\r\n :\t-9 }',
        b'{"a": 1, "\\u0070riority": -9}',
        b'{"a": 1, "\\u0070\\u0072\\u0069\\u006F\\u0072\\u0069\\u0074\\u0079": -9}',
        b'{"a": 1, "vllm\\u005fxargs": {"batchrun": 1}}',
        b'{"a": 1, "vllm\\u005Fxargs": {"b\\u0061tchrun": 1}}',
        b'{"vllm_xargs": {"batchrun": 1}, "a": 1, "vllm_xargs": {"batchrun": 2}}',
        b'{"vllm_xargs": {"batchrun": 1, "batchrun": 2}, "a": 1}',
        b'{"vllm_xargs": {}, "a": 1, "priority": 1, "priority": 2}',
        b'\xef\xbb\xbf{"a": 1, "priority": 1}',
        b'{"a": 1, "priority": ' + b"9" * 5_000 + b"}",
        '{"a": 1, "priority": 1}'.encode("utf-16"),
        '{"a": 1, "priority": 1}'.encode("utf-16-be"),
        '{"a": 1, "priority": 1, "vllm_xargs": {"batchrun": 1}}'.encode("utf-32"),
    ],
)
def test_hints_are_removed_in_every_spelling(body: bytes) -> None:
    assert json.loads(strip_hints(body)) == {"a": 1}


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":  1.0e400, "b": "\\u4e2d"}',
        b'{"messages": [{"content": "my priority is vllm_xargs"}], "a": 1E2}',
        b'{"messages": [{"priority": 1}], "tools": [{"vllm_xargs": {"batchrun": 1}}]}',
        b"not json at all",
        b"",
    ],
)
def test_bodies_without_hints_pass_byte_for_byte(body: bytes) -> None:
    assert strip_hints(body) == body


def test_other_extra_arguments_stay() -> None:
    body = b'{"vllm_xargs": {"batchrun": 1, "mine": 2}}'
    assert json.loads(strip_hints(body)) == {"vllm_xargs": {"mine": 2}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"priority": 1',
        b'["priority"]',
        b'{"priority": \xff}',
        b'{"priority":' + b"[" * 90_000,
        b'{"priority": "' + b'\\",' * 200_000,
        b'{"vllm_xargs":' + b"9" * 5_000 + b"}",
    ],
)
def test_a_body_that_may_hide_hints_and_cannot_be_read_is_refused(body: bytes) -> None:
    with pytest.raises(InputError, match="the request body"):
        strip_hints(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    rest=st.dictionaries(st.text().filter(lambda key: key != "vllm_xargs"), json_values),
    hint=json_values,
    encoding=st.sampled_from(["utf-8", "utf-16", "utf-32"]),
)
def test_what_is_left_is_the_body_without_the_hints(
    rest: dict[str, object], hint: object, encoding: str
) -> None:
    document = rest | {"priority": 3, "vllm_xargs": {"batchrun": hint}}
    body = json.dumps(document).encode(encoding)
    assert json.loads(strip_hints(body)) == {k: v for k, v in rest.items() if k != "priority"}


def body_with(place: str, value: object) -> bytes:
    """A body that names all for which a gateway looks into bodies."""
    part = {"type": "text", "text": "image_url", "uuid": "of another"}
    document = {
        "messages": [{"role": "user", "content": [part]}],
        "priority": 1,
        "service_tier": "auto",
    }
    return json.dumps({**document, place: value}).encode()


async def taken_in(body: bytes, bounds: SloBounds | None = None) -> dict[str, Any]:
    """What an engine gets of it."""
    with BodiesInFlight(1 << 30).holding(None) as held:
        body = await fill_images(body, ImageFetcher(), held, "")
    call = read_call_body("/v1/chat/completions", body, bounds)
    if isinstance(call, SteeredBody):
        call = call.written_for(Upstream("one", "http://h:1"))
    found: dict[str, Any] = json.loads(call)
    return found


@pytest.mark.parametrize("bounds", [None, SloBounds(1.0, 0.1)])
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("prompt", list(range(300_000))),
        ("messages", [{"role": "user", "content": [{"text": "1,[a]," * 200_000, "uuid": "a"}]}]),
    ],
    ids=["many tokens", "a table"],
)
async def test_many_tokens_and_long_texts_are_no_reason_to_refuse_a_body(
    place: str, value: object, bounds: SloBounds | None
) -> None:
    found = await taken_in(body_with(place, value), bounds)

    assert "priority" not in found and "uuid" not in str(found["messages"])[-100:]
    assert len(str(found[place])) > 1_000_000


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("messages", [{"uuid": [{}] * 200_000}]),
        ("messages", [{"uuid": ["a"] * 200_000}]),
        ("messages", [{"uuid": 0}, *[{}] * 2_000_000]),
        ("vllm_xargs", [[]] * 200_000),
        ("prompt", [math.nan] * 200_000),
    ],
)
async def test_what_takes_long_to_read_is_refused(place: str, value: object) -> None:
    with pytest.raises(RefusalError, match="values at most") as refused:
        await taken_in(body_with(place, value))
    assert refused.value.status == 413


FLEX: dict[str, object] = {"service_tier": "flex"}
STEERED, PLAIN = {"hint_nonce": "secret"}, {"offline_priority": 1}


@pytest.mark.parametrize(
    ("asked", "known", "is_lost"),
    [
        (FLEX, STEERED, True),
        (FLEX, PLAIN, True),
        (FLEX, {}, False),
        ({}, STEERED, True),
        ({}, PLAIN, False),
        ({}, STEERED | {"models": ("other",)}, False),
        ({"use_beam_search": "false"}, STEERED, False),
    ],
)
def test_beams_that_would_lose_class_or_tier_are_refused(
    asked: dict[str, object], known: dict[str, Any], *, is_lost: bool
) -> None:
    body = json.dumps({"model": "mine", "use_beam_search": True} | asked).encode()
    call = read_call_body("/v1/completions", body, None if asked == FLEX else SloBounds(1.0, 0.1))
    assert isinstance(call, SteeredBody)
    beams = pytest.raises(RefusalError, match="is not possible") if is_lost else nullcontext()
    with beams:
        call.check_beams([Upstream("one", "http://h:1", **known)])
