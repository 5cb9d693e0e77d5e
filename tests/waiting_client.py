"""An `AsyncOpenAI` that waits: a test written for `OpenAI` drives both clients."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Awaitable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
PLAIN = (str, bytes, int, list, dict, type(None))


class Waiting:
    """The async client or a part of it. A call returns when its answer is there; pages iterate."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return value if isinstance(value, PLAIN) else Waiting(value, self._runner)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self._target(*arguments, **options)
        if inspect.isawaitable(result):
            result = self._runner.run(_answer(result))
        return Waiting(result, self._runner) if isinstance(result, AsyncIterable) else result

    def __iter__(self) -> Iterator[Any]:
        return iter(self._runner.run(_all(self._target)))


async def _answer(waits: Awaitable[T]) -> T:
    return await waits


async def _all(items: AsyncIterable[T]) -> list[T]:
    return [item async for item in items]
