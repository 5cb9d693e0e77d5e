"""Result files: checks 42, 43 and 47 to 49 of the API's specification."""

from __future__ import annotations

import re
from collections.abc import Iterator

import openai
import pytest
from batch_rig import (
    CHAT,
    COMPLETIONS,
    DAY_S,
    EMBEDDINGS,
    ENVELOPE,
    MODEL,
    REFUSED,
    RESPONSES,
    THOUGHTFUL,
    Caller,
    Line,
    chat_line,
    chat_lines,
    connect,
    counts,
)
from deployment_rig import DeploymentRig
from engine_builders import REAL_MODEL
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

LINE_KEYS = {"id", "custom_id", "response", "error"}
PREFIX = "Of the harbour, its boats and the storm that came in at night. " * 20
TYPES: dict[str, type[ChatCompletion | Completion | CreateEmbeddingResponse | Response]] = {
    CHAT: ChatCompletion,
    COMPLETIONS: Completion,
    EMBEDDINGS: CreateEmbeddingResponse,
    RESPONSES: Response,
}
TOO_LONG = "word " * 9_000


@pytest.fixture(scope="session")
def vllm_rig(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DeploymentRig]:
    """A deployment of the real vLLM."""
    engine = request.getfixturevalue("vllm_engine")
    made = DeploymentRig(tmp_path_factory.mktemp("batches-on-vllm"))
    made.configure({"attach": engine.base_url, "priority": True})
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.fixture(params=["sync", "async"])
def vllm_caller(vllm_rig: DeploymentRig, request: pytest.FixtureRequest) -> Iterator[Caller]:
    """A caller of that deployment, with the sync client and with the async one."""
    with connect(vllm_rig.port, request.param) as made:
        yield made


def line_for(endpoint: str, number: int, model: str) -> Line:
    """A good line for an endpoint."""
    text = f"{PREFIX} Question {number}"
    bodies: dict[str, dict[str, object]] = {
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 8},
        COMPLETIONS: {"prompt": text, "max_tokens": 8},
        EMBEDDINGS: {"input": text},
        RESPONSES: {"input": text, "max_output_tokens": 8},
    }
    body = {"model": model, **bodies[endpoint]}
    return {"custom_id": f"row-{number}", "method": "POST", "url": endpoint, "body": body}


def check_output_lines(caller: Caller, endpoint: str, model: str) -> None:
    """Run a batch, whose output lines are whole and whose usage is their sum."""
    lines = [line_for(endpoint, i, model) for i in range(6)]

    batch = caller.run(lines, endpoint=endpoint)

    assert (batch.status, batch.model, counts(batch)) == ("completed", model, (6, 6, 0))
    found = caller.lines(batch.output_file_id)
    assert {line["custom_id"] for line in found} == {line["custom_id"] for line in lines}
    assert len({line["id"] for line in found}) == 6
    for line in found:
        assert set(line) == LINE_KEYS
        assert re.fullmatch(r"batch_req_[0-9a-f]{32}", line["id"])
        assert line["error"] is None
        assert set(line["response"]) == {"status_code", "request_id", "body"}
        assert line["response"]["status_code"] == 200
        assert isinstance(line["response"]["request_id"], str) and line["response"]["request_id"]
        assert TYPES[endpoint].model_validate(line["response"]["body"]).model == model
    usages = [line["response"]["body"]["usage"] for line in found]
    assert batch.usage is not None
    key = "input_tokens" if endpoint == RESPONSES else "prompt_tokens"
    assert batch.usage.input_tokens == sum(usage[key] for usage in usages) > 0
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)


def check_error_line(caller: Caller, text: str, model: str) -> None:
    """Run a batch of one request, which the engine refuses."""
    batch = caller.run([chat_line("a", text, model=model)])

    assert (batch.status, counts(batch)) == ("completed", (1, 0, 1))
    (line,) = caller.lines(batch.error_file_id)
    assert set(line) == LINE_KEYS
    assert re.fullmatch(r"batch_req_[0-9a-f]{32}", line["id"])
    assert (line["custom_id"], line["error"]) == ("a", None)
    assert line["response"]["status_code"] == 400
    assert set(line["response"]["body"]["error"]) == ENVELOPE
    assert line["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("text", [REFUSED, TOO_LONG], ids=["scripted", "too long"])
def test_42_an_error_of_the_engine_is_a_response(caller: Caller, text: str) -> None:
    """Error line for HTTP 400: `response.status_code` 400, `response.body.error` has four keys,
    top-level `error` is null."""
    check_error_line(caller, text, MODEL)


@pytest.mark.engine
@pytest.mark.slow
def test_42_an_error_of_vllm_is_a_response(vllm_caller: Caller) -> None:
    """Error line for HTTP 400: `response.status_code` 400, `response.body.error` has four keys,
    top-level `error` is null."""
    check_error_line(vllm_caller, TOO_LONG, REAL_MODEL)


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, EMBEDDINGS])
def test_43_an_answer_is_what_its_endpoint_returns(caller: Caller, endpoint: str) -> None:
    """Output line: four keys, `id` starts `batch_req_` and is unique, `body` is a dict and parses
    with the client's own response type."""
    check_output_lines(caller, endpoint, MODEL)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
def test_43_an_answer_is_what_vllm_returns(vllm_caller: Caller, endpoint: str) -> None:
    """Output line: `body` is a dict and parses with the client's own response type."""
    check_output_lines(vllm_caller, endpoint, REAL_MODEL)


def check_usage(caller: Caller, lines: list[Line]) -> None:
    """Run a batch, whose usage is the sum of its answers' in every part."""
    batch = caller.run(lines)

    bodies = [line["response"]["body"] for line in caller.lines(batch.output_file_id)]
    usages = [ChatCompletion.model_validate(body).usage for body in bodies]
    sums = [0] * 5
    for usage in usages:
        assert usage is not None
        prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
        parts = (
            usage.prompt_tokens,
            (prompt and prompt.cached_tokens) or 0,
            usage.completion_tokens,
            (completion and completion.reasoning_tokens) or 0,
            usage.total_tokens,
        )
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    found = batch.usage
    assert found is not None
    assert sums == [
        found.input_tokens,
        found.input_tokens_details.cached_tokens,
        found.output_tokens,
        found.output_tokens_details.reasoning_tokens,
        found.total_tokens,
    ]
    assert found.total_tokens == found.input_tokens + found.output_tokens
    assert found.input_tokens_details.cached_tokens > 0


def test_47_usage_is_the_sum(caller: Caller) -> None:
    """`usage` equals the sum of body usages; `total_tokens` = input + output; cached and reasoning
    details are mapped."""
    lines = [line_for(CHAT, i, MODEL) for i in range(8)]
    check_usage(caller, [*lines, *chat_lines(2, THOUGHTFUL), *chat_lines(2, REFUSED)])


@pytest.mark.engine
@pytest.mark.slow
def test_47_usage_is_the_sum_on_vllm(vllm_caller: Caller) -> None:
    """`usage` equals the sum of body usages; `total_tokens` = input + output."""
    check_usage(vllm_caller, [line_for(CHAT, i, REAL_MODEL) for i in range(8)])


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
