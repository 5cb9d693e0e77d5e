"""The end of a job, also of a batch of OpenAI's API: its files are written, then the store says so.

Every row is in the output file exactly once, in input order. Object storage is tried until it takes
the file. What is outdated is removed later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from batchrun.daemon.writer import (
    ResultWriter,
    Stage,
    until_reached,
    until_read_or_written,
    until_stored,
)
from batchrun.errors import (
    BatchrunError,
    DataError,
    StateError,
    StorageError,
    StorageUnreachableError,
    StoreError,
    UnknownJobError,
)
from batchrun.files import is_url, name_of, scratch_folder
from batchrun.jobs.objects import in_thread
from batchrun.jobs.results.batch_files import read_custom_ids, salvage_custom_ids, write_batch_files
from batchrun.jobs.results.file_bytes import (
    FileBytes,
    remove_expired,
    remove_input,
    sweep_files,
)
from batchrun.jobs.results.keeping import find_unused_links, find_unused_rows, kept_files, remove
from batchrun.jobs.results.output_file import write_output
from batchrun.jobs.results.output_parts import upload
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import open_submitted, plan_file, rows_file
from batchrun.keys import FairDoor
from batchrun.pool.job_shares import OPERATOR
from batchrun.store import batches, jobs, results
from batchrun.store.batches import ResultFiles
from batchrun.store.database import Store
from batchrun.store.jobs import JobRecord
from batchrun.store.retention import find_removable, remove_results
from batchrun.types import JobState, ProgressSink, RowError

NEVER_RAN = {
    JobState.CANCELLED: RowError("job_cancelled", "the job was cancelled before this row ran"),
    JobState.EXPIRED: RowError("job_expired", "the deadline passed before this row ran"),
}


def export(
    store: Store,
    record: JobRecord,
    *,
    links: Path,
    to: Path | BinaryIO | None = None,
    is_partial: bool = False,
    progress: ProgressSink | None = None,
) -> int:
    """Write a job's output (`to` a place, or where its spec says); returns its number of rows. An
    output in object storage needs a place on this machine, to be uploaded from.

    A partial one leaves out rows without a result; otherwise they carry the error of how the job
    ends. Blocking. Raises StoreFullError, InputError and DataError, and then leaves no
    half-written file behind; StateError when the results were removed.
    """
    results.refuse_removed(store, record.seq)
    spec = JobSpec.model_validate_json(record.spec)
    data = open_submitted(record, spec, links=links)
    ends_as = record.ends_as or record.state
    assert to is not None or not is_url(spec.output.path)
    try:
        return write_output(
            Path(spec.output.path) if to is None else to,
            results.read(store, record.seq),
            spec=spec,
            data=data,
            missing=None if is_partial else NEVER_RAN.get(ends_as),
            progress=progress,
        )
    finally:
        data.close()


log = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
MAX_WRITING, MAX_EXPORTING = 3, 8
"""Results of batches that are written or uploaded at once, and outputs of jobs, which may be long:
the threads are those of callers' files, too."""

Turn = Callable[[], AbstractAsyncContextManager[None]]
"""Within what it gives, an owner writes."""


async def until_uploaded(
    upload: Callable[[], None], store: Store, record: JobRecord, progress: ProgressSink, turn: Turn
) -> None:
    """Call `upload` in a thread, in turn; while the storage does not answer, wait, say so, and try
    again.

    Raises StorageUnreachableError once the job's state is another (it was cancelled or paused), and
    what else `upload` raises.
    """
    delay_s = FIRST_DELAY_S
    while True:
        progress("uploading", 0, 0)
        try:
            async with turn():
                await in_thread(upload)
            return
        except StorageUnreachableError as error:
            log.warning("%s: %s", record.id, error)
            progress(f"{record.state}, waiting to upload: {error}", 0, 0)
            now = await until_reached(jobs.get, store, record.id)
            if now.state is not record.state:
                raise
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


RETRY_INTERVAL_S = 30.0
INPUT_TRIES = 3
"""How often the input of a batch that has to end is read in vain, before the batch ends without."""
NEVER_RAN_IN_BATCH = {
    JobState.CANCELLED: RowError(
        "batch_cancelled", "This request could not be executed before the batch was cancelled."
    ),
    JobState.EXPIRED: RowError(
        "batch_expired", "This request could not be executed before the completion window expired."
    ),
}


