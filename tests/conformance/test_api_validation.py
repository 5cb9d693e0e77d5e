"""Validation of the input: checks 28 to 35 of the API's specification."""

from __future__ import annotations

import json
from typing import Any

import pytest
from batch_rig import (
    COMPLETIONS,
    Caller,
    Line,
    chat_line,
    chat_lines,
    counts,
    errors,
    without,
)
from deployment_rig import DeploymentRig

Expected = tuple[str, str | None, str]
GOOD = chat_line("good")
BAD: dict[str, tuple[Line | bytes, Expected]] = {
    "no JSON": (
        b'{"custom_id": ',
        ("invalid_json_line", None, "This line is not parseable as valid JSON."),
    ),
    **{
        f"no {key}": (
            without(chat_line("bad"), key),
            ("missing_required_parameter", key, f"Missing required parameter: '{key}'."),
        )
        for key in ("custom_id", "method", "url", "body")
    },
    "another url": (
        {**chat_line("bad"), "url": COMPLETIONS},
        (
            "invalid_url",
            "url",
            "The URL provided for this request does not match the batch endpoint.",
        ),
    ),
    "url without version": (
        {**chat_line("bad"), "url": "/chat/completions"},
        (
            "invalid_url",
            "url",
            "The URL provided for this request does not match the batch endpoint.",
        ),
    ),
    "second model": (
        chat_line("bad", model="another"),
        (
            "mismatched_model",
            "body.model",
            "The model 'another' for this request does not match the rest of the batch. "
            "Each batch must contain requests for a single model.",
        ),
    ),
    "no model": (
        without(chat_line("bad"), "body.model"),
        ("invalid_request", "body.model", "Model parameter is required."),
    ),
    "no messages": (
        without(chat_line("bad"), "body.messages"),
        ("missing_required_parameter", "body.messages", "Missing required parameter: 'messages'."),
    ),
    "streaming": (
        chat_line("bad", stream=True),
        (
            "streaming_unsupported",
            "body.stream",
            "Chat Completions: Streaming is not supported in the Batch API.",
        ),
    ),
    "repeated id": (
        GOOD,
        (
            "duplicate_custom_id",
            "custom_id",
            "The custom_id 'good' for this request is a duplicate of another request. The "
            "custom_id parameter must be unique for each request in a batch.",
        ),
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_28_every_fault_of_a_line_is_named(caller: Caller, fault: str) -> None:
    """Each [O] row of the section 3 table yields that code, param and 1-based line, and exactly
    that number of errors."""
    line, (code, param, message) = BAD[fault]

    failed = caller.run([GOOD, line, chat_line("last")])

    assert failed.status == "failed"
    assert errors(failed) == [(code, param, 2)]
    assert failed.errors is not None and failed.errors.data is not None
    assert failed.errors.data[0].message == message


def test_28_a_model_that_is_not_served_is_named(caller: Caller) -> None:
    """A model unknown: `model_not_found`, param `body.model`, its line."""
    failed = caller.run([chat_line("a", model="unknown/model")])

    assert failed.status == "failed"
    assert errors(failed) == [("model_not_found", "body.model", 1)]
    assert failed.errors is not None and failed.errors.data is not None
    message = "The provided model 'unknown/model' is not supported by the Batch API."
    assert failed.errors.data[0].message == message


def test_29_faults_of_several_lines_come_together(caller: Caller) -> None:
    """Four different faults on four lines are reported together, in line order."""
    failed = caller.run([
        chat_line("1"),
        without(chat_line("2"), "url"),
        chat_line("3"),
        chat_line("4", stream=True),
        b"no JSON",
        {**chat_line("6"), "url": COMPLETIONS},
        chat_line("7"),
    ])
    assert errors(failed) == [
        ("missing_required_parameter", "url", 2),
        ("streaming_unsupported", "body.stream", 4),
        ("invalid_json_line", None, 5),
        ("invalid_url", "url", 6),
    ]


def test_30_one_bad_line_fails_all(caller: Caller, batch_rig: DeploymentRig) -> None:
    """One bad line among good ones fails the whole batch; counts 0/0/0; no request reached the
    engine."""
    num_before = len(batch_rig.executions())

    failed = caller.run([*chat_lines(50), b"no JSON", *chat_lines(50, "more")])
    good = caller.run([chat_line("sentinel")])

    assert (failed.status, counts(failed)) == ("failed", (0, 0, 0))
    assert (good.status, counts(good)) == ("completed", (1, 1, 0))
    assert len(batch_rig.executions()) == num_before + 1


def test_31_a_repeated_id_names_its_second_line(caller: Caller) -> None:
    """Duplicate `custom_id` names the second line."""
    failed = caller.run([*chat_lines(3), chat_line("question-1"), chat_line("z")])
    assert errors(failed) == [("duplicate_custom_id", "custom_id", 4)]


def test_31_a_second_model_names_the_deviating_line(caller: Caller) -> None:
    """Two models: mismatched_model on the deviating line."""
    failed = caller.run([*chat_lines(3), chat_line("odd", model="another"), chat_line("z")])
    assert errors(failed) == [("mismatched_model", "body.model", 4)]


def test_32_blank_lines_are_no_requests(caller: Caller) -> None:
    """Blank lines and a missing final newline are tolerated."""
    lines = [json.dumps(chat_line(name)).encode() for name in ("a", "b")]
    content = lines[0] + b"\n\n \t\r\n\n" + lines[1]

    batch = caller.run(content)

    assert (batch.status, counts(batch)) == ("completed", (2, 2, 0))
    assert set(caller.results(batch)) == {"a", "b"}


def test_32_line_numbers_stay_physical(caller: Caller) -> None:
    """Blank lines are tolerated; line numbers stay physical."""
    failed = caller.run([GOOD, b"", b"  ", b"no JSON", b"", chat_line("z", stream=True)])
    assert errors(failed) == [
        ("invalid_json_line", None, 4),
        ("streaming_unsupported", "body.stream", 6),
    ]


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b"[1, 2]", "invalid_request", None),
        ({**chat_line("x"), "custom_id": 7}, "invalid_type", "custom_id"),
        ({**chat_line("x"), "method": "GET"}, "invalid_method", "method"),
        (chat_line("x", stream=True), "streaming_unsupported", "body.stream"),
        (b'{"custom_id": NaN}', "invalid_json_line", None),
    ],
    ids=["invalid UTF-8", "array", "numeric id", "GET", "stream", "NaN"],
)
def test_33_odd_lines_fail_cleanly(caller: Caller, line: Any, code: str, param: str | None) -> None:
    """Invalid UTF-8, JSON array line, numeric `custom_id`, `method: GET`, `stream: true`: each
    fails cleanly with the right line."""
    failed = caller.run([GOOD, b"", line, chat_line("z")])
    assert failed.status == "failed"
    assert errors(failed) == [(code, param, 3)]


