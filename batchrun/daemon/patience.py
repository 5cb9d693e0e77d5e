"""Work with the store that waits until the store is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from batchrun.errors import StoreError, StoreUnreachableError

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_INTERVAL_S = 2.0


async def until_stored(work: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Do what changes the store; while it cannot be written, wait and try again."""
    return await _until(StoreError, work, *args, **kwargs)


async def until_reached(work: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Do what reads the store; while its database does not answer, wait and try again."""
    return await _until(StoreUnreachableError, work, *args, **kwargs)


async def _until(
    passing: type[StoreError], work: Callable[..., T], *args: object, **kwargs: object
) -> T:
    while True:
        try:
            return await asyncio.to_thread(work, *args, **kwargs)
        except passing as error:
            log.error("waiting for the store: %s", error)
            await asyncio.sleep(RETRY_INTERVAL_S)
