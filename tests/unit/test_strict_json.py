"""JSON from strangers: what is taken, and how little is built of a trap."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from batchrun.strict import LARGE_JSON_BYTES, MAX_JSON_ITEMS, MAX_JSON_PARTS, parse_json

TRAP = b'{"x":[' + b"{}," * 2_000_000 + b"{}]}"


def test_a_trap_is_refused_before_anything_is_built_of_it() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="too many values"):
            parse_json(TRAP)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 16 << 20


@pytest.mark.parametrize("text", ['[",{:[" ', '\\"{[,:' * 3, "\\\\", '\\\\\\"{', '"{{{{"'])
def test_what_stands_in_strings_does_not_count(text: str) -> None:
    document = {"prompt": text * MAX_JSON_PARTS, "then": [1, {"a": text}]}

    assert parse_json(json.dumps(document).encode()) == document


def test_a_long_vector_is_no_trap() -> None:
    vector = [0] * (MAX_JSON_ITEMS - 1)
    text = json.dumps({"embedding": vector}).encode()

    assert len(text) > LARGE_JSON_BYTES
    assert parse_json(text) == {"embedding": vector}
    with pytest.raises(ValueError, match="too many values"):
        parse_json(text.replace(b"[0,", b"[0,0,0,0,"))


@pytest.mark.parametrize(
    "text", [b'"\\ud800"', b'"\xed\xa0\x80"', b"NaN", b"-Infinity", b"\xef\xbb\xbf1", b"9" * 4_301]
)
def test_what_others_could_not_read_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(b'{"a":' + text + b"}")
