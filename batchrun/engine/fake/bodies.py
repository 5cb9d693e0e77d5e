"""Reading the OpenAI bodies the fake engine is sent; refusals are worded as vLLM words them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from batchrun.engine.fake.text import hash_prompt, tokenize

_DEFAULT_COMPLETION_TOKENS = 16


class RefusedError(Exception):
    """A request that the engine turns down, with its status and OpenAI error fields."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True, slots=True)
class Call:
    """One generation call, checked. `max_tokens` is None when only the model's length bounds it."""

    is_chat: bool
    prompts: tuple[tuple[str, ...], ...]
    max_tokens: int | None
    num_choices: int
    seed: object
    ignore_eos: bool
    wants_logprobs: bool
    stream: bool
    include_usage: bool

    def prompt_hash(self, prompt: int) -> str:
        """The hash from which the answer to one of the prompts derives."""
        return hash_prompt(self.prompts[prompt], self.seed)


def parse_json(raw: bytes) -> dict[str, object]:
    """The body as an object. Raises RefusedError."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"1 validation error:\n  JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError("1 validation error:\n  Input should be a valid dictionary")
    return body


def check_model(body: Mapping[str, object], model: str) -> None:
    """Raises RefusedError (404) when the body asks for another model."""
    asked = body.get("model", model)
    if asked != model:
        raise RefusedError(f"The model `{asked}` does not exist.", status=404, param="model")


def parse_call(body: Mapping[str, object], *, is_chat: bool, max_model_tokens: int) -> Call:
    """A chat or completion body. Raises RefusedError."""
    prompts = (_chat_prompt(body),) if is_chat else _completion_prompts(body.get("prompt"))
    for prompt in prompts:
        _check_length(prompt, max_model_tokens)
    num_choices = _positive(body, "n") or 1
    if num_choices > 1 and body.get("temperature") == 0:
        raise RefusedError(f"n must be 1 when using greedy sampling, got {num_choices}.")
    default_tokens = None if is_chat else _DEFAULT_COMPLETION_TOKENS
    options = body.get("stream_options")
    return Call(
        is_chat=is_chat,
        prompts=prompts,
        max_tokens=_positive(body, "max_completion_tokens")
        or _positive(body, "max_tokens")
        or default_tokens,
        num_choices=num_choices,
        seed=body.get("seed"),
        ignore_eos=body.get("ignore_eos") is True,
        wants_logprobs=not (body.get("logprobs") is None or body.get("logprobs") is False),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def parse_inputs(body: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """The inputs of an embeddings body, as tokens. Raises RefusedError."""
    return _completion_prompts(body.get("input"), param="input")


def _chat_prompt(body: Mapping[str, object]) -> tuple[str, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RefusedError(
            "1 validation error:\n  'body.messages': Input should be a valid list",
            param="body.messages",
        )
    if not messages:
        raise RefusedError("Cannot apply chat template to an empty conversation.")
    parts: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RefusedError("1 validation error:\n  'role': Field required", param="messages")
        parts += [f"<{message['role']}>", *tokenize(_content_text(message.get("content")))]
    return (*parts, "<assistant>")


def _content_text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return " ".join(str(part.get("text") or json.dumps(part)) for part in content)
    raise RefusedError("1 validation error:\n  'content': Input should be a string or a list")


def _completion_prompts(prompt: object, param: str = "prompt") -> tuple[tuple[str, ...], ...]:
    if isinstance(prompt, str) and prompt:
        return (tuple(tokenize(prompt)),)
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return (tuple(str(token) for token in prompt),)
        return tuple(tokens for item in prompt for tokens in _completion_prompts(item, param))
    raise RefusedError(f"Either {param} must be provided and non-empty.", param=param)


def _check_length(prompt: tuple[str, ...], max_model_tokens: int) -> None:
    if len(prompt) >= max_model_tokens:
        raise RefusedError(
            f"This model's maximum context length is {max_model_tokens} tokens. However, your "
            f"prompt contains {len(prompt)} tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
        )


def _positive(body: Mapping[str, object], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise RefusedError(f"{key} must be at least 1, got {value}.", param=key)
    return value
