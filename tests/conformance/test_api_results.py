"""Result files: checks 42, 43 and 47 to 49 of the API's specification."""

from __future__ import annotations

import openai
import pytest
from batch_checks import TOO_LONG, check_error_line, check_output_lines, check_usage, line_for
from batch_rig import (
    CHAT,
    COMPLETIONS,
    DAY_S,
    EMBEDDINGS,
    MODEL,
    REFUSED,
    THOUGHTFUL,
    Caller,
    chat_line,
    chat_lines,
)


@pytest.mark.parametrize("text", [REFUSED, TOO_LONG], ids=["scripted", "too long"])
def test_42_an_error_of_the_engine_is_a_response(caller: Caller, text: str) -> None:
    """Error line for HTTP 400: `response.status_code` 400, `response.body.error` has four keys,
    top-level `error` is null."""
    check_error_line(caller, text, MODEL)


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, EMBEDDINGS])
def test_43_an_answer_is_what_its_endpoint_returns(caller: Caller, endpoint: str) -> None:
    """Output line: four keys, `id` starts `batch_req_` and is unique, `body` is a dict and parses
    with the client's own response type."""
    check_output_lines(caller, endpoint, MODEL)


def test_47_usage_is_the_sum(caller: Caller) -> None:
    """`usage` equals the sum of body usages; `total_tokens` = input + output; cached and reasoning
    details are mapped."""
    lines = [line_for(CHAT, i, MODEL) for i in range(8)]
    check_usage(caller, [*lines, *chat_lines(2, THOUGHTFUL), *chat_lines(2, REFUSED)])


@pytest.mark.parametrize("life_s", [None, 3_600, 2_592_000])
def test_48_results_are_files(caller: Caller, life_s: int | None) -> None:
    """Result files: purpose `batch_output`, listed by `files.list`, default expiry 30 days;
    `output_expires_after` counts from the file's own `created_at`."""
    expiry = {"anchor": "created_at", "seconds": life_s}
    changes = {} if life_s is None else {"output_expires_after": expiry}

    batch = caller.run([chat_line("a"), chat_line("b", REFUSED)], **changes)

    listed = {file.id: file for file in caller.files.list(purpose="batch_output")}
    for file_id, name in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
        assert file_id is not None
        file = caller.files.retrieve(file_id)
        assert file == listed[file_id]
        assert (file.purpose, file.status) == ("batch_output", "processed")
        assert file.filename == f"{batch.id}_{name}.jsonl"
        assert file.bytes == len(caller.files.content(file_id).content)
        assert file.created_at >= batch.created_at
        assert file.expires_at == file.created_at + (life_s or 30 * DAY_S)


@pytest.mark.parametrize(
    ("seconds", "code"),
    [(3_599, "integer_below_min_value"), (2_592_001, "integer_above_max_value")],
)
def test_48_an_expiry_out_of_bounds_is_refused(caller: Caller, seconds: int, code: str) -> None:
    """`output_expires_after` has the bounds of `expires_after`."""
    expiry = {"anchor": "created_at", "seconds": seconds}
    with pytest.raises(openai.BadRequestError) as refused:
        caller.create([chat_line("a")], output_expires_after=expiry)
    assert (refused.value.code, refused.value.param) == (code, "output_expires_after.seconds")


def test_49_a_batch_outlives_its_output(caller: Caller) -> None:
    """Deleting an output file leaves the batch readable; its content is 404."""
    batch = caller.run([chat_line("a")])
    assert batch.output_file_id is not None

    caller.files.delete(batch.output_file_id)

    assert caller.batches.retrieve(batch.id) == batch
    with pytest.raises(openai.NotFoundError):
        caller.files.content(batch.output_file_id)
    listed = {file.id for file in caller.files.list(purpose="batch_output")}
    assert batch.output_file_id not in listed
