"""One suite over the fake engine and the real vLLM: what batchrun may rely on in either."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest
import pytest_asyncio
from engine_builders import CHAT, COMPLETION, FAKE_MODEL, REAL_MODEL, make_request

from batchrun.engine.client import EngineClient
from batchrun.engine.command import ManagedSettings
from batchrun.types import Outcome, OutcomeKind

LONG_TEXT = "The harbour master counted the boats before the storm came in. " * 60
RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} ([\d.]+)", re.MULTILINE)


@dataclass
class Target:
    """An engine under test and the model it serves."""

    client: EngineClient
    model: str

    async def chat(self, text: str = "Tell me of the sea.", **fields: object) -> Outcome:
        """One greedy chat call."""
        messages = [{"role": "user", "content": text}]
        return await self.call(CHAT, messages=messages, **{"max_tokens": 8, **fields})

    async def complete(self, text: str = "The sea is", **fields: object) -> Outcome:
        """One greedy completion call."""
        return await self.call(COMPLETION, prompt=text, **{"max_tokens": 8, **fields})

    async def call(self, endpoint: str, **fields: object) -> Outcome:
        """One call of any body."""
        body = {"model": self.model, "temperature": 0, **fields}
        return await self.client.execute(make_request(endpoint, body))

    async def stream(self, endpoint: str, **fields: object) -> list[str]:
        """The events of one streamed call, as text."""
        body = {"model": self.model, "temperature": 0, "stream": True, "max_tokens": 4, **fields}
        url = self.client.base_url + endpoint
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).splitlines()
        return [line.removeprefix("data: ") for line in lines if line]

    async def num_running(self) -> int:
        """How many requests the engine says it is working on."""
        url = f"{self.client.base_url}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            found = RUNNING.search(await response.text())
        assert found is not None
        return int(float(found[1]))

    async def wait_until_running(self, count: int) -> None:
        """Returns when the engine works on exactly so many requests."""
        while True:
            if await self.num_running() == count:
                return
            await asyncio.sleep(0.02)


@pytest.fixture(params=["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def settings(request: pytest.FixtureRequest) -> ManagedSettings:
    """A running engine of either kind."""
    name = "vllm_engine" if request.param == "vllm" else "shared_fake_engine"
    found: ManagedSettings = request.getfixturevalue(name)
    return found


@pytest_asyncio.fixture
async def target(settings: ManagedSettings) -> AsyncIterator[Target]:
    """A client of the running engine."""
    client = EngineClient(settings.base_url)
    yield Target(client, REAL_MODEL if settings.name == "vllm" else FAKE_MODEL)
    await client.close()


def document(outcome: Outcome) -> dict[str, list[dict[str, object]]]:
    """The reply of a call that went well."""
    assert outcome.kind is OutcomeKind.OK, outcome.error
    assert outcome.body is not None
    parsed: dict[str, list[dict[str, object]]] = json.loads(outcome.body)
    return parsed


async def test_the_engine_is_healthy_and_lists_its_model(target: Target) -> None:
    assert await target.client.is_healthy()
    assert await target.client.models() == (target.model,)


async def test_the_engine_tells_what_its_kv_holds(target: Target) -> None:
    kv = await target.client.kv_config()
    assert kv is not None
    assert kv.is_prefix_caching_on
    assert kv.block_tokens >= 16 and kv.num_tokens and kv.num_tokens % kv.block_tokens == 0


async def test_a_chat_call_is_answered_by_the_assistant(target: Target) -> None:
    choice = document(await target.chat())["choices"][0]
    message = choice["message"]
    assert isinstance(message, dict)
    assert message["role"] == "assistant"
    assert message["content"]


async def test_a_completion_call_is_answered_with_text(target: Target) -> None:
    assert document(await target.complete())["choices"][0]["text"]


@pytest.mark.parametrize("max_tokens", [1, 3, 40])
async def test_max_tokens_is_respected_when_eos_is_ignored(target: Target, max_tokens: int) -> None:
    outcome = await target.complete(max_tokens=max_tokens, ignore_eos=True)
    assert outcome.finish_reason == "length"
    assert outcome.usage.num_output_tokens == max_tokens


async def test_usage_counts_the_prompt(target: Target) -> None:
    short = await target.complete("One.")
    long = await target.complete(LONG_TEXT)
    assert 0 < short.usage.num_prompt_tokens < long.usage.num_prompt_tokens


async def test_greedy_answers_repeat(target: Target) -> None:
    outcomes = [await target.chat(max_tokens=24, ignore_eos=True) for _ in range(2)]
    first, second = (document(outcome)["choices"][0]["message"] for outcome in outcomes)
    assert first == second


async def test_different_prompts_get_different_answers(target: Target) -> None:
    texts = {
        str(document(await target.complete(prompt, max_tokens=16))["choices"][0]["text"])
        for prompt in ("The sea is", "Once upon a time a fox", "Numbers: 1 2 3")
    }
    assert len(texts) == 3


async def test_an_unknown_model_is_the_jobs_fault(target: Target) -> None:
    outcome = await target.chat(model="no-such-model")
    assert outcome.kind is OutcomeKind.JOB_ERROR
    assert outcome.error is not None
    assert "no-such-model" in outcome.error.message


async def test_an_unknown_path_is_the_jobs_fault(target: Target) -> None:
    outcome = await target.call("/v1/nothing-here")
    assert outcome.kind is OutcomeKind.JOB_ERROR


@pytest.mark.parametrize("messages", ["hello", [], [{"content": "no role"}], None])
async def test_malformed_messages_are_the_rows_fault(target: Target, messages: object) -> None:
    outcome = await target.call(CHAT, messages=messages, max_tokens=2)
    assert outcome.kind is OutcomeKind.ROW_ERROR
    assert outcome.error is not None
    assert outcome.error.status_code == 400
    assert outcome.error.message and "\n" not in outcome.error.message


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": -1}, {"n": 2}])
async def test_impossible_limits_are_the_rows_fault(
    target: Target, fields: dict[str, object]
) -> None:
    assert (await target.chat("Count.", **fields)).kind is OutcomeKind.ROW_ERROR


async def test_a_prompt_longer_than_the_model_is_the_rows_fault(target: Target) -> None:
    outcome = await target.complete(LONG_TEXT * 40)
    assert outcome.kind is OutcomeKind.ROW_ERROR
    assert outcome.error is not None
    assert "maximum context length" in outcome.error.message


async def test_a_repeated_long_prompt_hits_the_prefix_cache(target: Target) -> None:
    prompt = "Prefix cache: " + LONG_TEXT
    first = await target.complete(prompt)
    again = await target.complete(prompt + " And then?")
    assert first.usage.num_cached_tokens < again.usage.num_cached_tokens
    assert again.usage.num_cached_tokens < again.usage.num_prompt_tokens


async def test_n_gives_that_many_choices(target: Target) -> None:
    outcome = await target.chat(n=2, temperature=1.0, seed=7)
    choices = document(outcome)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]


async def test_chat_logprobs_come_one_per_token(target: Target) -> None:
    outcome = await target.chat(logprobs=True, max_tokens=4, ignore_eos=True)
    logprobs = document(outcome)["choices"][0]["logprobs"]
    assert isinstance(logprobs, dict)
    assert len(logprobs["content"]) == 4


async def test_completion_logprobs_come_one_per_token(target: Target) -> None:
    outcome = await target.complete(logprobs=1, max_tokens=4, ignore_eos=True)
    logprobs = document(outcome)["choices"][0]["logprobs"]
    assert isinstance(logprobs, dict)
    assert len(logprobs["tokens"]) == 4


async def test_a_chat_stream_ends_with_usage_and_done(target: Target) -> None:
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    events = await target.stream(
        CHAT, messages=messages, ignore_eos=True, stream_options={"include_usage": True}
    )
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 4
    assert json.loads(events[0])["object"] == "chat.completion.chunk"


async def test_a_completion_stream_spells_the_whole_answer(target: Target) -> None:
    whole = document(await target.complete(max_tokens=4))["choices"][0]["text"]
    *events, done = await target.stream(COMPLETION, prompt="The sea is")
    assert done == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole


async def test_a_cancelled_call_is_aborted_at_the_engine(target: Target) -> None:
    await target.wait_until_running(0)
    call = asyncio.create_task(target.complete("hold on", max_tokens=8000, ignore_eos=True))
    await target.wait_until_running(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await target.wait_until_running(0)
