"""From a job file to a job that the store can take: checked, pinned, nothing started yet."""

from __future__ import annotations

import os
from pathlib import Path

from batchrun.errors import JobSpecError
from batchrun.inputs import (
    InputData,
    InputPin,
    RequestTemplate,
    check_columns,
    check_ids,
    hard_link_inputs,
    open_input,
    open_pinned,
    verify_pin,
)
from batchrun.jobspec import JobSpec
from batchrun.store import JobRecord, NewJob
from batchrun.types import ProgressSink


def prepare_job(spec: JobSpec, *, links: Path, progress: ProgressSink | None = None) -> NewJob:
    """Check a job against its input and pin the input (linked into `links` where possible).

    Raises JobSpecError (a template or a kept column does not fit the input, or the output cannot
    be written where it should go) and DataError (the input cannot be read, is empty, or repeats an
    id).
    """
    _check_output_place(spec)
    data = open_input(spec.input)
    try:
        RequestTemplate(spec, data.columns, model=spec.model)
        check_columns(spec, data)
        check_ids(data, progress=progress)
        pin = data.pin(progress)
    finally:
        data.close()
    hard_link_inputs(pin, links)
    return NewJob(
        name=spec.name,
        spec=spec.model_dump_json(),
        pin=pin.model_dump_json(),
        content_hash=spec.content_hash(),
        num_rows=pin.num_rows,
        deadline_s=spec.deadline_s,
    )


def _check_output_place(spec: JobSpec) -> None:
    """Raises JobSpecError now for what would else show when all the work is done."""
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
