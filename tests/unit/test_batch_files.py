"""The files of results of a batch: one line for each request, in OpenAI's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from store_builders import add_batch

from batchrun.jobs.batch import new_batch_job
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.results.batch_files import read_custom_ids, write_batch_files
from batchrun.jobs.results.file_bytes import (
    FileBytes,
    check_contents,
    recover_files,
    remove_expired,
    remove_input,
)
from batchrun.jobs.spec import InputSpec
from batchrun.store import batches, files
from batchrun.store.batches import BatchError, BatchRecord, NewBatch, ResultFiles
from batchrun.store.database import Store, open_store
from batchrun.store.files import NewFile
from batchrun.store.results import StoredResult
from batchrun.types import RowError

MISSING = RowError("batch_expired", "too late")
IDS = ["a", 'quote " and \n', "\u2028 \U0001f600", "x" * 512]


def make_batch(
    store: Store, expires_after_s: int | None = None, file_id: str = "file-1"
) -> BatchRecord:
    job = new_batch_job(Path("/srv"), "/v1/chat/completions", deadline_s=60, weight=1)
    asked = NewBatch(file_id, "/v1/chat/completions", "24h", None, expires_after_s, "r")
    return add_batch(store, asked, job, now_s=1.0)


def write(tmp_path: Path, *rows: StoredResult, expires_after_s: int | None = None) -> ResultFiles:
    """The files of a batch of four requests."""
    lines = [{"custom_id": i, "method": "POST", "url": "/", "body": {}} for i in IDS]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    store = open_store(tmp_path / "store.db")
    (tmp_path / "files").mkdir(exist_ok=True)
    with open_input(InputSpec(path=(str(path),), format="openai-batch")) as data:
        found = write_batch_files(
            tmp_path / "files",
            make_batch(store, expires_after_s),
            iter(rows),
            custom_ids=read_custom_ids(data),
            missing=MISSING,
        )
    store.close()
    return found


def lines_of(tmp_path: Path, file: NewFile | None) -> list[dict[str, Any]]:
    """The lines of a file; none for no file."""
    if file is None:
        return []
    content = (tmp_path / "files" / file.id).read_bytes()
    assert (len(content), content[-1:]) == (file.size_bytes, b"\n")
    return [json.loads(line) for line in content.decode().splitlines()]


def test_answers_and_errors_go_to_their_files(tmp_path: Path) -> None:
    refusal = RowError("BadRequestError", "too long", 400, "BadRequestError", "messages")
    found = write(tmp_path, StoredResult(0, b'{"id": "r"}'), StoredResult(2, error=refusal))

    (answer,) = lines_of(tmp_path, found.output)
    never, failed, never_either = lines_of(tmp_path, found.error)

    assert [line["custom_id"] for line in (answer, never, failed, never_either)] == [
        IDS[0], IDS[1], IDS[2], IDS[3],
    ]  # fmt: skip
    assert (answer["response"]["status_code"], answer["response"]["body"]) == (200, {"id": "r"})
    assert answer["error"] is failed["error"] is None
    assert failed["response"]["body"] == {
        "error": {
            "message": "too long", "type": "BadRequestError", "param": "messages", "code": None,
        }
    }  # fmt: skip
    assert (never["response"], never["error"]) == (
        None, {"code": "batch_expired", "message": "too late"},
    )  # fmt: skip
    ids = [line["id"] for line in (answer, never, failed, never_either)]
    assert len(set(ids)) == 4 and all(i.startswith("batch_req_") for i in ids)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RowError("timeout", "m"), "request_timeout"),
        (RowError("engine_died", "m"), "engine_died"),
        (RowError("invalid_response", "m", 200), "invalid_response"),
    ],
)
def test_a_failure_without_an_http_error_has_no_response(
    tmp_path: Path, error: RowError, code: str
) -> None:
    line = lines_of(tmp_path, write(tmp_path, StoredResult(0, error=error)).error)[0]

    assert (line["response"], line["error"]["code"]) == (None, code)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (RowError("http_500", "m", 500), "server_error", None),
        (RowError("http_422", "m", 422), "invalid_request_error", None),
        (RowError("context_length", "m", 400, "x"), "x", "context_length"),
    ],
)
def test_the_body_of_an_http_error_has_openais_keys(
    tmp_path: Path, error: RowError, kind: str, code: str | None
) -> None:
    line = lines_of(tmp_path, write(tmp_path, StoredResult(0, error=error)).error)[0]

    body = line["response"]["body"]["error"]
    assert (body["type"], body["code"], body["param"]) == (kind, code, None)


def test_a_reply_of_several_lines_becomes_one(tmp_path: Path) -> None:
    usage = b'{"completion_tokens_details": {\n"reasoning_tokens": 7}}'
    said = '"id": "\u2028\u2029\x85"'
    rows = [
        StoredResult(row, said.join(["{", ',"usage":\r\n']).encode() + usage + b"}")
        for row in range(4)
    ]

    found = write(tmp_path, *rows, expires_after_s=3600)

    bodies = [line["response"]["body"] for line in lines_of(tmp_path, found.output)]
    assert [body["id"] for body in bodies] == ["\u2028\u2029\x85"] * 4
    assert (found.error, found.num_reasoning_tokens) == (None, 28)
    assert found.output is not None and found.output.expires_after_s == 3600


@pytest.mark.parametrize(
    "text", ["{}/notes", "../notes", "data/requests.jsonl", "x" * 252, f"file-{'x' * 251}"]
)
def test_a_batch_that_names_no_file_ends_and_removes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "notes").write_bytes(b"theirs")
    store = open_store(tmp_path / "store.db")
    batch = make_batch(store, file_id=text.format(tmp_path))
    batches.fail(store, batch.job.id, [BatchError("invalid_request", "none")], now_s=2.0)

    remove_input(store, FileBytes(tmp_path / "files"), batch.job.id)

    assert (tmp_path / "notes").exists() and list((tmp_path / "files").iterdir()) == []
    store.close()


def test_bytes_that_changed_are_found_and_half_written_ones_go(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    place = FileBytes(folder)
    store = open_store(tmp_path / "store.db")
    folder.mkdir()
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    kept = files.add(store, NewFile("a", "batch", 1, digest, 5), now_s=0.0)
    (folder / kept.id).write_bytes(b"x")
    (folder / f".{kept.id}.0123abcd.part").write_bytes(b"half")
    assert list(check_contents(store, place)) == []

    (folder / kept.id).write_bytes(b"y")
    (changed,) = check_contents(store, place)

    assert "are not those that were stored" in str(changed)
    assert recover_files(store, place) == 0
    assert [path.name for path in folder.iterdir()] == [kept.id]
    assert remove_expired(store, place, now_s=4.9) == []
    assert remove_expired(store, place, now_s=5.0) == [kept]
    assert list(folder.iterdir()) == [] == list(check_contents(store, place))
    store.close()