async def end_batch(
    store: Store,
    record: JobRecord,
    *,
    links: Path,
    place: FileBytes,
    progress: ProgressSink,
    door: FairDoor,
) -> None:
    """Write the files of results, bring them where files lie, and end the job. `door` lets few in.

    What cannot be written is tried again for as long as the job waits for it: the batch has no
    state for that. An input that cannot be read is missed `INPUT_TRIES` times, and by a batch whose
    rows are all done until its deadline; then the lines of the files do without their custom ids.
    """
    batch = await until_reached(batches.find, store, record.id)
    assert batch is not None
    turn = partial(door.passed, batch.owner or OPERATOR.id)
    num_misses = 0
    while record.state in {JobState.FINALIZING, JobState.CANCELLING}:
        write = partial(_write, store, record, links=links, folder=place.spool, progress=progress)
        is_lost = num_misses >= INPUT_TRIES and not _may_wait(record)
        try:
            async with turn():
                found = await until_read_or_written(write, is_input_lost=is_lost)
            bring = partial(
                until_uploaded, store=store, record=record, progress=progress, turn=turn
            )
            await _keep(found, place, bring)
        except BatchrunError as error:
            num_misses += isinstance(error, DataError)
            log.error("%s: its results cannot be written: %s", record.id, error)
            progress(f"{record.state}, cannot write its results: {error}", 0, 0)
            await asyncio.sleep(RETRY_INTERVAL_S)
        else:
            await _finish(store, record, found, place)
        record = await until_reached(jobs.get, store, record.id)


def _may_wait(record: JobRecord) -> bool:
    """Whether there is still time for somebody to put the input back."""
    is_done = record.ends_as is JobState.COMPLETED
    return is_done and record.expires_at is not None and time.time() < record.expires_at


