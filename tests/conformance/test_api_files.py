"""Files: checks 1 to 15 of the API's specification."""

from __future__ import annotations

import io
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_rig import DAY_S, Caller, chat_line, chat_lines, check_error, jsonl
from raw_http import RawHttp

FILE_KEYS = {
    "id",
    "object",
    "bytes",
    "created_at",
    "expires_at",
    "filename",
    "purpose",
    "status",
    "status_details",
}
PAYLOAD = jsonl([chat_line("a", "grüße")])
NOT_JSONL = "Invalid file format for Batch API. Must be .jsonl"


def put_files(caller: Caller, purpose: str, num_files: int) -> list[str]:
    """Make these the only files of a purpose; their ids, oldest first."""
    for file in caller.files.list(purpose=purpose):
        caller.files.delete(file.id)
    return [caller.upload(PAYLOAD, purpose=purpose).id for _ in range(num_files)]


def test_01_a_created_file_has_all_nine_keys(caller: Caller, raw: RawHttp) -> None:
    """`files.create` returns all nine keys (raw), `object` is file, `bytes` equals the payload
    length, `status` is processed."""
    reply = raw.upload(("purpose", "batch"), file=PAYLOAD)

    assert reply.status == 200
    assert set(reply.json) == FILE_KEYS
    assert re.fullmatch(r"file-[0-9A-Za-z]{22,24}", reply.json["id"])
    created = caller.upload(PAYLOAD)
    assert (created.object, created.bytes, created.status) == ("file", len(PAYLOAD), "processed")
    assert caller.files.retrieve(reply.json["id"]).to_dict() == reply.json


@pytest.mark.parametrize(("purpose", "life_s"), [("batch", 30 * DAY_S), ("user_data", None)])
def test_02_files_expire_by_purpose(caller: Caller, purpose: str, life_s: int | None) -> None:
    """Default `expires_at - created_at` is 2592000 for batch; null for `user_data`."""
    created = caller.upload(PAYLOAD, purpose=purpose)

    expires_at = None if life_s is None else created.created_at + life_s
    assert created.expires_at == expires_at
    assert caller.files.retrieve(created.id).expires_at == expires_at


@pytest.mark.parametrize("seconds", [3_600, 2_592_000])
def test_03_an_expiry_within_bounds_is_honoured(caller: Caller, seconds: int) -> None:
    """`expires_after` of 3600 and 2592000 is honoured."""
    expires_after = {"anchor": "created_at", "seconds": seconds}
    created = caller.upload(PAYLOAD, expires_after=expires_after)
    assert created.expires_at == created.created_at + seconds


@pytest.mark.parametrize(
    ("seconds", "code"),
    [(3_599, "integer_below_min_value"), (2_592_001, "integer_above_max_value")],
)
def test_03_an_expiry_out_of_bounds_is_refused(caller: Caller, seconds: int, code: str) -> None:
    """`expires_after` of 3599, 2592001 gives 400."""
    with pytest.raises(openai.BadRequestError) as refused:
        caller.upload(PAYLOAD, expires_after={"anchor": "created_at", "seconds": seconds})
    check_error(refused.value, code=code, param="expires_after.seconds")


def test_03_another_anchor_is_refused(caller: Caller) -> None:
    """`expires_after` with another anchor gives 400."""
    with pytest.raises(openai.BadRequestError):
        caller.upload(PAYLOAD, expires_after={"anchor": "last_active_at", "seconds": 3_600})