def test_33_a_byte_order_mark_is_no_json(caller: Caller) -> None:
    """BOM fails cleanly with the right line."""
    content = b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n"
    failed = caller.run(content)
    assert (failed.status, errors(failed)) == ("failed", [("invalid_json_line", None, 1)])


def test_34_a_line_separator_in_a_string_splits_no_line(caller: Caller) -> None:
    """A U+2028 inside a string does not split the line."""
    text = "one\u2028two\u2029three\u0085four"
    line = json.dumps(chat_line(text, text), ensure_ascii=False).encode()

    batch = caller.run([line, b"", chat_line("b")])

    assert (batch.status, counts(batch)) == ("completed", (2, 2, 0))
    assert set(caller.results(batch)) == {text, "b"}


def test_35_a_failed_batch_says_so(caller: Caller) -> None:
    """A failed batch has `failed_at`, `in_progress_at` null, both file ids null, `errors.object ==
    "list"`."""
    failed = caller.run([b'{"custom_id": "a"}'])

    assert failed.status == "failed"
    assert failed.failed_at is not None and failed.failed_at >= failed.created_at
    assert failed.in_progress_at is failed.finalizing_at is failed.completed_at is None
    assert failed.output_file_id is failed.error_file_id is None
    assert failed.errors is not None and failed.errors.object == "list"
    assert failed.expires_at is not None
