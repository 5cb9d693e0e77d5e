"""What holds for the results of any batch, whatever its engine is."""

from __future__ import annotations

import re

from batch_rig import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENVELOPE,
    RESPONSES,
    Caller,
    Line,
    chat_line,
    counts,
)
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
