"""From a batch of OpenAI's API to a job that the store can take, and on to one that can run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from batchrun.errors import DataError
from batchrun.inputs import InputPin, keep_input, open_input
from batchrun.inputs.batch_lines import BatchLines
from batchrun.jobspec import InputSpec, JobSpec, OutputSpec
from batchrun.output.file_bytes import FileBytes, local_file
from batchrun.store import JobRecord, NewJob
from batchrun.store.batches import BatchError, BatchRecord, ValidInput, new_batch_id
from batchrun.store.files import FileRecord
from batchrun.types import ProgressSink

JOB_NAME = "batch"
MAX_INPUT_BYTES = 209_715_200
NOTHING_PINNED = InputPin(files=(), num_rows=0)


def new_batch_job(folder: Path, endpoint: str, *, deadline_s: float, weight: float) -> NewJob:
    """A job without rows, whose input is yet to be validated.

    `batchrun results` writes its answers to a file in `folder` when it is asked to; its result
    files of the API are made in any case.
    """
    batch_id = new_batch_id()
    spec = JobSpec.model_validate({
        "name": JOB_NAME,
        "endpoint": endpoint,
        "input": InputSpec(path=(str(folder / batch_id),), format="openai-batch"),
        "output": OutputSpec(path=str(folder / f"{batch_id}.jsonl")),
        "deadline": deadline_s,
        "weight": weight,
    })
    return NewJob(
        id=batch_id,
        name=JOB_NAME,
        spec=spec.model_dump_json(),
        pin=NOTHING_PINNED.model_dump_json(),
        content_hash=spec.content_hash(),
        num_rows=0,
        deadline_s=deadline_s,
    )


def check_input(batch: BatchRecord, file: FileRecord | None) -> list[BatchError]:
    """What is wrong with a batch's input before its first line is looked at."""
    if file is None:
        return [_cannot_find(batch)]
    if file.purpose != "batch":
        message = (
            f"The file {file.id} has the purpose '{file.purpose}', and the input of a batch needs "
            "'batch'."
        )
        return [BatchError("invalid_request", message, "file_id")]
    if file.size_bytes > MAX_INPUT_BYTES:
        message = f"The batch input file is larger than the {MAX_INPUT_BYTES} maximum for a batch"
        return [BatchError("file_too_large", message)]
    return []


def validate_input(
    batch: BatchRecord,
    place: FileBytes,
    models: Collection[str],
    *,
    links: Path,
    progress: ProgressSink | None = None,
) -> ValidInput | list[BatchError]:
    """Check every line of a batch's input, and pin it; or say what is wrong. Blocking.

    The input is linked into `links`, so that the job outlives the deletion of the file. Raises
    StorageError and StoreError.
    """
    lines = BatchLines(batch.endpoint, models)
    file_id = batch.input_file_id
    try:
        with local_file(place, file_id, scratch=links) as path:
            lines.read(path, progress)
            if lines.errors:
                return lines.errors
            assert lines.model is not None
            spec = _spec_of(batch.job, str(path), lines.model)
            with open_input(spec.input) as data:
                pin = data.pin(progress)
            is_copy = path.parent != place.spool
            origin = place.place_of(file_id) if is_copy else str(path)
            pin = keep_input(pin, {str(path): origin} if is_copy else {}, links)
    except (OSError, DataError):
        return [_cannot_find(batch)]
    spec = _spec_of(batch.job, origin, lines.model)
    return ValidInput(
        model=lines.model,
        spec=spec.model_dump_json(),
        pin=pin.model_dump_json(),
        content_hash=spec.content_hash(),
        num_rows=pin.num_rows,
        num_enqueued_tokens=lines.num_tokens,
    )


def _spec_of(job: JobRecord, path: str, model: str) -> JobSpec:
    spec = JobSpec.model_validate_json(job.spec)
    given = spec.input.model_copy(update={"path": (path,)})
    return spec.model_copy(update={"input": given, "model": model})


def _cannot_find(batch: BatchRecord) -> BatchError:
    message = (
        f"Cannot find file {batch.input_file_id}, or organization batchrun does not have access to "
        "it."
    )
    return BatchError("invalid_request", message, "file_id")
