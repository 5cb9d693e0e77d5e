"""From a batch of OpenAI's API to a job: its input file is checked, then the job can run.

The check is all or nothing. Each faulty line gives one error, the first that is found in it, in
OpenAI's words.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchrun.errors import DataError, StorageUnreachableError, shortened
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.inputs.rows import ROW_LIMIT_BYTES, find_lines, type_name
from batchrun.jobs.pin import InputPin, keep_input
from batchrun.jobs.prompts.image_tokens import guess_image_tokens
from batchrun.jobs.request_fields import IMPOSSIBLE
from batchrun.jobs.results.file_bytes import FileBytes, local_file
from batchrun.jobs.spec import InputSpec, JobSpec, OutputSpec
from batchrun.media.images import media_urls
from batchrun.store.batches import BatchError, BatchRecord, ValidInput, new_batch_id
from batchrun.store.files import FileRecord
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.strict import parse_json
from batchrun.types import ProgressSink

MAX_ERRORS = 100
MAX_REQUESTS = 50_000
MAX_EMBEDDING_INPUTS = 50_000
MAX_CUSTOM_ID_CHARS = 1_024
"""All ids of a batch are held at once."""
LINES_PER_REPORT = 1_000
BYTES_PER_TOKEN = 4
_KEY_TYPES: Mapping[str, type] = {"custom_id": str, "method": str, "url": str, "body": dict}
_ENDPOINT_NAMES = {
    "/v1/chat/completions": "Chat Completions",
    "/v1/completions": "Completions",
    "/v1/embeddings": "Embeddings",
    "/v1/responses": "Responses",
}


class _FaultError(Exception):
    """What is wrong with the line at hand."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = BatchError(code, message, param)


