"""The tier in replies, and the secret that is not in them, however the bytes are cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchrun.server.gateway.replies import (
    MAX_LINE_BYTES,
    MIN_SECRET_CHARS,
    Filter,
    Redaction,
    TierInReply,
    with_tier,
)


def in_events() -> TierInReply:
    return TierInReply("flex", is_stream=True)


def in_body() -> TierInReply:
    return TierInReply("flex", is_stream=False)


SECRET = "aab-aab-aac_0123456789"


def run(each: Filter, text: bytes, cuts: list[int]) -> bytes:
    """What comes out when the text comes in these pieces."""
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    return b"".join(map(each.feed, pieces)) + each.end()


def event(document: object, ending: bytes = b"\n") -> bytes:
    return b"data: " + json.dumps(document).encode() + ending * 2


def chunk(**more: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [], **more}


STREAM = b"".join([
    b": a comment\n\n",
    event(chunk(id="1", service_tier=None)),
    event(chunk(id="2", text="line\nfeed \u2028 data: {}"), b"\r\n"),
    b'event: ping\ndata:{"object":"text_completion","x":1e400}\n\n',
    event({"error": {"message": "no", "object": "chat.completion"}}),
    event({"type": "response.created", "response": {"object": "response", "id": "r"}}),
    b"data: {broken\n\ndata: [DONE]\n\n\n",
])


def test_each_event_of_a_completion_says_the_tier_and_nothing_else_changes() -> None:
    lines = run(in_events(), STREAM, []).splitlines(keepends=True)
    before = STREAM.splitlines(keepends=True)
    told = [line for line in lines if b"flex" in line]

    assert len(lines) == len(before)
    assert [new for new, old in zip(lines, before, strict=True) if new != old] == told
    documents = [json.loads(line[5:]) for line in told]
    assert [d.pop("service_tier", None) for d in documents] == ["flex"] * 3 + [None]
    assert documents[3]["response"] == {"object": "response", "id": "r", "service_tier": "flex"}
    assert documents[1] == chunk(id="2", text="line\nfeed \u2028 data: {}")
    assert b'"x":1e400' in told[2]
    assert told[1].endswith(b"\r\n")


@given(st.lists(st.integers(0, 10**6), max_size=40))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    assert run(in_events(), STREAM, cuts) == run(in_events(), STREAM, [])


@given(st.binary(max_size=60), st.lists(st.integers(0, 10**6), max_size=8))
def test_any_bytes_pass_the_same_however_they_are_cut(text: bytes, cuts: list[int]) -> None:
    assert run(in_events(), text, cuts) == text


@pytest.mark.parametrize("size", [MAX_LINE_BYTES - 100, MAX_LINE_BYTES, 3 * MAX_LINE_BYTES])
def test_a_line_beyond_the_bound_passes_unread_and_is_not_kept(size: int) -> None:
    long = event(chunk(text="x" * size))
    text = long + event(chunk())
    each = in_events()
    out = b""
    for start in range(0, len(text), 10_000):
        out += each.feed(text[start : start + 10_000])
        assert len(each._kept) <= MAX_LINE_BYTES + 10_000

    assert out + each.end() == run(in_events(), text, [])
    assert (out.count(b"flex") == 2) == (len(long) - 2 <= MAX_LINE_BYTES)
    assert out.endswith(
        event(chunk(service_tier="flex")).replace(b'": ', b'":').replace(b", ", b",")
    )


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'{"error": {}}', b'{"object": 1}', b"\xff\xfe", b"[" * 100_000],
)
def test_what_is_no_completion_stays(text: bytes) -> None:
    assert with_tier(text, "flex") is text
    assert run(in_body(), text, [1, 2, 3]) == text


def test_a_body_keeps_all_other_values_byte_for_byte() -> None:
    text = b'{"object":"chat.completion","n":1e400,"s":"\\u00e9","service_tier":null,"z":[1.50]}'

    assert run(in_body(), text, [5, 30]) == text.replace(b"null", b'"flex"')


@example(["aab-", "aab-", "aab-", SECRET], list(range(40)))
@given(
    st.lists(st.sampled_from([SECRET, SECRET[:9], SECRET[:12], "aab-", " ", "x", "b-aac"])),
    st.lists(st.integers(0, 10**6), max_size=20),
)
def test_no_piece_of_the_secret_gets_through_however_it_is_cut(
    parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts).encode()
    out = run(Redaction(SECRET), text, cuts)

    assert SECRET[: MIN_SECRET_CHARS + 1].encode() not in out
    if SECRET[:MIN_SECRET_CHARS].encode() not in text:
        assert out == text
