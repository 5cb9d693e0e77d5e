"""The end of a job: every row in the output file, exactly once, in input order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batchrun.jobspec import JobSpec
from batchrun.output import ResultRow, write_output
from batchrun.remote import is_url
from batchrun.store import JobRecord, Store, results
from batchrun.submission import open_submitted
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
    path: Path | None = None,
    is_partial: bool = False,
    progress: ProgressSink | None = None,
) -> int:
    """Write a job's output file (to `path`, or where its spec says); returns its number of rows.
    An output that is an object needs a `path`, to be uploaded from.

    A partial one leaves out rows without a result; otherwise they carry the error of how the job
    ends. Blocking. Raises StoreFullError, InputError and DataError, and then leaves no
    half-written file behind; StateError when the results were removed.
    """
    results.refuse_removed(store, record.seq)
    spec = JobSpec.model_validate_json(record.spec)
    data = open_submitted(record, spec, links=links)
    ends_as = record.ends_as or record.state
    assert path is not None or not is_url(spec.output.path)
    try:
        return write_output(
            Path(spec.output.path) if path is None else path,
            stored_rows(store, record.seq),
            spec=spec,
            data=data,
            missing=None if is_partial else NEVER_RAN.get(ends_as),
            progress=progress,
        )
    finally:
        data.close()


def stored_rows(store: Store, job_seq: int) -> Iterator[ResultRow]:
    """What the store holds of the finished rows of a job, in row order."""
    for result in results.read(store, job_seq):
        yield ResultRow(
            row=result.row,
            response_body=result.body,
            error=result.error,
            finish_reason=result.finish_reason,
            usage=result.usage,
            attempts=result.attempts,
        )