@pytest.mark.parametrize(
    ("form", "filename"),
    [
        ("path", "rows.jsonl"),
        ("open file", "rows.jsonl"),
        ("bytes", "upload"),
        ("unnamed", "upload"),
        ("tuple", "żółć 文.jsonl"),
    ],
)
def test_04_every_form_of_a_file_is_taken(
    caller: Caller, tmp_path: Path, form: str, filename: str
) -> None:
    """Upload from path, open file, bytes, unnamed `BytesIO` (`filename="upload"`) and a tuple
    with a non-ASCII name all work."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(PAYLOAD)
    with path.open("rb") as opened:
        forms: dict[str, Any] = {
            "path": path,
            "open file": opened,
            "bytes": PAYLOAD,
            "unnamed": io.BytesIO(PAYLOAD),
            "tuple": (filename, PAYLOAD),
        }
        created = caller.files.create(file=forms[form], purpose="batch")

    assert (created.filename, created.bytes) == (filename, len(PAYLOAD))
    assert caller.files.content(created.id).content == PAYLOAD


@pytest.mark.parametrize(
    ("fields", "file", "param"),
    [
        ([("purpose", "batch")], None, "file"),
        ([], PAYLOAD, "purpose"),
        ([("purpose", "anything")], PAYLOAD, "purpose"),
        ([("purpose", "batch_output")], PAYLOAD, "purpose"),
    ],
)
def test_05_an_incomplete_form_is_refused(
    raw: RawHttp, fields: list[tuple[str, str]], file: bytes | None, param: str
) -> None:
    """Missing `file`, missing `purpose`, unknown purpose: 400 with the four-key envelope, never
    422."""
    reply = raw.upload(*fields, file=file)
    assert reply.status == 400
    assert set(reply.json) == {"error"}
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert (reply.json["error"]["type"], reply.json["error"]["param"]) == (
        "invalid_request_error",
        param,
    )


@pytest.mark.parametrize("content", [b"", b"no JSON\n", b"no JSON\n" + PAYLOAD])
def test_06_what_does_not_begin_as_jsonl_is_refused(caller: Caller, content: bytes) -> None:
    """Empty file with purpose batch: 400 `Invalid file format...`; so is a file whose first line
    is not JSON."""
    with pytest.raises(openai.BadRequestError) as refused:
        caller.upload(content)
    check_error(refused.value)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"] == NOT_JSONL


def test_06_a_bad_second_line_uploads_fine(caller: Caller) -> None:
    """A bad second line uploads fine."""
    content = PAYLOAD + b"no JSON\n"
    assert caller.upload(content).bytes == len(content)


@pytest.mark.parametrize(
    "content",
    [
        b'{"custom_id": "a"}\r\n{"custom_id": "b"}\r\n',
        '{"custom_id": "grüße \u2028 文"}\n'.encode(),
        b'{"custom_id": "a"}\n{"custom_id": "b"}',
        b'{"custom_id": "a"}\n\xff\x00\xfe--\r\n--',
    ],
    ids=["CRLF", "non-ASCII", "no final newline", "any bytes"],
)
def test_07_the_content_is_what_was_uploaded(caller: Caller, content: bytes) -> None:
    """`files.content(...).content` equals the uploaded bytes (CRLF, non-ASCII, no final
    newline)."""
    assert caller.files.content(caller.upload(content).id).content == content


def test_08_user_data_cannot_be_downloaded(caller: Caller) -> None:
    """Content of a `user_data` file: 400."""
    file_id = caller.upload(PAYLOAD, purpose="user_data").id
    with pytest.raises(openai.BadRequestError) as refused:
        caller.files.content(file_id)
    check_error(refused.value)
    message = "Not allowed to download files of purpose: user_data"
    assert isinstance(refused.value.body, dict) and refused.value.body["message"] == message


def test_08_results_can_be_downloaded(caller: Caller) -> None:
    """Content of `batch_output`: 200."""
    batch = caller.run([chat_line("a")])
    assert batch.output_file_id is not None
    assert caller.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert json.loads(caller.files.content(batch.output_file_id).content)["custom_id"] == "a"


def test_09_a_deleted_file_is_gone(caller: Caller) -> None:
    """`files.delete` gives `deleted: true`; then retrieve, content and delete each give
    NotFoundError with `param == "id"`, `code is None`."""
    file_id = caller.upload(PAYLOAD).id

    deleted = caller.files.delete(file_id)

    assert deleted.to_dict() == {"id": file_id, "object": "file", "deleted": True}
    for use in (caller.files.retrieve, caller.files.content, caller.files.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            use(file_id)
        check_error(missing.value, param="id")


def test_10_files_are_listed_by_purpose_and_order(caller: Caller) -> None:
    """`files.list(purpose=...)` filters exactly; `order` asc and desc are exact reverses; default
    is desc."""
    ids = put_files(caller, "vision", 3)
    caller.upload(PAYLOAD)

    assert [file.id for file in caller.files.list(purpose="vision")] == ids[::-1]
    assert [file.id for file in caller.files.list(purpose="vision", order="asc")] == ids
    default = [file.id for file in caller.files.list()]
    assert default == [file.id for file in caller.files.list(order="desc")]
    assert default[::-1] == [file.id for file in caller.files.list(order="asc")]
    assert set(ids) < set(default)


def test_11_pages_follow_each_other(caller: Caller) -> None:
    """Auto-pagination with `limit=2` over 5 files yields each once with three requests; the last
    page has `has_more` false."""
    ids = put_files(caller, "evals", 5)
    caller.requests.clear()

    pages = list(caller.files.list(purpose="evals", limit=2, order="asc").iter_pages())

    assert caller.requests == ["GET /v1/files"] * 3
    assert [[file.id for file in page.data] for page in pages] == [ids[:2], ids[2:4], ids[4:]]
    assert [page.has_more for page in pages] == [True, True, False]
    assert [file.id for file in caller.files.list(purpose="evals", limit=2)] == ids[::-1]


@pytest.mark.parametrize("limit", [0, 10_001, "abc"])
def test_12_a_limit_out_of_bounds_is_refused(caller: Caller, limit: Any) -> None:
    """`limit` 0, 10001 and `abc` give 400."""
    with pytest.raises(openai.BadRequestError):
        caller.files.list(limit=limit)


def test_12_an_unknown_cursor_is_refused(caller: Caller) -> None:
    """An unknown `after` never returns the first page."""
    stale = caller.upload(PAYLOAD).id
    caller.files.delete(stale)
    for after in ("file-unknown", stale):
        with pytest.raises(openai.NotFoundError) as missing:
            caller.files.list(after=after)
        check_error(missing.value, param="after")


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_13_files_of_one_second_are_neither_lost_nor_repeated(caller: Caller, order: Any) -> None:
    """Equal `created_at` values do not lose or repeat items across pages."""
    ids = put_files(caller, "fine-tune", 2)
    created = [caller.files.retrieve(file_id).created_at for file_id in ids]
    while len(created) - len(set(created)) < 2:
        file = caller.upload(PAYLOAD, purpose="fine-tune")
        ids.append(file.id)
        created.append(file.created_at)

    pages = caller.files.list(purpose="fine-tune", limit=1, order=order).iter_pages()

    found = list(chain.from_iterable(page.data for page in pages))
    assert [file.id for file in found] == (ids if order == "asc" else ids[::-1])


def test_14_a_file_needs_no_processing(caller: Caller) -> None:
    """`wait_for_processing` returns at once."""
    file_id = caller.upload(chat_lines(3)).id
    caller.requests.clear()

    assert caller.files.wait_for_processing(file_id).status == "processed"

    assert caller.requests == [f"GET /v1/files/{file_id}"]
