"""Threads for calls to object storage, which may hang for a while: apart from all others, so that
nothing else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

MAX_THREADS = 16
_THREADS = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="storage")

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do what blocks on object storage, and return or raise what it does."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, partial(work, *args, **kwargs))
