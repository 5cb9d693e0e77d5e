"""Batches of OpenAI's API on their way in: validated, then jobs like any other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchrun.batch_jobs import check_input, validate_input
from batchrun.daemon.patience import until_reached, until_stored
from batchrun.daemon.slots import Slot
from batchrun.errors import EngineError, StateError
from batchrun.store import JobRecord, Store, batches, files, jobs
from batchrun.store.batches import BatchError, BatchRecord, ValidInput
from batchrun.types import JobState, ProgressSink

ENGINE_INTERVAL_S = 0.5


@dataclass(slots=True)
class BatchDesk:
    """Validates inputs. `files` is the folder where the API's files lie, `links` that of pins."""

    store: Store
    slots: Sequence[Slot]
    files: Path
    links: Path

    async def validate(self, record: JobRecord, progress: ProgressSink) -> JobRecord | None:
        """Start the job if its input is valid, or let it fail.

        Returns None where it does not run: it failed, or was cancelled or paused meanwhile.
        """
        batch = await until_reached(batches.find, self.store, record.id)
        assert batch is not None
        file = await until_reached(files.find, self.store, batch.input_file_id, now_s=time.time())
        found: ValidInput | list[BatchError] = check_input(batch, file)
        if file is not None and not found:
            models = await self._served_models(record, progress)
            path = self.files / file.id
            found = await asyncio.to_thread(
                validate_input, batch, path, models, links=self.links, progress=progress
            )
        move: Callable[..., BatchRecord] = batches.fail
        if isinstance(found, ValidInput):
            move = batches.start
        with suppress(StateError):
            await until_stored(move, self.store, record.id, found, now_s=time.time())
        now = await until_reached(jobs.get, self.store, record.id)
        return now if now.state is JobState.RUNNING else None

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
