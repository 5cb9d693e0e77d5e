"""The end of a batch of OpenAI's API: its files of results, then the store says so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from batchrun.daemon.closing import stored_rows
from batchrun.daemon.patience import until_reached, until_stored
from batchrun.daemon.uploading import until_uploaded
from batchrun.errors import BatchrunError, DataError, StateError
from batchrun.jobspec import JobSpec
from batchrun.output.batch_files import (
    read_custom_ids,
    salvage_custom_ids,
    write_batch_files,
)
from batchrun.output.file_bytes import FileBytes
from batchrun.remote import in_thread
from batchrun.store import JobRecord, Store, batches, jobs
from batchrun.store.batches import ResultFiles
from batchrun.submission import open_submitted
from batchrun.types import JobState, ProgressSink, RowError

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 30.0
INPUT_TRIES = 3
"""How often the input of a batch that has to end is read in vain, before the batch ends without."""
NOTHING = ResultFiles(None, None, 0)
NEVER_RAN_IN_BATCH = {
    JobState.CANCELLED: RowError(
        "batch_cancelled", "This request could not be executed before the batch was cancelled."
    ),
    JobState.EXPIRED: RowError(
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


async def end_batch(
    store: Store,
    record: JobRecord,
    *,
    links: Path,
    place: FileBytes,
    progress: ProgressSink,
    retry_interval_s: float = RETRY_INTERVAL_S,
) -> None:
    """Write the files of results, bring them where files lie, and end the job.

    What cannot be written is tried again for as long as the job waits for it: the batch has no
    state for that. An input that cannot be read is missed `INPUT_TRIES` times, and by a batch whose
    rows are all done until its deadline; then the lines of the files do without their custom ids.
    """
    num_misses = 0
    while record.state in {JobState.FINALIZING, JobState.CANCELLING}:
        write = partial(_write, store, record, links=links, folder=place.spool, progress=progress)
        is_lost = num_misses >= INPUT_TRIES and not _may_wait(record)
        try:
            found = await until_reached(write, is_input_lost=is_lost)
            await _keep(store, record, found, place, progress)
        except BatchrunError as error:
            num_misses += isinstance(error, DataError)
            log.error("%s: its results cannot be written: %s", record.id, error)
            progress(f"{record.state}, cannot write its results: {error}", 0, 0)
            await asyncio.sleep(retry_interval_s)
        else:
            await _finish(store, record, found, place)
        record = await until_reached(jobs.get, store, record.id)


def _may_wait(record: JobRecord) -> bool:
    """Whether there is still time for somebody to put the input back."""
    is_done = record.ends_as is JobState.COMPLETED
    return is_done and record.expires_at is not None and time.time() < record.expires_at


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
    store: Store,
    record: JobRecord,
    *,
    links: Path,
    folder: Path,
    progress: ProgressSink,
    is_input_lost: bool,
) -> ResultFiles:
    if record.num_rows == 0:
        return NOTHING
    batch = batches.find(store, record.id)
    assert batch is not None and record.ends_as is not None
    with _custom_ids(record, links, is_input_lost=is_input_lost) as custom_ids:
        return write_batch_files(
            folder,
            batch,
            stored_rows(store, record.seq),
            custom_ids=custom_ids,
            missing=NEVER_RAN_IN_BATCH.get(record.ends_as),
            progress=progress,
        )


@contextmanager
def _custom_ids(
    record: JobRecord, links: Path, *, is_input_lost: bool
) -> Iterator[Iterator[str | None]]:
    """Those of all rows, each None that cannot be read where the input is lost.

    Raises DataError, while the ids are read too, where it is not lost.
    """
    spec = JobSpec.model_validate_json(record.spec)
    data = None
    with ExitStack() as exits:
        try:
            data = exits.enter_context(open_submitted(record, spec, links=links))
        except DataError as error:
            if not is_input_lost:
                raise
            log.warning("%s: ends without the custom ids of its input: %s", record.id, error)
        if data is None or is_input_lost:
            yield salvage_custom_ids(data, record.num_rows)
        else:
            yield read_custom_ids(data)
