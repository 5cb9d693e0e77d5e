"""Commands that read what a job has produced: results, errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from batchrun.cli.console import (
    HomeOption,
    JobArgument,
    JsonOption,
    ProgressBar,
    answer,
    columns,
    note,
)
from batchrun.daemon.ending import export
from batchrun.daemon.view import output_path
from batchrun.errors import InputError, StateError, UnknownJobError
from batchrun.files import check_place, is_url, name_of, scratch_folder
from batchrun.home import Home
from batchrun.jobs import objects
from batchrun.jobs.spec import JobSpec
from batchrun.store import jobs as job_records
from batchrun.store import results as result_records
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState

OUTPUT_SUFFIXES = (".parquet", ".jsonl")


def results(
    job: JobArgument,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="File or s3:// URL to write: .parquet or .jsonl."
        ),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write the rows done so far of an unfinished job.")
    ] = False,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Print where a job's output is, or write it to another file."""
    with stored_job(job, home) as (store, record):
        if not partial:
            _check_finished(store, record, is_copy=output is not None)
        if output is None and partial:
            raise InputError("--partial needs a file to write to: -o PATH")
        place = output_path(record) if output is None else _checked_output(output, record)
        num_rows = record.num_rows
        if output is not None or not _exists(place):
            with ProgressBar() as progress, _path_to_write(place, home) as path:
                num_rows = export(
                    store,
                    record,
                    path=path,
                    links=home.inputs,
                    is_partial=partial,
                    progress=progress,
                )
    answer({"id": record.id, "path": place, "rows": num_rows}, place, as_json=as_json)


def errors(
    job: JobArgument,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Most rows to show.")] = 20,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Show which rows of a job failed, and why."""
    with stored_job(job, home) as (store, record):
        counts = result_records.count(store, record.seq)
        failed = list(result_records.read(store, record.seq, failed_only=True, limit=limit))
    rows = [
        {
            "row": result.row,
            "attempts": result.attempts,
            "code": result.error.code,
            "status_code": result.error.status_code,
            "message": result.error.message,
        }
        for result in failed
        if result.error is not None
    ]
    shown: list[RenderableType] = []
    if record.reason is not None:
        shown.append(f"{record.id} {record.state}: {record.reason}")
    if rows:
        keys = ("row", "attempts", "code", "message")
        shown.append(columns(*keys, rows=([str(row[key]) for key in keys] for row in rows)))
    else:
        shown.append(f"{record.id}: no row has failed")
    document = {"id": record.id, "num_failed": counts.num_failed, "errors": rows}
    answer(document, *shown, as_json=as_json)
    if counts.num_failed > len(rows) and not as_json:
        note(f"{counts.num_failed - len(rows):,} more; --limit shows them")


@contextmanager
def stored_job(job: str, home: Home) -> Iterator[tuple[Store, JobRecord]]:
    """A job as it stands in the store, beside a daemon or without one."""
    if not home.has_store:
        raise UnknownJobError(f"{job}: no such job; {home.path} holds no jobs yet")
    with closing(open_store(home.store_location)) as store:
        yield store, job_records.get(store, job)


def _checked_output(output: str, record: JobRecord) -> str:
    """The file or object to write, made absolute. Raises InputError."""
    if not output.endswith(OUTPUT_SUFFIXES):
        raise InputError(f"-o {output}: must end in .parquet or .jsonl")
    try:
        place = check_place(output) if is_url(output) else str(Path(output).absolute())
    except ValueError as error:
        raise InputError(f"-o {error}") from None
    if place in JobSpec.model_validate_json(record.spec).input.path:
        raise InputError(f"-o {output}: would overwrite the job's input file")
    return place


def _exists(place: str) -> bool:
    return objects.exists(place) if is_url(place) else Path(place).exists()


@contextmanager
def _path_to_write(place: str, home: Home) -> Iterator[Path]:
    """Where to write a file: the place itself, or a scratch file that becomes the object there."""
    if not is_url(place):
        yield Path(place)
        return
    with scratch_folder(home.inputs) as folder:
        copy = folder / name_of(place)
        yield copy
        objects.put(copy, place)


def _check_finished(store: Store, record: JobRecord, *, is_copy: bool) -> None:
    """Raises StateError while rows are to come, or the job's own output file is.

    A copy needs no more than the results: it can be written elsewhere when the disk is full.
    """
    if record.state in {JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED}:
        return
    num_done = result_records.count(store, record.seq).num_done
    if is_copy and num_done == record.num_rows:
        return
    why, then = "", "`batchrun status --watch` shows the others coming"
    if record.state is JobState.PAUSED:
        why, then = f" ({record.reason})", f"`batchrun resume {record.id}` goes on with the others"
    raise StateError(
        f"{record.id} is {record.state}{why} with {num_done:,} of {record.num_rows:,} rows done; "
        f"--partial -o PATH writes those, {then}"
    )
