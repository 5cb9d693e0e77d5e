"""The end of a job, seen from the daemon: its output file is written, then the store says so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from batchrun.daemon.batch_end import end_batch
from batchrun.daemon.closing import export
from batchrun.daemon.patience import until_reached, until_stored
from batchrun.daemon.tasks import Stage
from batchrun.daemon.uploading import until_uploaded
from batchrun.daemon.view import output_path
from batchrun.daemon.writer import ResultWriter
from batchrun.errors import BatchrunError, StateError
from batchrun.output.file_bytes import FileBytes
from batchrun.remote import in_thread, is_url, name_of, objects
from batchrun.scratch import scratch_folder
from batchrun.store import JobRecord, Store, jobs
from batchrun.types import JobState

log = logging.getLogger(__name__)

OUTPUT_RETRY_S = 30.0


@dataclass(slots=True)
class JobEnd:
    """Writes output files and ends jobs. `pause(job_id, reason)`: the file cannot be written.

    `files` is where the files lie that batches of OpenAI's API end with; None: there are no
    batches.
    """

    store: Store
    writer: ResultWriter
    links: Path
    stages: dict[str, Stage]
    pause: Callable[[str, str], Awaitable[None]]
    files: FileBytes | None = None
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
            await end_batch(self.store, record, links=self.links, place=self.files, progress=stage)
        finally:
            self.stages.pop(record.id, None)

    async def _write(self, record: JobRecord, stage: Stage) -> None:
        """The output file, or the object that is made of it. Who cancels a job does not wait for
        object storage: its results can be written later."""
        work = partial(export, self.store, record, links=self.links, progress=stage)
        place = output_path(record)
        if not is_url(place):
            await until_reached(work)
            return
        exits = ExitStack()
        folder = await in_thread(exits.enter_context, scratch_folder(self.links))
        try:
            copy = folder / name_of(place)
            await until_reached(work, path=copy)
            upload = partial(objects.put, copy, place)
            if record.state is JobState.FINALIZING:
                await until_uploaded(upload, self.store, record, stage)
            else:
                await in_thread(upload)
        finally:
            await in_thread(exits.close)

    async def _export(self, record: JobRecord) -> None:
        stage = self.stages.setdefault(record.id, Stage())
        reason = None
        try:
            await self._write(record, stage)
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
