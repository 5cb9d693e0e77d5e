"""JSON from strangers: what is taken, and how little is built of a trap."""

from __future__ import annotations

import asyncio
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from engine_builders import CHAT

from batchrun.daemon.faults import checked_answer
from batchrun.errors import DataError
from batchrun.jobs.batch import BatchLines
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.prompts.prompt_text import ChatTemplate
from batchrun.jobs.prompts.templating import make_environment
from batchrun.jobs.spec import InputSpec
from batchrun.server.api.errors import ApiError
from batchrun.server.api.upload import check_batch_file
from batchrun.strict import (
    LARGE_JSON_BYTES,
    MAX_JSON_ITEMS,
    MAX_JSON_PARTS,
    REPLY_TIMES,
    parse_json,
    parse_reply,
)
from batchrun.types import Outcome, OutcomeKind

TRAP = b'{"x":[' + b"{}," * 2_000_000 + b"{}]}"
PIECE = "[" + "{}," * 300_000 + "{}]"
"""A trap in a text that is not large."""


@contextmanager
def little_is_built(num_texts: int = 2) -> Iterator[None]:
    """Within, no more memory is taken than for so many copies of the text, and some for pieces."""
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < num_texts * len(TRAP) + (4 << 20)


@pytest.mark.parametrize(("parse", "times"), [(parse_json, 1), (parse_reply, REPLY_TIMES)])
def test_a_trap_is_refused_before_anything_is_built_of_it(
    parse: Callable[[bytes], object], times: int
) -> None:
    trap = TRAP * (MAX_JSON_PARTS * times // 2_000_000 + 1)
    with little_is_built(), pytest.raises(ValueError, match="too many values"):
        parse(trap)


def test_a_trap_among_the_lines_of_a_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(TRAP)
    lines = BatchLines(CHAT, {"m"})

    with little_is_built():
        check_batch_file(path, "in.jsonl")
        lines.read(path)
        with pytest.raises(DataError, match="too many values"):
            open_input(InputSpec(path=(str(path),), format="openai-batch")).close()
    assert [error.code for error in lines.errors] == ["invalid_json_line"]

    path.write_bytes(b'{"x": NaN}')
    with pytest.raises(ApiError, match="Invalid file format"):
        check_batch_file(path, "in.jsonl")


@pytest.mark.parametrize("arguments", [[TRAP.decode()], [PIECE] * 7])
def test_a_trap_in_the_arguments_of_calls_is_not_built(arguments: list[str]) -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": text}} for text in arguments]
    body = {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}]}
    template = ChatTemplate(
        {"default": "{{ messages[0].tool_calls | tojson }}"}, {}, now=datetime.now(UTC)
    )

    with little_is_built(num_texts=6):
        text = template.prefix_text(body)
    assert text.count(b"{}") > 1_000_000


def test_a_trap_in_a_column_is_not_built() -> None:
    template = make_environment().from_string("{{ text | fromjson }}")
    text = TRAP.decode()

    with little_is_built(), pytest.raises(ValueError, match="too many values"):
        template.render(text=text)


def answer(content: str) -> Outcome:
    reply = {"choices": [{"message": {"role": "assistant", "content": content}}]}
    return Outcome("job_a", 0, 1, OutcomeKind.OK, body=json.dumps(reply).encode())


def check(outcome: Outcome) -> Outcome:
    """What comes of an answer that was to be JSON."""
    body: Mapping[str, object] = {"response_format": {"type": "json_object"}}
    return asyncio.run(checked_answer(CHAT, body, outcome))


@pytest.mark.parametrize("kind", [["json_object"], {"json_object": 1}])
def test_a_format_that_is_no_text_asks_for_no_json(kind: object) -> None:
    outcome = answer("hi")
    body = {"response_format": {"type": kind}}

    assert asyncio.run(checked_answer(CHAT, body, outcome)) is outcome


def test_a_trap_in_an_answer_is_its_row_s_error() -> None:
    outcome = answer(TRAP.decode())

    with little_is_built(num_texts=6):
        checked = check(outcome)

    assert checked.error is not None and checked.error.code == "invalid_json"
    assert "too many values" in checked.error.message and len(checked.error.message) < 200


@pytest.mark.parametrize(("num_chars", "num_here"), [(9, 1), (LARGE_JSON_BYTES, 0)])
def test_a_long_answer_is_read_in_a_thread(num_chars: int, num_here: int) -> None:
    outcome = answer(json.dumps({"x": "a" * num_chars}))
    called = set()

    def note(frame: FrameType, _event: str, _argument: Any) -> None:
        called.add(frame.f_code)

    sys.setprofile(note)
    try:
        assert check(outcome) is outcome
    finally:
        sys.setprofile(None)
    assert len(called & {parse_json.__code__}) == num_here


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
