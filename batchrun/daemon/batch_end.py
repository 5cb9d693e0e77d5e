"""The end of a batch of OpenAI's API: its files of results, then the store says so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from batchrun.daemon.closing import stored_rows
from batchrun.daemon.patience import until_reached, until_stored
from batchrun.daemon.uploading import until_uploaded
from batchrun.errors import BatchrunError, StateError
from batchrun.jobspec import JobSpec
from batchrun.output.batch_files import write_batch_files
from batchrun.output.file_bytes import FileBytes
from batchrun.remote import in_thread
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
    store: Store, record: JobRecord, *, links: Path, place: FileBytes, progress: ProgressSink
) -> None:
    """Write the files of results, bring them where files lie, and end the job.

    What cannot be written is tried again for as long as the job waits for it: the batch has no
    state for that.
    """
    while record.state in {JobState.FINALIZING, JobState.CANCELLING}:
        try:
            found = await until_reached(
                _write, store, record, links=links, folder=place.spool, progress=progress
            )
            await _keep(store, record, found, place, progress)
        except BatchrunError as error:
            log.error("%s: its results cannot be written: %s", record.id, error)
            progress(f"{record.state}, cannot write its results: {error}", 0, 0)
            await asyncio.sleep(RETRY_INTERVAL_S)
        else:
            await _finish(store, record, found, place)
        record = await until_reached(jobs.get, store, record.id)


async def _keep(
    store: Store, record: JobRecord, found: ResultFiles, place: FileBytes, progress: ProgressSink
) -> None:
    """Raises BatchrunError; the files are marked then, for others are written in their place."""
    try:
        for file_id in _ids(found):
            await until_uploaded(partial(place.keep, file_id), store, record, progress)
    except BatchrunError:
        await _drop(found, place)
        raise


async def _finish(store: Store, record: JobRecord, found: ResultFiles, place: FileBytes) -> None:
    finish: Callable[..., object] = batches.finish
    try:
        await until_stored(finish, store, record, found, now_s=time.time())
    except StateError as error:
        log.info("%s", error)
        await _drop(found, place)
    else:
        for file_id in _ids(found):
            await in_thread(place.settle, file_id)


async def _drop(found: ResultFiles, place: FileBytes) -> None:
    for file_id in _ids(found):
        await in_thread(place.mark, file_id)
        await in_thread(place.remove, file_id)


def _ids(found: ResultFiles) -> list[str]:
    return [file.id for file in (found.output, found.error) if file is not None]


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