async def _keep(
    found: ResultFiles, place: FileBytes, bring: Callable[..., Awaitable[None]]
) -> None:
    """Raises BatchrunError; the files are marked then, for others are written in their place."""
    try:
        for file_id in _ids(found):
            await bring(partial(place.keep, file_id))
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
    await until_stored(remove_input, store, place, record.id)


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
        return ResultFiles(None, None, 0)
    batch = batches.find(store, record.id)
    assert batch is not None and record.ends_as is not None
    with _custom_ids(record, links, is_input_lost=is_input_lost) as custom_ids:
        return write_batch_files(
            folder,
            batch,
            results.read(store, record.seq),
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
        except StorageUnreachableError:
            raise
        except (DataError, StorageError, StoreError) as error:
            if not is_input_lost:
                raise DataError(str(error)) from error
            log.warning("%s: ends without the custom ids of its input: %s", record.id, error)
        if data is None or is_input_lost:
            yield salvage_custom_ids(data, record.num_rows)
        else:
            yield read_custom_ids(data)


OUTPUT_RETRY_S = 30.0
OUTPUT_TRIES = 3
"""So often it is tried to write the output of a job whose deadline has passed; then the job ends
without: its results are in the store."""


@dataclass(slots=True)
class JobEnd:
    """Writes output files and ends jobs. `pause(job_id, reason)`: the file cannot be written.

    `files` is where the files lie that batches of OpenAI's API end with; None: there are no
    batches. What a deadline ended is tried again after `retry_s`.
    """

    store: Store
    writer: ResultWriter
    links: Path
    stages: dict[str, Stage]
    pause: Callable[[str, str], Awaitable[None]]
    files: FileBytes | None = None
    _closing: dict[int, asyncio.Lock] = field(default_factory=dict)
    _door: FairDoor = field(default_factory=partial(FairDoor, MAX_WRITING))
    _exports: FairDoor = field(default_factory=partial(FairDoor, MAX_EXPORTING))
    retry_s: float = OUTPUT_RETRY_S
    _retry_at_s: dict[int, float] = field(default_factory=dict)
    _num_failures: Counter[int] = field(default_factory=Counter)

    async def close(self, record: JobRecord) -> None:
        """Write the output file, then end the job. One at a time: an export cannot be stopped."""
        await self.writer.flush()
        async with self._closing.setdefault(record.seq, asyncio.Lock()):
            now = await until_reached(jobs.get, self.store, record.id)
            if now.state not in {JobState.FINALIZING, JobState.CANCELLING}:
                return
            stage = self.stages.setdefault(record.id, Stage())
            try:
                # The output may need the room that the copy of its rows takes.
                await self._remove_kept(rows_file(self.links, record.id))
                if await (self._end_batch if now.is_batch else self._export)(now, stage):
                    await self._remove_kept(plan_file(self.links, record.id))
            finally:
                self.stages.pop(record.id, None)

    def may_try(self, job_seq: int) -> bool:
        """Whether the output file was not found to be unwritable a moment ago."""
        now_s = time.monotonic()
        return self._retry_at_s.get(job_seq, now_s) <= now_s

    async def _remove_kept(self, path: Path) -> None:
        with suppress(OSError):
            await asyncio.to_thread(path.unlink)

    async def _end_batch(self, record: JobRecord, stage: Stage) -> bool:
        assert self.files is not None
        end = partial(end_batch, links=self.links, place=self.files, door=self._door)
        await end(self.store, record, progress=stage)
        return True

    async def _write(self, record: JobRecord, stage: Stage) -> None:
        """The output file, or the object that is made of it. Who cancels a job does not wait for
        object storage: its results can be written later."""
        work = partial(export, self.store, record, links=self.links, progress=stage)
        turn = partial(self._exports.passed, OPERATOR.id)
        place = record.output_path
        if not is_url(place):
            async with turn():
                await until_read_or_written(work)
            return
        exits = ExitStack()
        folder = await in_thread(exits.enter_context, scratch_folder(self.links))
        try:
            copy = folder / name_of(place)
            async with turn():
                await until_read_or_written(work, to=copy)
            bring = partial(upload, copy, place)
            if record.state is JobState.FINALIZING:
                await until_uploaded(bring, self.store, record, stage, turn)
            else:
                async with turn():
                    await in_thread(bring)
        finally:
            await in_thread(exits.close)

    def _gives_up(self, record: JobRecord) -> bool:
        """Its output could not be written once more; whether it ends without."""
        is_overdue = record.ends_as is JobState.EXPIRED
        self._num_failures[record.seq] += is_overdue
        return is_overdue and self._num_failures[record.seq] >= OUTPUT_TRIES

    async def _export(self, record: JobRecord, stage: Stage) -> bool:
        """Whether the job has ended; else it waits for its output to be written."""
        reason = None
        try:
            await self._write(record, stage)
        except BatchrunError as error:
            reason = f"output not written: {error}"
        may_wait = reason is not None and record.state is JobState.FINALIZING
        if may_wait and not self._gives_up(record):
            assert reason is not None
            self._retry_at_s[record.seq] = time.monotonic() + self.retry_s
            await self.pause(record.id, reason)
            return False
        if record.ends_as is JobState.FAILED and record.state is JobState.FINALIZING:
            reason = await until_reached(_common_error, self.store, record)
        finish: Callable[..., JobRecord] = partial(
            jobs.finish, now_s=time.time(), reason=reason, exported=record
        )
        try:
            ended = await until_stored(finish, self.store, record.id)
        except StateError as error:
            log.info("%s", error)
            return False
        log.info("%s: %s, %s", ended.id, ended.state, ended.reason or ended.output_path)
        return True


SAMPLE_ROWS = 1_000


def _common_error(store: Store, record: JobRecord) -> str:
    """Why a job whose rows all failed is of no use: the error that most of its first rows have."""
    failed = results.read(store, record.seq, failed_only=True, limit=SAMPLE_ROWS)
    messages = Counter(result.error.message for result in failed if result.error is not None)
    return f"every row failed: {messages.most_common(1)[0][0]}"


INTERVAL_S = 3600.0
EXPIRY_INTERVAL_S = 60.0


async def remove_old_results(
    store: Store, links: Path, kept_in: Sequence[Path], *, age_s: float | None
) -> None:
    """Remove, now and every hour, what is kept of jobs that have ended, uploads that never became
    one, and unless `age_s` is None the results of those that ended so long ago, and the links of
    inputs and rows in `kept_in` that nothing needs; cancel to end."""
    while True:
        try:
            await asyncio.to_thread(_remove_left, store, links)
            if age_s is None:
                await asyncio.to_thread(_remove_drafts, store, kept_in)
            else:
                await asyncio.to_thread(_remove, store, links, kept_in, age_s)
        except (StoreError, OSError) as error:
            log.error("what is old could not be removed: %s", error)
        await asyncio.sleep(INTERVAL_S)


async def remove_expired_files(store: Store, place: FileBytes | None) -> None:
    """Remove, now and every minute, the files of OpenAI's API that have expired, and finish what
    object storage did not take at once; cancel to end."""
    while place is not None:
        try:
            removed = await in_thread(remove_expired, store, place, now_s=time.time())
            for file in removed:
                log.info("%s expired", file.id)
            await in_thread(sweep_files, store, place)
        except (StoreError, StorageError, OSError) as error:
            log.error("files are not where they should be: %s", error)
        await asyncio.sleep(EXPIRY_INTERVAL_S)


def _remove_left(store: Store, links: Path) -> None:
    """What is kept of jobs that have ended: a kill leaves some, and the end by another daemon."""
    for job_id, paths in kept_files(links).items():
        with suppress(UnknownJobError):
            record = jobs.get(store, job_id)
            if record.id == job_id and record.state.is_terminal:
                for path in paths:
                    path.unlink(missing_ok=True)


def _remove_drafts(store: Store, kept_in: Sequence[Path]) -> None:
    """Only the page's drafts are folders among what is kept; those with answers were jobs."""
    now_s = time.time()
    old = [unused.path for unused in find_unused_rows([], kept_in=kept_in, now_s=now_s)]
    drafts = {path for path in old if path.is_dir() and not any(path.glob("answers.*"))}
    records = jobs.list_jobs(store) if drafts else []
    for unused in find_unused_rows(records, kept_in=kept_in, now_s=now_s):
        if unused.path in drafts:
            remove(unused)


def _remove(store: Store, links: Path, kept_in: Sequence[Path], age_s: float) -> None:
    """Rows first, files after: what a kill leaves is found again by the next call."""
    now_s = time.time()
    for record in find_removable(store, ended_before_s=now_s - age_s):
        for _ in remove_results(store, record, now_s=now_s):
            pass
        log.info("%s: its results were removed", record.id)
    records = jobs.list_jobs(store)
    rows = find_unused_rows(records, kept_in=kept_in, now_s=now_s)
    # A link that goes renews the ctime of the rows that it is a link to: so rows go before links.
    for unused in (*rows, *find_unused_links(records, links=links, now_s=now_s)):
        remove(unused)
