"""Online calls and offline rows on one real engine with batchrun's scheduler."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from engine_builders import REAL_MODEL

from batchrun.hints import HINT_KEY, HINT_VERSION, SloBounds, SloHint, write_hint

NONCE = "combinations"
NUM_ROWS = 6
ROW_TOKENS = 240
DOCUMENT = " ".join(f"{word} {number}" for number in range(60) for word in ("river", "stone"))

Answer = dict[str, Any]


class EngineCalls:
    """Speaks to one engine. Use within one event loop, and `close` it."""

    def __init__(self, base_url: str, model: str = REAL_MODEL) -> None:
        self.base_url = base_url
        self.model = model
        self._numbers = itertools.count()
        # A kept connection may be closed by the server just when it is used again.
        self._session = aiohttp.ClientSession(
            base_url,
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=120),
            raise_for_status=True,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def order(self, path: str) -> None:
        """A POST without a body."""
        async with self._session.post(path):
            pass

    async def complete(self, prompt: str | list[int] = "a call", **fields: object) -> Answer:
        """One completion; greedy, 16 tokens unless told otherwise."""
        async with self._session.post("/v1/completions", json=self._body(prompt, fields)) as reply:
            answer: Answer = await reply.json()
        return answer

    async def text(self, prompt: str = "a call", **fields: object) -> str:
        """The text of one completion."""
        return str((await self.complete(prompt, **fields))["choices"][0]["text"])

    async def chat(self, **fields: object) -> Answer:
        """One greedy chat."""
        messages = [{"role": "user", "content": "name a colour"}]
        body = {"model": self.model, "messages": messages, "temperature": 0, **fields}
        async with self._session.post("/v1/chat/completions", json=body) as reply:
            answer: Answer = await reply.json()
        return answer

    async def stream(self, prompt: str, **fields: object) -> AsyncGenerator[Answer]:
        """The events of a streamed completion. Ending the loop early closes the connection."""
        body = self._body(prompt, {**fields, "stream": True})
        async with self._session.post("/v1/completions", json=body) as reply:
            async for line in reply.content:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)

    async def session(
        self, turns: list[list[int]], *, max_tokens: int = 16, **fields: object
    ) -> list[list[int]]:
        """The answers of a streaming session to turns of token ids (`session_route`)."""
        body = {"turns": turns, "max_tokens": max_tokens, **fields}
        async with self._session.post("/session", json=body) as reply:
            answers: list[list[int]] = await reply.json()
        return answers

    async def row(self, row: int, **fields: object) -> Answer:
        """An offline row, with the hint that the daemon would send; all rows share a document."""
        return await self.complete(_row_prompt(row), **(_row_fields(row) | fields))

    def stream_row(self, row: int, **fields: object) -> AsyncGenerator[Answer]:
        """The same row, streamed."""
        return self.stream(_row_prompt(row), **(_row_fields(row) | fields))

    @asynccontextmanager
    async def rows_beside(self) -> AsyncIterator[list[Answer]]:
        """`NUM_ROWS` offline rows run from the beginning of the body to its end, however fast the
        engine is: one that is done is followed by another. Yields the answers so far; each is whole
        at the end. A body that fails leaves no row behind."""
        answers: list[Answer] = []
        is_over = asyncio.Event()

        async def keep_running() -> None:
            while not is_over.is_set():
                answers.append(await self.row(next(self._numbers)))

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_ROWS):
                group.create_task(keep_running())
            while await self.gauge("vllm:num_requests_running") < 1:
                await asyncio.sleep(0.02)
            yield answers
            is_over.set()
        for answer in answers:
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"]
            assert answer["usage"]["completion_tokens"] == ROW_TOKENS

    async def gauge(self, name: str) -> float:
        """The sum of a metric over its labels."""
        async with self._session.get("/metrics") as reply:
            lines = (await reply.text()).splitlines()
        values = [
            line.rsplit(" ", 1)[1] for line in lines if line.startswith((f"{name}{{", f"{name} "))
        ]
        return sum(map(float, values))

    async def gauge_of_at_least(self, name: str, least: float) -> float:
        """The metric as soon as it is at least `least`, or as it is after ten seconds."""
        return await self._gauge_when(name, lambda value: value >= least)

    async def gauge_of_at_most(self, name: str, most: float) -> float:
        """The metric as soon as it is at most `most`, or as it is after ten seconds."""
        return await self._gauge_when(name, lambda value: value <= most)

    async def _gauge_when(self, name: str, is_wanted: Callable[[float], bool]) -> float:
        for _ in range(200):
            if is_wanted(value := await self.gauge(name)):
                break
            await asyncio.sleep(0.05)
        return value

    def _body(self, prompt: str | list[int], fields: dict[str, object]) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 16,
            "ignore_eos": True,
            **fields,
        }


def promised(ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """What gives a call bounds of its own."""
    hint = SloHint(slo=SloBounds(ttft_s=ttft_s, tpot_s=tpot_s))
    return {"vllm_xargs": {HINT_KEY: write_hint(hint, NONCE)}}


def _row_prompt(row: int) -> str:
    return f"{DOCUMENT} question {row}"


def _row_fields(row: int) -> dict[str, object]:
    hint = {
        "v": HINT_VERSION, "nonce": NONCE, "epoch": 1, "job": "job", "row": row,
        "class": "offline", "rank": row, "nodes": [[1, 0, row]],
    }  # fmt: skip
    xargs = {HINT_KEY: json.dumps(hint)}
    return {"max_tokens": ROW_TOKENS, "ignore_eos": True, "vllm_xargs": xargs}
