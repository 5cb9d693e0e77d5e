"""From a job file to a job that the store can take: checked, pinned, nothing started yet."""

from __future__ import annotations

from pathlib import Path

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

    Raises JobSpecError (a template or a kept column does not fit the input) and DataError (the
    input cannot be read, is empty, or repeats an id).
    """
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


def open_submitted(record: JobRecord, spec: JobSpec, *, links: Path) -> InputData:
    """The input as it was at submission. Raises DataError naming the file that changed."""
    pin = InputPin.model_validate_json(record.pin)
    verify_pin(pin, links=links)
    return open_pinned(spec.input, pin, links=links)
