"""The two files of results that a batch of OpenAI's API ends with: one line for each request."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from batchrun.errors import DataError
from batchrun.files import PRIVATE_MODE, HashedFile, atomic_file
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.results.output_file import every_row, on_one_line
from batchrun.store.batches import BatchRecord, ResultFiles
from batchrun.store.files import NewFile, new_file_id
from batchrun.store.results import StoredResult
from batchrun.strict import parse_reply
from batchrun.types import ProgressSink, RowError, token_count

EXPIRES_AFTER_S = 30 * 86_400
"""Unless the batch says otherwise, from its end on."""
RESULT_PURPOSE = "batch_output"
ROWS_PER_REPORT = 1_000
NO_ANSWER = "no answer from the engine"
_CODES = {"timeout": "request_timeout"}
"""OpenAI's name of an error, where it has another than ours."""


@dataclass(slots=True)
class _Kind:
    """One of the two files; it is not made before its first line."""

    filename: str
    folder: Path
    owner: str | None
    exits: contextlib.ExitStack
    id: str | None = None
    file: HashedFile | None = None

    def write(self, line: bytes) -> None:
        if self.file is None:
            self.id = new_file_id()
            new = atomic_file(self.folder / self.id, mode=PRIVATE_MODE)
            self.file = HashedFile(self.exits.enter_context(new))
        self.file.write(line)

    def as_new_file(self, expires_after_s: int) -> NewFile | None:
        if self.file is None or self.id is None:
            return None
        what = (self.filename, RESULT_PURPOSE, self.file.size_bytes, self.file.sha256)
        return NewFile(*what, expires_after_s, owner=self.owner, id=self.id)


def write_batch_files(
    folder: Path,
    batch: BatchRecord,
    results: Iterator[StoredResult],
    *,
    custom_ids: Iterable[str | None],
    missing: RowError | None,
    progress: ProgressSink | None = None,
) -> ResultFiles:
    """Write the files of results into `folder`, each under the id of a new file.

    `results` come in row order, and `custom_ids` are those of all rows. A row without a result gets
    the error `missing`; one whose id is None, because the input is lost, has its `row` on its line.
    The files are whole and synced when this returns. Raises StoreFullError, InputError and
    DataError; what is left in the folder then belongs to nobody.
    """
    batch_id = batch.job.id
    expires_after_s = batch.output_expires_after_s or EXPIRES_AFTER_S
    num_reasoning_tokens = 0
    with contextlib.ExitStack() as exits:
        output = _Kind(f"{batch_id}_output.jsonl", folder, batch.owner, exits)
        errors = _Kind(f"{batch_id}_error.jsonl", folder, batch.owner, exits)
        every = every_row(results, missing)
        for custom_id, row in zip(custom_ids, every, strict=False):
            if row is None:
                continue
            line = _line(batch_id, custom_id, row)
            if row.body is None:
                errors.write(line)
            else:
                output.write(line)
                num_reasoning_tokens += _reasoning_tokens(row.body)
            if progress is not None and row.row % ROWS_PER_REPORT == 0:
                progress("writing the results", row.row, batch.job.num_rows)
    return ResultFiles(
        output.as_new_file(expires_after_s), errors.as_new_file(expires_after_s),
        num_reasoning_tokens,
    )  # fmt: skip


def read_custom_ids(data: InputData) -> Iterator[str]:
    """The custom ids of all rows. Raises DataError."""
    for _, rows in data.iter_rows(["custom_id"]):
        yield from (str(values["custom_id"]) for values in rows)


def salvage_custom_ids(data: InputData | None, num_rows: int) -> Iterator[str | None]:
    """Those that can still be read of a damaged input, a row at a time, and None for the rest;
    without `data`, for all rows."""
    for number in range(num_rows):
        try:
            (values,) = [{}] if data is None else data.read_rows([number], ["custom_id"])
        except (DataError, IndexError):
            values = {}
        yield str(values["custom_id"]) if "custom_id" in values else None


def _line(batch_id: str, custom_id: str | None, row: StoredResult) -> bytes:
    """The same row of the same batch always gives the same line."""
    line_id = _hex(f"{batch_id}/{row.row}")
    request_id = _hex(f"{batch_id}/{row.row}/request")
    place = f'"row": {row.row}, ' if custom_id is None else ""
    head = (
        f'{{"id": "batch_req_{line_id}", "custom_id": {json.dumps(custom_id)}, {place}"response": '
    )
    if row.body is None:
        assert row.error is not None
        return f"{head}{_failure(row.error, request_id)}}}\n".encode()
    about = f'{{"status_code": 200, "request_id": "{request_id}", "body": '
    return b"".join((f"{head}{about}".encode(), _one_line(row.body), b'}, "error": null}\n'))


def _hex(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _failure(error: RowError, request_id: str) -> str:
    """`response` and `error` of a line without an answer."""
    status = error.status_code
    if status is None or status < 400:
        code = _CODES.get(error.code, error.code)
        # Whose batch it is need not learn where engines are.
        message = NO_ANSWER if error.code == "connection_error" else error.message
        return f'null, "error": {json.dumps({"code": code, "message": message})}'
    has_own_code = error.code not in {error.type, f"http_{status}"}
    body = {
        "message": error.message,
        "type": error.type or ("invalid_request_error" if status < 500 else "server_error"),
        "param": error.param,
        "code": error.code if has_own_code else None,
    }
    response = {"status_code": status, "request_id": request_id, "body": {"error": body}}
    return f'{json.dumps(response)}, "error": null'


def _one_line(body: bytes) -> bytes:
    """An engine's reply, on one line: ASCII's line ends stand between values only."""
    return on_one_line(body).replace(b"\n", b" ").replace(b"\r", b" ")


def _reasoning_tokens(body: bytes) -> int:
    if b'"reasoning_tokens"' not in body:
        return 0
    reply = parse_reply(body)
    usage = reply.get("usage") if isinstance(reply, dict) else None
    details = isinstance(usage, dict) and (
        usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    )
    return token_count(details.get("reasoning_tokens")) if isinstance(details, dict) else 0
