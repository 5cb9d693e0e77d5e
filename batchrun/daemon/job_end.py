"""The end of a job, seen from the daemon: its output file is written, then the store says so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.daemon.batch_end import end_batch
from batchrun.daemon.closing import export
from batchrun.daemon.patience import until_reached, until_stored
from batchrun.daemon.tasks import Stage
from batchrun.daemon.writer import ResultWriter
from batchrun.errors import BatchrunError, StateError
from batchrun.store import JobRecord, Store, jobs
from batchrun.types import JobState

log = logging.getLogger(__name__)

OUTPUT_RETRY_S = 30.0


@dataclass(slots=True)
class JobEnd:
    """Writes output files and ends jobs. `pause(job_id, reason)`: the file cannot be written.

    `files` is the folder for what batches of OpenAI's API end with; None: there are no batches.
    """

    store: Store
    writer: ResultWriter
    links: Path
    stages: dict[str, Stage]
    pause: Callable[[str, str], Awaitable[None]]
    files: Path | None = None
    _closing: dict[int, asyncio.Lock] = field(default_factory=dict)
    _retry_at_s: dict[int, float] = field(default_factory=dict)

    async def close(self, record: JobRecord) -> None:
        """Write the output file, then end the job. One at a time: an export cannot be stopped."""
        await self.writer.flush()
        async with self._closing.setdefault(record.seq, asyncio.Lock()):
            now = await until_reached(jobs.get, self.store, record.id)
            if now.state in {JobState.FINALIZING, JobState.CANCELLING}:
                await (self._end_batch(now) if now.is_batch else self._export(now))

    def may_try(self, job_seq: int) -> bool:
        """Whether the output file was not found to be unwritable a moment ago."""
        now_s = time.monotonic()
        return self._retry_at_s.get(job_seq, now_s) <= now_s

    async def _end_batch(self, record: JobRecord) -> None:
        assert self.files is not None
        stage = self.stages.setdefault(record.id, Stage())
        try:
            await end_batch(self.store, record, links=self.links, folder=self.files, progress=stage)
        finally:
            self.stages.pop(record.id, None)

    async def _export(self, record: JobRecord) -> None:
        stage = self.stages.setdefault(record.id, Stage())
        reason = None
        try:
            await until_reached(export, self.store, record, links=self.links, progress=stage)
        except BatchrunError as error:
            reason = f"output not written: {error}"
        finally:
            self.stages.pop(record.id, None)
        if reason is not None and record.state is JobState.FINALIZING:
            self._retry_at_s[record.seq] = time.monotonic() + OUTPUT_RETRY_S
            await self.pause(record.id, reason)
            return
        try:
            await until_stored(jobs.finish, self.store, record.id, now_s=time.time(), reason=reason)
        except StateError as error:
            log.info("%s", error)
