"""From a job in the store to a job in memory; a batch of OpenAI's API is validated on the way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batchrun.batch_jobs import check_input, validate_input
from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.opening import take_up_job
from batchrun.daemon.patience import until_reached, until_stored
from batchrun.daemon.slots import Slot
from batchrun.errors import EngineError, QuotaError, StateError, StorageUnreachableError
from batchrun.output.file_bytes import FileBytes
from batchrun.remote import in_thread
from batchrun.store import JobRecord, Store, api_keys, batches, files, jobs
from batchrun.store.api_keys import ApiKeyRecord
from batchrun.store.batches import BatchError, BatchRecord, ValidInput
from batchrun.types import JobState, ProgressSink

log = logging.getLogger(__name__)

ENGINE_INTERVAL_S = 0.5
STORAGE_INTERVAL_S = 5.0


@dataclass(slots=True)
class Opener:
    """Brings jobs into memory. `links` is the folder of pinned inputs, `files` where the files of
    OpenAI's API lie, `model_folder` that of the engines' model; see `Daemon`."""

    store: Store
    slots: Sequence[Slot]
    links: Path
    model_folder: Path | None
    files: FileBytes | None

    async def open(self, record: JobRecord, progress: ProgressSink) -> ActiveJob | None:
        """The job in memory; None for a batch that is not to run. Waits for the store.

        Raises DataError, and what else `take_up_job` raises.
        """
        started: JobRecord | None = record
        if record.is_batch and record.state is JobState.VALIDATING:
            started = await self._validate(record, progress)
        if started is None:
            return None
        take_up = partial(take_up_job, links=self.links, model_folder=self.model_folder)
        return await until_reached(take_up, self.store, started, progress=progress)

    async def _validate(self, record: JobRecord, progress: ProgressSink) -> JobRecord | None:
        """Start the job if its input is valid, or let it fail.

        Returns None where it does not run: it failed, or was cancelled or paused meanwhile.
        """
        assert self.files is not None
        batch = await until_reached(batches.find, self.store, record.id)
        assert batch is not None
        owner = await until_reached(api_keys.find, self.store, batch.owner)
        file = await until_reached(
            files.find,
            self.store,
            batch.input_file_id,
            now_s=time.time(),
            scope=None if owner is None else owner.scope,
        )
        found: ValidInput | list[BatchError] = check_input(batch, file)
        if file is not None and not found:
            models = await self._served_models(record, progress)
            found = await self._check_lines(batch, models, progress)
        with suppress(StateError):
            await self._conclude(record.id, found, owner)
        now = await until_reached(jobs.get, self.store, record.id)
        return now if now.state is JobState.RUNNING else None

    async def _conclude(
        self, batch_id: str, found: ValidInput | list[BatchError], owner: ApiKeyRecord | None
    ) -> None:
        """Start the batch, or let it fail. Raises StateError where it is not validated any more."""
        if isinstance(found, ValidInput):
            quota = None if owner is None else owner.limits.enqueued_tokens
            start = partial(batches.start, now_s=time.time(), max_enqueued_tokens=quota)
            try:
                await until_stored(start, self.store, batch_id, found)
            except QuotaError as error:
                found = [BatchError("token_limit_exceeded", str(error))]
            else:
                return
        await until_stored(batches.fail, self.store, batch_id, found, now_s=time.time())

    async def _check_lines(
        self, batch: BatchRecord, models: set[str], progress: ProgressSink
    ) -> ValidInput | list[BatchError]:
        """Waits for object storage while that does not answer."""
        assert self.files is not None
        while True:
            try:
                return await in_thread(
                    validate_input,
                    batch,
                    self.files,
                    models,
                    links=self.links,
                    progress=progress,
                )
            except StorageUnreachableError as error:
                log.warning("%s: %s", batch.job.id, error)
                progress(f"validating, waiting for the input: {error}", 0, 0)
                await asyncio.sleep(STORAGE_INTERVAL_S)

    async def _served_models(self, record: JobRecord, progress: ProgressSink) -> set[str]:
        """What the engines serve; waits for one that tells, while the job is still validated."""
        while True:
            models: set[str] = set()
            for slot in self.slots:
                with suppress(EngineError):
                    models.update(await slot.engine.client.models())
            if models:
                return models
            now = await until_reached(jobs.get, self.store, record.id)
            if now.state is not JobState.VALIDATING:
                return models
            progress("waiting for an engine", 0, 0)
            await asyncio.sleep(ENGINE_INTERVAL_S)
