"""A loop that no test has to wait for."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class InstantLoop(asyncio.SelectorEventLoop):
    """A loop whose clock goes on by itself as soon as nothing is left to do until later."""

    def __init__(self) -> None:
        super().__init__(_InstantSelector(self._pass))
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds


class _InstantSelector(selectors.SelectSelector):
    def __init__(self, wait: Callable[[float], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self._wait(timeout)
        return ready
