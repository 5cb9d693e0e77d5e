"""The end of a batch of OpenAI's API: its files of results, then the store says so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from batchrun.daemon.closing import stored_rows
from batchrun.daemon.patience import until_reached, until_stored
from batchrun.errors import BatchrunError, StateError
from batchrun.jobspec import JobSpec
from batchrun.output.batch_files import write_batch_files
from batchrun.store import JobRecord, Store, batches, jobs
from batchrun.store.batches import ResultFiles
from batchrun.submission import open_submitted
from batchrun.types import JobState, ProgressSink, RowError

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 30.0
NOTHING = ResultFiles(None, None, 0)
NEVER_RAN = {
    JobState.CANCELLED: RowError(
        "batch_cancelled", "This request could not be executed before the batch was cancelled."
    ),
    JobState.EXPIRED: RowError(
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


async def end_batch(
    store: Store, record: JobRecord, *, links: Path, folder: Path, progress: ProgressSink
) -> None:
    """Write the files of results into `folder` and end the job.

    What cannot be written is tried again for as long as the job waits for it: the batch has no
    state for that.
    """
    while record.state in {JobState.FINALIZING, JobState.CANCELLING}:
        try:
            found = await until_reached(
                _write, store, record, links=links, folder=folder, progress=progress
            )
        except BatchrunError as error:
            log.error("%s: its results cannot be written: %s", record.id, error)
            await asyncio.sleep(RETRY_INTERVAL_S)
        else:
            await _finish(store, record, found, folder)
        record = await until_reached(jobs.get, store, record.id)


async def _finish(store: Store, record: JobRecord, found: ResultFiles, folder: Path) -> None:
    finish: Callable[..., object] = batches.finish
    try:
        await until_stored(finish, store, record, found, now_s=time.time())
    except StateError as error:
        log.info("%s", error)
        for file in (found.output, found.error):
            if file is not None:
                await asyncio.to_thread((folder / file.id).unlink, missing_ok=True)


def _write(
    store: Store, record: JobRecord, *, links: Path, folder: Path, progress: ProgressSink
) -> ResultFiles:
    if record.num_rows == 0:
        return NOTHING
    batch = batches.find(store, record.id)
    assert batch is not None and record.ends_as is not None
    spec = JobSpec.model_validate_json(record.spec)
    with open_submitted(record, spec, links=links) as data:
        return write_batch_files(
            folder,
            batch,
            stored_rows(store, record.seq),
            data=data,
            missing=NEVER_RAN.get(record.ends_as),
            progress=progress,
        )
