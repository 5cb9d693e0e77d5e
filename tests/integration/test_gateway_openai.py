"""The ordinary `openai` client, pointed at the gateway, works unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from gateway_rig import rig
from openai.types.chat import ChatCompletionUserMessageParam

MESSAGES = [ChatCompletionUserMessageParam(role="user", content="hi")]


async def test_async_client_completes_streams_and_lists(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        base_url = gateway.url + "/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
            whole = await client.chat.completions.create(model="tiny", messages=MESSAGES)
            assert whole.choices[0].message.content == "hello"
            stream = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True
            )
            parts = [chunk.choices[0].delta.content async for chunk in stream]
            assert parts == ["w0 ", "w1 ", "w2 ", "w3 ", "w4 "]
            assert [model.id async for model in client.models.list()] == ["tiny", "org/name"]
            assert (await client.models.retrieve("org/name")).id == "org/name"


def use_sync_client(url: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        text = client.completions.create(model="tiny", prompt="hi")
        assert text.choices[0].text == "hello"
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert len(list(stream)) == 5
        with pytest.raises(openai.NotFoundError, match="'none' does not exist"):
            client.models.retrieve("none")
        with pytest.raises(openai.NotFoundError, match="Not Found"):
            client.chat.completions.create(model="flat", messages=MESSAGES)


async def test_sync_client_completes_streams_and_reads_errors(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        await asyncio.to_thread(use_sync_client, gateway.url)
