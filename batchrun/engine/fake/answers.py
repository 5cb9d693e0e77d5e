"""The OpenAI replies of the fake engine: whole and streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchrun.engine.fake.bodies import Call
from batchrun.engine.fake.text import natural_length_tokens, write_tokens

JsonDict = dict[str, object]
_EMBEDDING_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated answer."""

    index: int
    tokens: tuple[str, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything about one call that its reply needs."""

    reply_id: str
    model: str
    created_at: int
    call: Call
    choices: tuple[Choice, ...]
    num_cached_tokens: int

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)


def generate(call: Call, *, max_model_tokens: int, finish_reason: str | None) -> list[Choice]:
    """All choices of a call, prompt by prompt; `finish_reason` replaces the true one."""
    choices: list[Choice] = []
    for prompt in range(len(call.prompts)):
        room = max_model_tokens - len(call.prompts[prompt])
        for number in range(call.num_choices):
            tokens, reason = _generate_one(call, prompt, number, room)
            choices.append(Choice(len(choices), tokens, finish_reason or reason))
    return choices


def _generate_one(call: Call, prompt: int, number: int, room: int) -> tuple[tuple[str, ...], str]:
    prompt_hash = call.prompt_hash(prompt)
    limit = min(call.max_tokens or room, room)
    natural = limit if call.ignore_eos else natural_length_tokens(prompt_hash)
    num_tokens = min(natural, limit)
    reason = "stop" if natural < limit else "length"
    return tuple(write_tokens(prompt_hash, number, num_tokens)), reason


def whole_reply(answer: Answer) -> JsonDict:
    """The body of a reply that is not streamed."""
    kind = "chat.completion" if answer.call.is_chat else "text_completion"
    choices = [_whole_choice(answer.call, choice) for choice in answer.choices]
    return {**_head(answer, kind), "choices": choices, "usage": usage(answer)}


def chunks(answer: Answer) -> Iterator[JsonDict]:
    """The events of a streamed reply, one per token, in order."""
    kind = "chat.completion.chunk" if answer.call.is_chat else "text_completion"
    head = _head(answer, kind)
    for choice in answer.choices:
        if answer.call.is_chat:
            first = {"role": "assistant", "content": ""}
            yield {**head, "choices": [_chunk_choice(choice.index, "delta", first, None)]}
        for position, token in enumerate(choice.tokens):
            is_last = position == len(choice.tokens) - 1
            reason = choice.finish_reason if is_last else None
            key, value = ("delta", {"content": token}) if answer.call.is_chat else ("text", token)
            yield {**head, "choices": [_chunk_choice(choice.index, key, value, reason)]}
    if answer.call.include_usage:
        yield {**head, "choices": [], "usage": usage(answer)}


def usage(answer: Answer) -> JsonDict:
    """Token counts of the whole call."""
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


def _head(answer: Answer, kind: str) -> JsonDict:
    return {
        "id": answer.reply_id,
        "object": kind,
        "created": answer.created_at,
        "model": answer.model,
    }


def _whole_choice(call: Call, choice: Choice) -> JsonDict:
    text = "".join(choice.tokens)
    content = (
        {"message": {"role": "assistant", "content": text}} if call.is_chat else {"text": text}
    )
    logprobs = _logprobs(call, choice) if call.wants_logprobs else None
    ending = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
    return {"index": choice.index, **content, **ending}


def _chunk_choice(index: int, key: str, value: object, reason: str | None) -> JsonDict:
    return {"index": index, key: value, "logprobs": None, "finish_reason": reason}


def _logprobs(call: Call, choice: Choice) -> JsonDict:
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
