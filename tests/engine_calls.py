"""Online calls and offline rows on one real engine with batchrun's scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from engine_builders import REAL_MODEL

from batchrun.types import HINT_KEY, HINT_VERSION

NONCE = "combinations"
NUM_ROWS = 6
ROW_TOKENS = 480  # runs for longer than a look at the metrics takes
DOCUMENT = " ".join(f"{word} {number}" for number in range(60) for word in ("river", "stone"))

Answer = dict[str, Any]


class EngineCalls:
    """Speaks to one engine. Use within one event loop, and `close` it."""

    def __init__(self, base_url: str, model: str = REAL_MODEL) -> None:
        self.base_url = base_url
        self.model = model
        self.num_rows_sent = 0
        self._session = aiohttp.ClientSession(
            base_url, timeout=aiohttp.ClientTimeout(total=120), raise_for_status=True
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def order(self, path: str) -> None:
        """A POST without a body."""
        async with self._session.post(path):
            pass

    async def complete(self, prompt: str = "a call", **fields: object) -> Answer:
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

    async def stream(self, prompt: str, **fields: object) -> AsyncIterator[Answer]:
        """The events of a streamed completion. Ending the loop early closes the connection."""
        body = self._body(prompt, {**fields, "stream": True})
        async with self._session.post("/v1/completions", json=body) as reply:
            async for line in reply.content:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)

    async def row(self, row: int, **fields: object) -> Answer:
        """An offline row, with the hint that the daemon would send; all rows share a document."""
        hint = {
            "v": HINT_VERSION, "nonce": NONCE, "epoch": 1, "job": "job", "row": row,
            "class": "offline", "rank": row, "nodes": [[1, 0, row]],
        }  # fmt: skip
        xargs = {HINT_KEY: json.dumps(hint)}
        prompt = f"{DOCUMENT} question {row}"
        told = {"max_tokens": ROW_TOKENS, "ignore_eos": True, "vllm_xargs": xargs, **fields}
        return await self.complete(prompt, **told)

    @asynccontextmanager
    async def rows_beside(self, **fields: object) -> AsyncIterator[list[asyncio.Task[Answer]]]:
        """Offline rows that run when the body begins; each has its whole answer at the end.

        `fields` may say another `max_tokens`. A body that fails leaves no row behind.
        """
        first = self.num_rows_sent
        self.num_rows_sent += NUM_ROWS
        numbers = range(first, self.num_rows_sent)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.row(number, **fields)) for number in numbers]
            while await self.gauge("vllm:num_requests_running") < 1:
                assert not all(task.done() for task in tasks), await asyncio.gather(*tasks)
                await asyncio.sleep(0.02)
            yield tasks
        for answer in await asyncio.gather(*tasks):
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"]
            assert answer["usage"]["completion_tokens"] == fields.get("max_tokens", ROW_TOKENS)

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
        for _ in range(200):
            if (value := await self.gauge(name)) >= least:
                break
            await asyncio.sleep(0.05)
        return value

    def _body(self, prompt: str, fields: dict[str, object]) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 16,
            "ignore_eos": True,
            **fields,
        }
