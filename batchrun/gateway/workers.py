"""Several workers on one port: processes that share it through SO_REUSEPORT.

A worker's standard input is a pipe of the supervisor: when it closes, the worker drains and ends,
so no worker outlives a supervisor that was killed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress

from batchrun.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

RESTART_S = 1.0
KILL_AFTER_S = 5.0


async def supervise(
    settings: GatewaySettings, *, stop: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    """Keep `num_workers` workers running until `stop` is set, then end them gently.

    `settings.port` must be a number that the workers can share.
    """
    ready = [asyncio.Event() for _ in range(settings.num_workers)]
    keepers = [asyncio.create_task(_keep_one(settings, stop=stop, ready=event)) for event in ready]
    announcing = asyncio.create_task(_announce(ready, on_ready))
    await stop.wait()
    announcing.cancel()
    await asyncio.gather(*keepers)


async def _announce(ready: Sequence[asyncio.Event], on_ready: Callable[[], None]) -> None:
    for event in ready:
        await event.wait()
    on_ready()


async def _keep_one(
    settings: GatewaySettings, *, stop: asyncio.Event, ready: asyncio.Event
) -> None:
    while not stop.is_set():
        worker = await asyncio.create_subprocess_exec(
            sys.executable, *worker_arguments(settings), stdin=PIPE, stdout=PIPE
        )
        stopper = asyncio.create_task(_end_on_stop(worker, settings.drain_s, stop=stop))
        if worker.stdout is not None and await worker.stdout.readline():
            ready.set()
        exit_code = await worker.wait()
        if not stop.is_set():
            stopper.cancel()
            log.warning("worker %d ended with %d; starting another", worker.pid, exit_code)
            with suppress(TimeoutError):
                async with asyncio.timeout(RESTART_S):
                    await stop.wait()


async def _end_on_stop(worker: Process, drain_s: float, *, stop: asyncio.Event) -> None:
    await stop.wait()
    if worker.stdin is not None:
        worker.stdin.close()
    try:
        async with asyncio.timeout(drain_s + KILL_AFTER_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()


def worker_arguments(settings: GatewaySettings) -> Sequence[str]:
    """The command line of one worker, after the interpreter."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return (
        *("-m", "batchrun.gateway", "--worker"),
        *("--listen", f"{host}:{settings.port}"),
        *("--upstreams", str(settings.upstreams_path)),
        *(() if settings.keys_path is None else ("--keys", str(settings.keys_path))),
        *("--drain-s", str(settings.drain_s)),
        *("--body-idle-s", str(settings.body_idle_s)),
        *("--max-body-bytes", str(settings.max_body_bytes)),
    )
