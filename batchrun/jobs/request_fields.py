"""What `request` may hold: fields that engines know, ranges, the shapes of tools and answers.

A field that is like none of these goes through as it is: an engine may know more than we do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from batchrun.errors import suggestion
from batchrun.jobs.prompts.templating import is_template

_SAMPLING = """
    frequency_penalty ignore_eos include_stop_str_in_output logit_bias presence_penalty
    repetition_penalty seed skip_special_tokens stop stop_token_ids structured_outputs temperature
    min_p top_k top_p cache_salt kv_transfer_params ec_transfer_params mm_payload request_id
    return_mm_kwargs session_id user vllm_xargs watermarking
"""
_GENERATION = """
    add_special_tokens allowed_token_ids bad_words echo length_penalty logprob_token_ids logprobs
    max_tokens min_tokens n prompt_logprobs repetition_detection response_format
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start
    spaces_between_special_tokens stream_interval thinking_token_budget truncate_prompt_tokens
    truncation_side use_beam_search
"""
_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
    include_reasoning max_completion_tokens media_io_kwargs messages metadata mm_processor_kwargs
    parallel_tool_calls reasoning_effort return_prompt_text service_tier store tool_choice tools
    top_logprobs
"""
_RESPONSES = """
    background chat_template_kwargs enable_response_messages include include_reasoning input
    instructions max_output_tokens max_tool_calls media_io_kwargs metadata mm_processor_kwargs
    parallel_tool_calls previous_input_messages previous_response_id prompt prompt_cache_key
    reasoning service_tier store text tool_choice tools top_logprobs truncation
"""
_EMBEDDINGS = """
    add_special_tokens cache_salt dimensions embed_dtype encoding_format endianness input
    mm_processor_kwargs padding request_id truncate_prompt_tokens truncation_side use_activation
    user
"""
FIELDS: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset((_SAMPLING + _GENERATION + _CHAT).split()),
    "/v1/completions": frozenset(
        (_SAMPLING + _GENERATION + " best_of prompt prompt_embeds suffix").split()
    ),
    "/v1/responses": frozenset((_SAMPLING + _RESPONSES).split()),
    "/v1/embeddings": frozenset(_EMBEDDINGS.split()),
}
"""The fields of vLLM 0.32's requests, and those of OpenAI's, by endpoint."""

_WHOLE = {
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "max_output_tokens": 1,
    "min_tokens": 0,
    "n": 1,
    "top_logprobs": 0,
    "dimensions": 1,
}
"""Fields that hold a whole number, and the least of them."""
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
}
IMPOSSIBLE = {
    "background": "is not possible: a job waits for each answer",
    "use_beam_search": "is not possible: vLLM asks for each token anew, as calls before others",
}
CLIENT_ARGUMENTS = frozenset({"extra_body", "extra_headers", "extra_query", "timeout"})
FORMATS = ("text", "json_object", "json_schema", "structural_tag")

Problem = tuple[str, str]


def field_problems(endpoint: str, request: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """(dotted key, what is wrong) of the fields of a request; what is a template is left alone."""
    known = FIELDS[endpoint]
    for name, value in request.items():
        here = f"request.{name}"
        if name in CLIENT_ARGUMENTS:
            yield here, "an argument of OpenAI's client, not a field; write fields without it"
        elif name not in known:
            if hint := suggestion(name, known):
                yield here, f"{endpoint} has no such field{hint}"
        elif not _is_open(value):
            yield from _value_problems(here, name, value)
    least, most = request.get("min_tokens"), request.get("max_tokens")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield "request.min_tokens", f"is more than max_tokens ({least} and {most})"


def _is_open(value: JsonValue) -> bool:
    """Whether it is a template: rows tell what it stands for."""
    return isinstance(value, str) and is_template(value)


def _value_problems(here: str, name: str, value: JsonValue) -> Iterator[Problem]:
    if value is None:
        return
    if name in _WHOLE:
        if not isinstance(value, int) or isinstance(value, bool) or value < _WHOLE[name]:
            yield here, f"must be a whole number from {_WHOLE[name]} on (got {_shown(value)})"
    elif name in _RANGES:
        low, high = _RANGES[name]
        number = (
            math.nan if isinstance(value, bool) or not isinstance(value, int | float) else value
        )
        if not low <= number <= high:
            bounds = f"from {low:g} to {high:g}" if high < math.inf else f"from {low:g} on"
            yield here, f"must be a number {bounds} (got {_shown(value)})"
    elif name == "response_format":
        yield from _format_problems(here, value)
    elif name == "tools":
        yield from _tool_problems(here, value)


def _format_problems(here: str, value: JsonValue) -> Iterator[Problem]:
    if not isinstance(value, dict) or "type" not in value:
        yield here, "must be {type: json_object} or {type: json_schema, json_schema: {...}}"
        return
    kind = value["type"]
    if kind not in FORMATS and not _is_open(kind):
        hint = suggestion(str(kind), FORMATS)
        yield f"{here}.type", f"must be one of {', '.join(FORMATS)}, not {_shown(kind)}{hint}"
    elif kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else inner
        if not isinstance(schema, dict) and not _is_open(schema):
            yield f"{here}.json_schema", "must hold a name and a schema: {name: x, schema: {...}}"
        elif isinstance(inner, dict) and not isinstance(inner.get("name"), str):
            yield f"{here}.json_schema.name", "is required and must be text"


def _tool_problems(here: str, value: JsonValue) -> Iterator[Problem]:
    if not isinstance(value, list) or not value:
        yield here, "must be a list of tools, each {type: function, function: {name: ...}}"
        return
    for index, tool in enumerate(value):
        if _is_open(tool):
            continue
        if not isinstance(tool, dict) or tool.get("type") is None:
            yield f"{here}[{index}]", "must be {type: function, function: {name: ...}}"
        elif tool["type"] == "function" and not _is_named(tool.get("function", tool)):
            yield f"{here}[{index}].function", "must hold the name of the function"


def _is_named(function: JsonValue) -> bool:
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) or _is_open(function)


def _shown(value: JsonValue) -> str:
    return f"{value!r:.60}"
