"""What `request` may hold, against what is written and against what vLLM takes."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from batchrun.jobs.request_fields import FIELDS, field_problems

CHAT = "/v1/chat/completions"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@pytest.mark.parametrize(
    ("request_fields", "key", "said"),
    [
        ({"max_token": 5}, "request.max_token", "no such field (did you mean 'max_tokens'?)"),
        ({"temprature": 0}, "request.temprature", "(did you mean 'temperature'?)"),
        ({"extra_body": {"top_k": 4}}, "request.extra_body", "an argument of OpenAI's client, not"),
        ({"timeout": 4}, "request.timeout", "an argument of OpenAI's client, not"),
        ({"max_tokens": 0}, "request.max_tokens", "a whole number from 1 on (got 0)"),
        ({"max_tokens": "20"}, "request.max_tokens", "a whole number from 1 on (got '20')"),
        ({"n": True}, "request.n", "a whole number from 1 on (got True)"),
        ({"temperature": 3}, "request.temperature", "a number from 0 to 2 (got 3)"),
        ({"top_p": -0.1}, "request.top_p", "a number from 0 to 1 (got -0.1)"),
        ({"min_tokens": 9, "max_tokens": 4}, "request.min_tokens", "more than max_tokens (9 and 4"),
        ({"response_format": "json"}, "request.response_format", "must be {type: json_object} or"),
        (
            {"response_format": {"type": "json_shema"}},
            "request.response_format.type",
            "(did you mean 'json_schema'?)",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {}}},
            "request.response_format.json_schema",
            "must hold a name and a schema",
        ),
        ({"tools": TOOL}, "request.tools", "must be a list of tools"),
        ({"tools": [{"name": "x"}]}, "request.tools[0]", "must be {type: function"),
        (
            {"tools": [TOOL, {"type": "function", "function": {}}]},
            "request.tools[1].function",
            "must hold the name",
        ),
    ],
)
def test_a_wrong_field_is_named(request_fields: dict[str, Any], key: str, said: str) -> None:
    ((found, text),) = field_problems(CHAT, request_fields)

    assert found == key
    assert said in text


def test_right_fields_templates_and_those_of_other_engines_pass() -> None:
    schema = {"name": "label", "schema": {"type": "object"}}
    right: dict[str, Any] = {
        "max_tokens": "{{ n }}",
        "temperature": 0,
        "top_p": 1,
        "tools": [TOOL],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "seed": None,
        "regex_of_another_engine": "a+",
    }

    assert list(field_problems(CHAT, right)) == []


def test_templates_within_a_field_pass() -> None:
    tools = ["{{ tool }}", {"type": "function", "function": "{{ text | fromjson }}"}]
    schemas = ["{{ form }}", {"name": "x", "schema": "{{ schema }}"}]
    forms = [{"type": "json_schema", "json_schema": each} for each in schemas]

    for form in ({"type": "{{ kind }}"}, *forms):
        request: dict[str, Any] = {"tools": tools, "response_format": form}
        assert list(field_problems(CHAT, request)) == []


@pytest.mark.parametrize(
    ("endpoint", "module", "name"),
    [
        (CHAT, "openai/chat_completion", "ChatCompletionRequest"),
        ("/v1/completions", "openai/completion", "CompletionRequest"),
        ("/v1/responses", "openai/responses", "ResponsesRequest"),
    ],
)
def test_every_field_that_vllm_reads_is_known(endpoint: str, module: str, name: str) -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    path = Path(found.origin).parent / "entrypoints" / module / "protocol.py"
    classes = [each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ClassDef)]
    (request,) = (each for each in classes if each.name == name)
    fields = {
        each.target.id
        for each in request.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    ours = {"model", "stream", "stream_options", "priority"}

    assert {each for each in fields if not each.startswith("_")} - ours - FIELDS[endpoint] == set()
