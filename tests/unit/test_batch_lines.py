"""The input of a batch: what is wrong with each line, in OpenAI's words."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from image_builders import data_url_of, image_body, picture

from batchrun.jobs.batch import MAX_ERRORS, BatchLines
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.spec import InputSpec
from batchrun.server.api.upload import check_batch_file
from batchrun.store.batches import BatchError

CHAT = "/v1/chat/completions"
JSON_FAULT = "This line is not parseable as valid JSON."


def line(custom_id: object = "a", **changes: Any) -> dict[str, Any]:
    """A sound request; a change to None takes the key away."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    whole = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}
    return {key: value for key, value in whole.items() if value is not None}


def body(**changes: Any) -> dict[str, Any]:
    """A request whose body differs; a change to None takes the key away."""
    whole = {**line()["body"], **changes}
    return line(body={key: value for key, value in whole.items() if value is not None})


def check(tmp_path: Path, content: bytes, *, endpoint: str = CHAT) -> BatchLines:
    """What a file of these bytes holds."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    lines = BatchLines(endpoint, {"m"})
    lines.read(path)
    return lines


def jsonl(*lines: Any) -> bytes:
    """Lines as a file; bytes stay as they are."""
    texts = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in lines]
    return b"\n".join(texts)


FAULTS: Sequence[tuple[Any, tuple[str, str | None, str]]] = [
    (b"nope", ("invalid_json_line", None, JSON_FAULT)),
    (b'{"custom_id": "\xff"}', ("invalid_json_line", None, JSON_FAULT)),
    (b'{"custom_id": NaN}', ("invalid_json_line", None, JSON_FAULT)),
    (b"[" * 5_000, ("invalid_json_line", None, JSON_FAULT)),
    (b"[1]", ("invalid_request", None, "must be a JSON object, but this one is an array")),
    (line(None), ("missing_required_parameter", "custom_id", "parameter: 'custom_id'.")),
    (line(method=None), ("missing_required_parameter", "method", "parameter: 'method'.")),
    (line(url=None), ("missing_required_parameter", "url", "parameter: 'url'.")),
    (line(body=None), ("missing_required_parameter", "body", "parameter: 'body'.")),
    (line(7), ("invalid_type", "custom_id", "expected a string, but got an integer instead.")),
    (line(body=[]), ("invalid_type", "body", "expected an object, but got an array instead.")),
    (line(""), ("invalid_value", "custom_id", "it is empty")),
    (line("x" * 1_025), ("string_above_max_length", "custom_id", "length 1025 instead")),
    (line("first"), ("duplicate_custom_id", "custom_id", "The custom_id 'first' for this")),
    (line(method="GET"), ("invalid_method", "method", "'GET'")),
    (line(url="/chat/completions"), ("invalid_url", "url", "does not match the batch endpoint.")),
    (body(model=None), ("invalid_request", "body.model", "Model parameter is required.")),
    (body(model=5), ("invalid_type", "body.model", "got an integer")),
    (body(messages=None), ("missing_required_parameter", "body.messages", "'messages'.")),
    (body(background=True), ("invalid_request", "body.background", "background is not possible")),
    (body(use_beam_search=True), ("invalid_request", "body.use_beam_search", "use_beam_search is")),
    (body(stream=True), ("streaming_unsupported", "body.stream", "Chat Completions: Streaming")),
    (body(model="x"), ("mismatched_model", "body.model", "The model 'x' for this request does")),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS)
def test_a_faulty_line_is_named_with_code_and_parameter(
    tmp_path: Path, fault: Any, expected: tuple[str, str | None, str]
) -> None:
    found = check(tmp_path, jsonl(line("first"), b"", fault, line("last")))

    (error,) = found.errors
    assert (error.code, error.param, error.line) == (*expected[:2], 3)
    assert expected[2] in error.message


def test_a_model_that_nobody_serves_is_named(tmp_path: Path) -> None:
    found = check(tmp_path, jsonl(body(model="x")))

    message = "The provided model 'x' is not supported by the Batch API."
    assert found.errors == [BatchError("model_not_found", message, "body.model", 1)]


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        (line(method="ü" * 150_000), "': a batch takes 'POST' only."),
        (line("i" * 1_024), "must be unique for each request in a batch."),
        (body(model="ü" * 150_000), "must contain requests for a single model."),
        (line(**{"ü" * 150_000: 1, "body": 5}), "but got an integer instead."),
    ],
)
def test_a_message_quotes_a_long_value_in_part(tmp_path: Path, fault: Any, end: str) -> None:
    (error,) = check(tmp_path, jsonl(line("first"), line("i" * 1_024), fault)).errors

    assert error.message.endswith(end) and len(error.message) < 400


def test_a_long_model_that_nobody_serves_is_quoted_in_part(tmp_path: Path) -> None:
    (error,) = check(tmp_path, jsonl(body(model="ü" * 150_000))).errors

    assert error.message.endswith("' is not supported by the Batch API.")
    assert len(error.message) < 400


def test_faults_come_in_the_order_of_their_lines_and_are_capped(tmp_path: Path) -> None:
    found = check(tmp_path, jsonl(line("first"), *[b"nope"] * (MAX_ERRORS + 7)))

    assert [error.line for error in found.errors] == list(range(2, MAX_ERRORS + 2))


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_a_file_without_a_request_is_refused(tmp_path: Path, content: bytes) -> None:
    (error,) = check(tmp_path, content).errors

    assert (error.code, error.line) == ("empty_file", None)


@pytest.mark.parametrize("blank", [b"\n", b" \r\n", b"\t" * 999 + b"\n"])
def test_blank_lines_cost_nothing_whatever_their_number(tmp_path: Path, blank: bytes) -> None:
    """Memory is bounded, and so are the calls: they go by blocks and not by lines."""
    path = tmp_path / "in.jsonl"
    first, last = jsonl(line("a"), line("b")).split(b"\n")
    path.write_bytes(blank * 9 + first + b"\n" + blank * (1_500_000 // len(blank)) + last)
    rows: list[object] = []

    def read_it() -> None:
        with open_input(InputSpec(path=(str(path),), format="openai-batch")) as data:
            rows.extend(row["custom_id"] for _, part in data.iter_rows() for row in part)

    found = BatchLines(CHAT, {"m"})
    for step in (lambda: check_batch_file(path, "a.jsonl"), lambda: found.read(path), read_it):
        num_calls, peak_bytes = cost_of(step)
        assert num_calls < 10_000
        assert peak_bytes < 16 << 20

    assert (found.errors, found.num_requests) == ([], 2)
    assert rows == ["a", "b"]


def cost_of(step: Callable[[], None]) -> tuple[int, int]:
    """How many calls a step makes, and how much memory it has at most."""
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return num_calls, peak_bytes


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n\r\n"])
def test_line_ends_are_taken_as_they_come(tmp_path: Path, end: bytes) -> None:
    text = jsonl(line("a\u2028b"), b"", line("c")).replace(b"\n", b"\r\n") + end
    found = check(tmp_path, text.replace(b"\\u2028", "\u2028".encode()))

    assert (found.errors, found.num_requests, found.model) == ([], 2, "m")


def test_a_byte_order_mark_is_not_json(tmp_path: Path) -> None:
    (error,) = check(tmp_path, b"\xef\xbb\xbf" + jsonl(line("a"), line("b"))).errors

    assert (error.code, error.line) == ("invalid_json_line", 1)


@pytest.mark.parametrize(("num_requests", "codes"), [(50_000, []), (50_001, ["too_many_tasks"])])
def test_a_batch_holds_fifty_thousand_requests(
    tmp_path: Path, num_requests: int, codes: list[str]
) -> None:
    found = check(tmp_path, jsonl(*(line(str(number)) for number in range(num_requests))))

    assert [error.code for error in found.errors] == codes


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ("text", []),
        ([1] * 50_001, []),
        (["text"] * 50_000, []),
        (["text"] * 50_001, ["too_many_tasks"]),
        ([[1, 2]] * 50_001, ["too_many_tasks"]),
    ],
)
def test_the_inputs_of_embeddings_are_counted(
    tmp_path: Path, values: object, codes: list[str]
) -> None:
    url = "/v1/embeddings"
    request = line(url=url, body={"model": "m", "input": values})

    found = check(tmp_path, jsonl(request), endpoint=url)

    assert [error.code for error in found.errors] == codes


def test_an_image_counts_with_its_size_and_not_with_its_bytes(tmp_path: Path) -> None:
    raw = picture(size=(280, 280))
    content = image_body(data_url_of(raw))["messages"]
    lines = check(tmp_path, jsonl(body(messages=content)))
    assert len(raw) / 4 > 10_000
    assert 100 < lines.num_tokens < 200


def test_an_image_on_the_web_counts_as_one_of_usual_size(tmp_path: Path) -> None:
    content = image_body(*["https://images.example.com/a.jpg"] * 10)["messages"]
    lines = check(tmp_path, jsonl(body(messages=content)))
    assert 10 * 640 * 480 // 28**2 < lines.num_tokens < 5_000
