"""The answer within an engine's reply."""

from __future__ import annotations

import json

import pytest

from batchrun.jobs.results.output_file import error_text, response_text
from batchrun.types import RowError

CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("endpoint", "reply", "text"),
    [
        ("/v1/chat/completions", {"choices": [{"message": {"content": "hi"}}, {}]}, "hi"),
        ("/v1/chat/completions", {"choices": [{"message": {"content": ""}}]}, ""),
        (
            "/v1/chat/completions",
            {"choices": [{"message": {"content": "\n\n", "tool_calls": CALLS}}]},
            json.dumps(CALLS),
        ),
        ("/v1/completions", {"choices": [{"text": " there"}]}, " there"),
        ("/v1/embeddings", {"data": [{"embedding": [0.5, 1]}]}, "[0.5, 1]"),
        ("/v1/embeddings", {"data": [{"embedding": [1]}, {"embedding": [2]}]}, "[[1], [2]]"),
        (
            "/v1/responses",
            {
                "output": [
                    {"type": "reasoning", "content": []},
                    {"type": "message", "content": [{"type": "output_text", "text": "yes"}]},
                ]
            },
            "yes",
        ),
        (
            "/v1/responses",
            {
                "output": [
                    {"type": "message", "content": [{"type": "output_text", "text": "I look."}]},
                    {"type": "function_call", "name": "f"},
                ]
            },
            '[{"type": "function_call", "name": "f"}]',
        ),
        ("/v1/chat/completions", {"choices": []}, None),
        ("/v1/completions", {}, None),
        ("/v1/embeddings", {"data": []}, None),
        ("/v1/responses", {"output": None}, None),
        ("/v1/responses", [], None),
    ],
)
def test_the_text_of_choice_0_is_the_response(endpoint: str, reply: object, text: str) -> None:
    assert response_text(endpoint, json.dumps(reply).encode()) == text


def test_a_reply_that_is_no_json_has_no_text() -> None:
    assert response_text("/v1/completions", b"<html>") is None


def test_an_error_is_json_and_no_error_is_null() -> None:
    assert error_text(None) is None
    assert json.loads(error_text(RowError("x", "ä", 400)) or "") == {
        "code": "x", "message": "ä", "status_code": 400
    }  # fmt: skip
