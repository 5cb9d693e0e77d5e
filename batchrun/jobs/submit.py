"""From a job file to a job that the store can take: checked, pinned, nothing started yet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchrun.errors import DataError, JobSpecError, MissingObjectError
from batchrun.files import is_url
from batchrun.jobs import objects
from batchrun.jobs.inputs.data import InputData, check_columns, check_ids, open_input, open_pinned
from batchrun.jobs.pin import InputPin, fetched_input, keep_input, verify_pin
from batchrun.jobs.prompts.template import RequestTemplate, RowRenderError
from batchrun.jobs.spec import JobSpec
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.types import ProgressSink

FIRST_ROWS = 16
FIRST_BYTES = 1 << 20
"""How much of the input is tried on the template at submission; the daemon reads all of it."""


def prepare_job(spec: JobSpec, *, links: Path, progress: ProgressSink | None = None) -> NewJob:
    """Check a job against its input and pin the input (linked into `links` where possible; objects
    are copied there).

    Raises JobSpecError (a template or a kept column does not fit the input, or the output cannot
    be written where it should go), DataError (the input cannot be read, is empty, or repeats an
    id), StorageError and StoreFullError (an object cannot be had, or there is no room for it).
    """
    _check_output_place(spec)
    pin = _pin(spec, links, progress)
    return NewJob(
        name=spec.name,
        spec=spec.model_dump_json(),
        pin=pin.model_dump_json(),
        content_hash=spec.content_hash(),
        num_rows=pin.num_rows,
        deadline_s=spec.deadline_s,
    )


def pin_anew(record: JobRecord, *, links: Path) -> str:
    """The pin of a job's input as it is now, checked as at submission.

    Rows keep their numbers, and those with a result keep it. Raises JobSpecError and DataError, the
    latter also when there are more or fewer rows than before.
    """
    spec = JobSpec.model_validate_json(record.spec)
    pin = _pin(spec, links, None)
    if pin.num_rows != record.num_rows:
        raise DataError(
            f"{record.id}: its input has {pin.num_rows:,} rows now and had {record.num_rows:,}; "
            "put the old file back, or cancel the job and submit the new file"
        )
    return pin.model_dump_json()


@contextmanager
def checked_job(
    spec: JobSpec, *, scratch: Path, progress: ProgressSink | None = None
) -> Iterator[tuple[InputData, RequestTemplate]]:
    """A job's input, with all the checks of `prepare_job` made and nothing kept.

    Copies of objects lie in `scratch` meanwhile. Raises what `prepare_job` raises.
    """
    _check_output_place(spec)
    with fetched_input(spec.input, scratch, progress) as (given, _), open_input(given) as data:
        template, _ = _checked(spec, data, progress)
        yield data, template


def _pin(spec: JobSpec, links: Path, progress: ProgressSink | None) -> InputPin:
    with fetched_input(spec.input, links, progress) as (given, origins):
        with open_input(given) as data:
            _, pin = _checked(spec, data, progress)
        return keep_input(pin, origins, links)


def _checked(
    spec: JobSpec, data: InputData, progress: ProgressSink | None
) -> tuple[RequestTemplate, InputPin]:
    """The template that fits the input, and what the files are now: pinning finds those that are
    being written to."""
    template = RequestTemplate(spec, data.columns, model=spec.model)
    check_columns(spec, data)
    _check_first_rows(data, template)
    check_ids(data, progress=progress)
    return template, data.pin(progress)


def _check_first_rows(data: InputData, template: RequestTemplate) -> None:
    """Raises DataError when every one of the first rows has the same fault: so will the rest."""
    reasons: list[str | None] = []
    for first_row, rows in data.iter_rows(template.columns_used, max_bytes=FIRST_BYTES):
        for number, row in enumerate(rows, first_row):
            try:
                template.render(row, row_number=number)
                reasons.append(None)
            except RowRenderError as problem:
                reasons.append(problem.row_error.message)
        if len(reasons) >= FIRST_ROWS:
            break
    if None not in reasons and len(set(reasons)) == 1:
        others = f", and all of the first {len(reasons)} rows" if len(reasons) > 1 else ""
        raise DataError(f"row 0{others}: {reasons[0]}")


def _check_output_place(spec: JobSpec) -> None:
    """Raises JobSpecError now for what would else show when all the work is done."""
    if is_url(spec.output.path):
        try:
            objects.check_bucket(spec.output.path)
        except MissingObjectError as error:
            raise JobSpecError(f"{spec.where('output.path')}: {error}") from None
        return
    path = Path(spec.output.path)
    folder = next(parent for parent in path.parents if parent.exists())
    if path.is_dir():
        problem = "is a folder; name a file"
    elif not folder.is_dir():
        problem = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"{folder} cannot be written to"
    else:
        return
    raise JobSpecError(f"{spec.where('output.path')}: {path}: {problem}")


def open_submitted(record: JobRecord, spec: JobSpec, *, links: Path) -> InputData:
    """The input as it was at submission. Raises DataError naming the file that changed."""
    pin = InputPin.model_validate_json(record.pin)
    verify_pin(pin, links=links)
    return open_pinned(spec.input, pin, links=links)
