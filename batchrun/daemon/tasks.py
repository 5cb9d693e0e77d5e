"""What the daemon has going on beside its loop: tasks that must not fail unseen, and stages."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

log = logging.getLogger(__name__)


class TaskSet:
    """Background tasks. A bug in one goes to `on_bug(job_id, error)`; in one without a job, it
    ends the daemon cleanly: everything it knows is in the store."""

    def __init__(self, on_bug: Callable[[str, BaseException], None]) -> None:
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None], job_id: str | None = None) -> None:
        """Run `work` beside everything else, on behalf of a job or of the daemon itself."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, job_id))

    async def cancel_all(self) -> None:
        """Cancel every task and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None], job_id: str | None) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("a task of the daemon failed", exc_info=error)
        if job_id is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._on_bug(job_id, error)


@dataclass(slots=True)
class Stage:
    """How far a job's opening or closing has come, for `status`."""

    name: str = ""
    done: int = 0
    total: int = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.name, self.done, self.total = stage, done, total

    def describe(self) -> str:
        """A few words for people."""
        return f"{self.name} {self.done:,} of {self.total:,}" if self.total else self.name
