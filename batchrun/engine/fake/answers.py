"""The fake engine's OpenAI calls and replies, and the deterministic tokens and cache behind them.

Refusals are worded as vLLM words them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16
_TOKEN = re.compile(r"\s?\w{1,6}|\s|[^\w\s]")
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor", "kelp", "lagoon")
_MIN_ANSWER_TOKENS = 4
_ANSWER_SPREAD_TOKENS = 28


def tokenize(text: str) -> list[str]:
    """Tokens of a text; joined they give the text again, or nearly so."""
    return _TOKEN.findall(text)


def hash_prompt(tokens: Sequence[str], seed: object = None) -> str:
    """A short hash of a prompt and, if given, of a sampling seed."""
    return hashlib.sha256(repr((list(tokens), seed)).encode("utf-8", "replace")).hexdigest()[:16]


def write_tokens(prompt_hash: str, choice: int, num_tokens: int) -> list[str]:
    """The first `num_tokens` tokens of the answer; a longer answer starts with a shorter one."""
    keys = (f"{prompt_hash}/{choice}/{position}" for position in range(num_tokens))
    draws = (hashlib.sha256(key.encode()).digest()[0] for key in keys)
    words = [f" {_WORDS[draw % len(_WORDS)]}" for draw in draws]
    return [words[0].lstrip(), *words[1:]] if words else []


class PrefixCache:
    """Whole blocks of prompts seen before, found by chained hash; the oldest goes first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, tokens: Sequence[str]) -> int:
        """Count the leading tokens that were cached, then cache the whole prompt.

        As in vLLM the last token is always computed, so a full hit leaves one block out.
        """
        hashes = _block_hashes(tokens)
        usable = hashes[: max(0, len(tokens) - 1) // BLOCK_TOKENS]
        num_hits = next(
            (index for index, key in enumerate(usable) if key not in self._blocks), len(usable)
        )
        for key in reversed(hashes):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity_blocks:
            self._blocks.popitem(last=False)
        return num_hits * BLOCK_TOKENS


def _block_hashes(tokens: Sequence[str]) -> list[bytes]:
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = "\0".join(tokens[start : start + BLOCK_TOKENS])
        parent = hashlib.sha256(parent + block.encode("utf-8", "replace")).digest()
        hashes.append(parent)
    return hashes


_DEFAULT_COMPLETION_TOKENS = 16


class RefusedError(Exception):
    """A request that the engine turns down, with its status and OpenAI error fields."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True, slots=True)
class FakeCall:
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


def parse_body(raw: bytes, model: str) -> dict[str, object]:
    """The body as an object. Raises RefusedError, with 404 where it asks for another model."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"1 validation error:\n  JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError("1 validation error:\n  Input should be a valid dictionary")
    asked = body.get("model", model)
    if asked != model:
        raise RefusedError(f"The model `{asked}` does not exist.", status=404, param="model")
    return body


def parse_call(body: Mapping[str, object], *, is_chat: bool, max_model_tokens: int) -> FakeCall:
    """A chat or completion body. Raises RefusedError."""
    prompts = (_chat_prompt(body),) if is_chat else parse_prompts(body, "prompt")
    longest = max(map(len, prompts))
    if longest >= max_model_tokens:
        raise RefusedError(
            f"This model's maximum context length is {max_model_tokens} tokens. However, your "
            f"prompt contains {longest} tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    num_choices = _positive(body, "n") or 1
    if num_choices > 1 and body.get("temperature") == 0:
        raise RefusedError(f"n must be 1 when using greedy sampling, got {num_choices}.")
    default_tokens = None if is_chat else _DEFAULT_COMPLETION_TOKENS
    options = body.get("stream_options")
    return FakeCall(
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


def parse_prompts(body: Mapping[str, object], key: str) -> tuple[tuple[str, ...], ...]:
    """The texts under a key, or lists of numbers of tokens, as tokens. Raises RefusedError."""
    prompt = body.get(key)
    if isinstance(prompt, str) and prompt:
        return (tuple(tokenize(prompt)),)
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return (tuple(str(token) for token in prompt),)
        return tuple(tokens for item in prompt for tokens in parse_prompts({key: item}, key))
    raise RefusedError(f"Either {key} must be provided and non-empty.", param=key)


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


def _positive(body: Mapping[str, object], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise RefusedError(f"{key} must be at least 1, got {value}.", param=key)
    return value


JsonDict = dict[str, object]
_EMBEDDING_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated answer."""

    index: int
    tokens: tuple[str, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """Everything about one call that its reply needs; `head` is what each of its parts repeats."""

    head: JsonDict
    call: FakeCall
    choices: Sequence[Choice]
    num_cached_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)


def generate(call: FakeCall, *, max_model_tokens: int, finish_reason: str | None) -> list[Choice]:
    """All choices of a call, prompt by prompt; `finish_reason` replaces the true one."""
    choices: list[Choice] = []
    for prompt in call.prompts:
        prompt_hash = hash_prompt(prompt, call.seed)
        room = max_model_tokens - len(prompt)
        limit = min(call.max_tokens or room, room)
        natural = _MIN_ANSWER_TOKENS + int(prompt_hash[:8], 16) % _ANSWER_SPREAD_TOKENS
        num_tokens = limit if call.ignore_eos else min(natural, limit)
        reason = finish_reason or ("stop" if num_tokens < limit else "length")
        for number in range(call.num_choices):
            tokens = tuple(write_tokens(prompt_hash, number, num_tokens))
            choices.append(Choice(len(choices), tokens, reason))
    return choices


def whole_reply(answer: FakeAnswer) -> JsonDict:
    """The body of a reply that is not streamed."""
    kind = "chat.completion" if answer.call.is_chat else "text_completion"
    choices = [_whole_choice(answer.call, choice) for choice in answer.choices]
    return {**answer.head, "object": kind, "choices": choices, "usage": usage(answer)}


def chunks(answer: FakeAnswer) -> Iterator[JsonDict]:
    """The events of a streamed reply, one per token, in order."""
    kind = "chat.completion.chunk" if answer.call.is_chat else "text_completion"
    head = {**answer.head, "object": kind}
    for choice in answer.choices:
        if answer.call.is_chat:
            delta = {"delta": {"role": "assistant", "content": ""}}
            yield {**head, "choices": [_choice_object(choice.index, delta, None, None)]}
        for position, token in enumerate(choice.tokens):
            is_last = position == len(choice.tokens) - 1
            reason = choice.finish_reason if is_last else None
            text = {"delta": {"content": token}} if answer.call.is_chat else {"text": token}
            yield {**head, "choices": [_choice_object(choice.index, text, None, reason)]}
    if answer.call.include_usage:
        yield {**head, "choices": [], "usage": usage(answer)}


def usage(answer: FakeAnswer) -> JsonDict:
    num_prompt_tokens = sum(len(prompt) for prompt in answer.call.prompts)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": answer.num_output_tokens,
        "total_tokens": num_prompt_tokens + answer.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }


def embeddings_reply(inputs: Sequence[Sequence[str]], *, reply_id: str, model: str) -> JsonDict:
    """A deterministic vector for each input."""
    num_tokens = sum(len(tokens) for tokens in inputs)
    data = [
        {"object": "embedding", "index": index, "embedding": _embed(tokens)}
        for index, tokens in enumerate(inputs)
    ]
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"id": reply_id, "object": "list", "model": model, "data": data, "usage": counts}


def _whole_choice(call: FakeCall, choice: Choice) -> JsonDict:
    text = "".join(choice.tokens)
    message = {"message": {"role": "assistant", "content": text}}
    logprobs = _logprobs(call, choice) if call.wants_logprobs else None
    content = message if call.is_chat else {"text": text}
    return _choice_object(choice.index, content, logprobs, choice.finish_reason)


def _choice_object(
    index: int, content: Mapping[str, object], logprobs: JsonDict | None, reason: str | None
) -> JsonDict:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(call: FakeCall, choice: Choice) -> JsonDict:
    if call.is_chat:
        entries = [
            {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}
            for token in choice.tokens
        ]
        return {"content": entries}
    return {"tokens": list(choice.tokens), "token_logprobs": [-0.5] * len(choice.tokens)}


def _embed(tokens: Sequence[str]) -> list[float]:
    digest = hashlib.sha256("\0".join(tokens).encode("utf-8", "replace")).digest()
    return [byte / 255 - 0.5 for byte in digest[:_EMBEDDING_DIMENSIONS]]