@dataclass(slots=True)
class BatchLines:
    """What a file holds, and what is wrong with it: nothing, when `errors` is empty.

    `models` are those that the engines serve; `model` is the one that all lines ask for.
    `num_tokens` is a guess at what the prompts hold, from the length of the lines and the size of
    the images in them.
    """

    endpoint: str
    models: Collection[str]
    model: str | None = None
    num_requests: int = 0
    num_tokens: int = 0
    errors: list[BatchError] = field(default_factory=list)
    _num_inputs: int = 0
    _ids: set[str] = field(default_factory=set)

    def read(self, path: Path, progress: ProgressSink | None = None) -> None:
        """Check the whole file, a line at a time. Raises OSError when it cannot be read."""
        with path.open("rb") as file:
            for number, line in _lines_of(file.fileno()):
                self._take(line, number)
                if self.num_requests > MAX_REQUESTS:
                    break
                if progress is not None and self.num_requests % LINES_PER_REPORT == 0:
                    progress("validating lines", number, 0)
        self._check_whole()

    def _take(self, line: bytes | None, number: int) -> None:
        self.num_requests += 1
        self.num_tokens += -(-len(line or b"") // BYTES_PER_TOKEN)
        if len(self.errors) >= MAX_ERRORS:
            return
        try:
            self._check(_request_in(line))
        except _FaultError as fault:
            self.errors.append(replace(fault.error, line=number))

    def _check_whole(self) -> None:
        if self.num_requests == 0:
            message = (
                "The input file is empty. Please ensure that the batch contains at least one "
                "request."
            )
            self.errors = [BatchError("empty_file", message)]
        elif self.num_requests > MAX_REQUESTS:
            message = f"The input file has more than {MAX_REQUESTS} requests, the most of a batch."
            self.errors = [BatchError("too_many_tasks", message)]
        elif self._num_inputs > MAX_EMBEDDING_INPUTS:
            message = (
                f"The requests hold {self._num_inputs} inputs together, and a batch may have "
                f"{MAX_EMBEDDING_INPUTS}."
            )
            self.errors.append(BatchError("too_many_tasks", message))

    def _check(self, request: Mapping[str, object]) -> None:
        custom_id, body = request["custom_id"], request["body"]
        assert isinstance(custom_id, str) and isinstance(body, dict)
        if not custom_id:
            raise _FaultError("invalid_value", "Invalid 'custom_id': it is empty.", "custom_id")
        if len(custom_id) > MAX_CUSTOM_ID_CHARS:
            message = (
                "Invalid 'custom_id': string too long. Expected a string with maximum length "
                f"{MAX_CUSTOM_ID_CHARS}, but got a string with length {len(custom_id)} instead."
            )
            raise _FaultError("string_above_max_length", message, "custom_id")
        if custom_id in self._ids:
            raise _FaultError(
                "duplicate_custom_id",
                f"The custom_id '{shortened(custom_id)}' for this request is a duplicate of "
                "another request. The custom_id "
                "parameter must be unique for each request in a batch.",
                "custom_id",
            )
        self._ids.add(custom_id)
        if request["method"] != "POST":
            method = shortened(str(request["method"]))
            message = f"Invalid method '{method}': a batch takes 'POST' only."
            raise _FaultError("invalid_method", message, "method")
        if request["url"] != self.endpoint:
            message = "The URL provided for this request does not match the batch endpoint."
            raise _FaultError("invalid_url", message, "url")
        self._check_body(body)

    def _check_body(self, body: Mapping[str, object]) -> None:
        model = body.get("model")
        if model is None or model == "":
            raise _FaultError("invalid_request", "Model parameter is required.", "body.model")
        if not isinstance(model, str):
            raise _wrong_type("body.model", str, model)
        if self.endpoint == "/v1/chat/completions" and "messages" not in body:
            raise _missing("messages", "body.messages")
        if body.get("stream"):
            name = _ENDPOINT_NAMES[self.endpoint]
            message = f"{name}: Streaming is not supported in the Batch API."
            raise _FaultError("streaming_unsupported", message, "body.stream")
        for name, why in IMPOSSIBLE.items():
            if body.get(name):
                raise _FaultError("invalid_request", f"{name} {why}", f"body.{name}")
        self._check_model(model)
        for kind, url in media_urls(body):
            if kind == "image":
                self.num_tokens += guess_image_tokens(url) - len(url) // BYTES_PER_TOKEN
        if self.endpoint == "/v1/embeddings":
            self._num_inputs += _num_embedding_inputs(body.get("input"))

    def _check_model(self, model: str) -> None:
        self.model = self.model or model
        if model != self.model:
            raise _FaultError(
                "mismatched_model",
                f"The model '{shortened(model)}' for this request does not match the rest of the "
                "batch. Each batch must contain requests for a single model.",
                "body.model",
            )
        if model not in self.models:
            message = f"The provided model '{shortened(model)}' is not supported by the Batch API."
            raise _FaultError("model_not_found", message, "body.model")


def _lines_of(file_no: int) -> Iterator[tuple[int, bytes | None]]:
    """Number and text of each line that is not blank; None for one of over `ROW_LIMIT_BYTES`."""
    for lines in find_lines(file_no):
        for number, start, end in zip(*(each.tolist() for each in lines), strict=True):
            is_long = end - start > ROW_LIMIT_BYTES
            yield number, None if is_long else os.pread(file_no, end - start, start)


def _request_in(line: bytes | None) -> Mapping[str, object]:
    """The line's object, with all keys of a request in their types."""
    if line is None:
        message = f"This line holds over {ROW_LIMIT_BYTES >> 20} MiB."
        raise _FaultError("invalid_json_line", message)
    try:
        request = parse_json(line)
    except ValueError:
        message = "This line is not parseable as valid JSON."
        raise _FaultError("invalid_json_line", message) from None
    if not isinstance(request, dict):
        message = f"Each line must be a JSON object, but this one is {type_name(request)}."
        raise _FaultError("invalid_request", message)
    for key in _KEY_TYPES:
        if key not in request:
            raise _missing(key, key)
    for key, wanted in _KEY_TYPES.items():
        if not isinstance(request[key], wanted):
            raise _wrong_type(key, wanted, request[key])
    return request


def _missing(name: str, param: str) -> _FaultError:
    return _FaultError(
        "missing_required_parameter", f"Missing required parameter: '{name}'.", param
    )


def _wrong_type(param: str, wanted: type, value: object) -> _FaultError:
    expected = type_name(wanted())
    message = (
        f"Invalid type for '{param}': expected {expected}, but got {type_name(value)} instead."
    )
    return _FaultError("invalid_type", message, param)


def _num_embedding_inputs(value: object) -> int:
    """How many inputs a body asks for: a list of numbers is one, given as tokens."""
    is_many = isinstance(value, list) and any(isinstance(item, str | list) for item in value)
    return len(value) if isinstance(value, list) and is_many else 1


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
    StorageError, also where the disk refuses for now what is there, and StoreError.
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
    except (OSError, DataError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise StorageUnreachableError(
                f"{place.place_of(file_id)}: cannot be read now: {cause.strerror or cause}"
            ) from None
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
