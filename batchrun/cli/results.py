"""Commands that read what a job has produced: results, errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from batchrun.control.submitting import stored_job
from batchrun.daemon.ending import export
from batchrun.errors import DataError, InputError, StateError, StorageError, StoreError
from batchrun.files import check_place, is_url, name_of, scratch_folder
from batchrun.home import Home
from batchrun.jobs.pin import InputPin
from batchrun.jobs.results.output_parts import holds_input, is_written, upload
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import open_submitted
from batchrun.store import results as result_records
from batchrun.store.database import Store
from batchrun.store.jobs import JobRecord, note_output
from batchrun.types import JobState

OUTPUT_SUFFIXES = (".parquet", ".jsonl")
STDOUT = "-"


def results(
    job: JobArgument,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File or s3:// URL to write: .parquet or .jsonl; - for JSONL on stdout.",
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
            raise InputError("--partial needs a file to write to: -o PATH, or -o - for stdout")
        if output == STDOUT:
            if as_json:
                raise InputError("-o - writes the rows to stdout; leave out --json")
            export(store, record, to=sys.stdout.buffer, links=home.inputs, is_partial=partial)
            sys.stdout.buffer.flush()
            return
        spec = JobSpec.model_validate_json(record.spec)
        place = record.output_path if output is None else _checked_output(output, record)
        num_rows = record.num_rows
        is_there = record.has_output and is_written(place, spec.output.rows_per_file)
        if output is None and is_there:
            result_records.refuse_replaced(store, record)
        if output is not None or not is_there:
            with ProgressBar() as progress, _path_to_write(place, home) as path:
                num_rows = export(
                    store,
                    record,
                    to=path,
                    links=home.inputs,
                    is_partial=partial,
                    progress=progress,
                )
            if output is None:
                note_output(store, record.id)
    answer({"id": record.id, "path": place, "rows": num_rows}, place, as_json=as_json)


def errors(
    job: JobArgument,
    *,
    limit: Annotated[
        int, typer.Option(min=1, help="Most causes, and rows of --json, to show.")
    ] = 20,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Show why rows of a job failed, and which: by cause, the most rows first."""
    with stored_job(job, home) as (store, record):
        counts = result_records.count(store, record.seq)
        failed = list(result_records.read(store, record.seq, failed_only=True, limit=MOST_GROUPED))
        ids = _ids_of(record, [result.row for result in failed], home)
    rows = [
        {
            "row": result.row,
            "id": row_id,
            "attempts": result.attempts,
            "code": result.error.code,
            "status_code": result.error.status_code,
            "message": result.error.message,
        }
        for result, row_id in zip(failed, ids, strict=True)
        if result.error is not None
    ]
    groups = _grouped(rows)
    shown: list[RenderableType] = []
    if record.reason is not None:
        shown.append(f"{record.id} {record.state}: {record.reason}")
    if rows:
        lines = ([str(each) for each in group.values()] for group in groups[:limit])
        shown.append(columns("rows", "code", "message", "ids", rows=lines))
    else:
        shown.append(f"{record.id}: no row has failed")
    document = {
        "id": record.id,
        "num_failed": counts.num_failed,
        "errors": rows[:limit],
        "causes": groups[:limit],
    }
    answer(document, *shown, as_json=as_json)
    if counts.num_failed > len(failed):
        note(f"of the first {len(failed):,} of {counts.num_failed:,} failed rows")
    if len(groups) > limit and not as_json:
        note(f"{len(groups) - limit:,} more causes; --limit shows them")


MOST_GROUPED = 100_000
MOST_IDS = 5
_PARTICULAR = re.compile(r"""'[^']*'|"[^"]*"|[0-9][0-9,.]*""")
"""What differs between rows that failed alike: what is quoted, and numbers."""


def _grouped(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Rows that failed alike, the most first: how many, the first's error, some of their ids."""
    alike: dict[tuple[object, str], tuple[object, list[object]]] = {}
    for row in rows:
        cause = row["code"], _PARTICULAR.sub("...", str(row["message"]))
        alike.setdefault(cause, (row["message"], []))[1].append(row["id"])
    return [
        {
            "num_rows": len(ids),
            "code": code,
            "message": first,
            "ids": ", ".join(map(str, ids[:MOST_IDS])) + (", ..." if len(ids) > MOST_IDS else ""),
        }
        for (code, _), (first, ids) in sorted(alike.items(), key=lambda item: -len(item[1][1]))
    ]


def _ids_of(record: JobRecord, rows: Sequence[int], home: Home) -> Sequence[str]:
    """The ids of rows; their numbers where they have no others, or the input cannot be read."""
    spec = JobSpec.model_validate_json(record.spec)
    if not rows or (spec.input.id is None and not spec.is_openai_batch):
        return [str(row) for row in rows]
    try:
        data = open_submitted(record, spec, links=home.inputs)
    except (DataError, StorageError, StoreError):
        return [str(row) for row in rows]
    with data:
        columns = [] if data.id_column is None else [data.id_column]
        read = data.read_rows(rows, columns)
        return [data.row_id(values, row) for values, row in zip(read, rows, strict=True)]


def _checked_output(output: str, record: JobRecord) -> str:
    """The file or object to write, made absolute. Raises InputError."""
    if not output.endswith(OUTPUT_SUFFIXES):
        raise InputError(f"-o {output}: must end in .parquet or .jsonl")
    try:
        place = check_place(output) if is_url(output) else str(Path(output).absolute())
    except ValueError as error:
        raise InputError(f"-o {error}") from None
    files = InputPin.model_validate_json(record.pin).files
    if holds_input(place, (file.path for file in files)):
        raise InputError(f"-o {output}: would overwrite the job's input file")
    return place


@contextmanager
def _path_to_write(place: str, home: Home) -> Iterator[Path]:
    """Where to write a file: the place itself, or a scratch file that becomes the object there."""
    if not is_url(place):
        yield Path(place)
        return
    with scratch_folder(home.inputs) as folder:
        copy = folder / name_of(place)
        yield copy
        upload(copy, place)


def _check_finished(store: Store, record: JobRecord, *, is_copy: bool) -> None:
    """Raises StateError while rows are to come, or the job's own output file is.

    A copy needs no more than the results: it can be written elsewhere when the disk is full.
    """
    if record.state in {JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED}:
        return
    num_done = result_records.count(store, record.seq).num_done
    is_failed = record.state is JobState.FAILED
    if (is_copy or is_failed) and num_done == record.num_rows:
        return
    why, then = "", "`batchrun status --watch` shows the others coming"
    if record.state is JobState.PAUSED:
        why, then = f" ({record.reason})", f"`batchrun resume {record.id}` goes on with the others"
    raise StateError(
        f"{record.id} is {record.state}{why} with {num_done:,} of {record.num_rows:,} rows done; "
        f"--partial -o PATH writes those, {then}"
    )
