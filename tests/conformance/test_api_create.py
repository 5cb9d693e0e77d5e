"""Create, read, list: checks 16 to 27 of the API's specification."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from batch_rig import (
    CHAT,
    DAY_S,
    ENVELOPE,
    KIND_PARAMS,
    MODEL,
    Caller,
    chat_line,
    chat_lines,
    check_error,
    connect,
    counts,
    errors,
    without,
)
from deployment_rig import DeploymentRig
from openai.types import Batch
from raw_http import RawHttp

BATCH_KEYS = {
    "id",
    "object",
    "endpoint",
    "model",
    "errors",
    "input_file_id",
    "completion_window",
    "status",
    "output_file_id",
    "error_file_id",
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "request_counts",
    "usage",
    "metadata",
}
ALWAYS_SET = {"created_at", "expires_at"}
NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
UNKNOWN_FILE = "file-000000000000000000000000"
WHOLE = {"input_file_id": UNKNOWN_FILE, "endpoint": CHAT, "completion_window": "24h"}
MANY_LINES = 20_000


def create_of_unknown_file(caller: Caller, **changes: Any) -> Batch:
    """A batch that will fail and runs nothing, for checks that need no more."""
    return caller.create(UNKNOWN_FILE, **changes)


def test_16_create_answers_before_the_input_is_read(caller: Caller) -> None:
    """`batches.create` returns within 1 s: validating, counts 0/0/0, usage all zero, model, errors
    and file ids null, `expires_at == created_at + 86400`."""
    lines = [*chat_lines(MANY_LINES), without(chat_line("bad"), "url")]
    file_id = caller.upload(lines).id
    answers, durations_s = [], []
    for _ in range(3):
        began_s = time.monotonic()
        answers.append(caller.create(file_id))
        durations_s.append(time.monotonic() - began_s)

    assert min(durations_s) < 1
    for batch in answers:
        assert batch.object == "batch"
        assert batch.id.startswith("batch_")
        assert batch.status == "validating"
        assert counts(batch) == (0, 0, 0)
        assert batch.usage is not None and batch.usage.to_dict() == NO_USAGE
        assert batch.model is None and batch.errors is None
        assert batch.output_file_id is batch.error_file_id is None
        assert batch.expires_at == batch.created_at + DAY_S
    ended = [caller.wait_until_ended(batch.id) for batch in answers]
    assert [batch.status for batch in ended] == ["failed"] * 3


def test_17_every_key_is_always_there(caller: Caller, raw: RawHttp) -> None:
    """All keys of 1.5 are present in raw JSON and every time is an int (raw)."""
    file_id = caller.upload([chat_line("a")]).id
    created = raw.post("/v1/batches", {**WHOLE, "input_file_id": file_id}).json
    caller.wait_until_ended(created["id"])
    ended = raw.get(f"/v1/batches/{created['id']}").json
    listed = raw.get("/v1/batches?limit=1").json["data"][0]

    assert ended == listed
    assert ended["status"] == "completed"
    for batch in (created, ended):
        assert set(batch) == BATCH_KEYS
        for key in (name for name in BATCH_KEYS if name.endswith("_at")):
            is_unset = batch[key] is None and key not in ALWAYS_SET
            assert is_unset or type(batch[key]) is int, key


@pytest.mark.parametrize(
    "metadata", [{"team": "search", "näme": "wërt", "empty": ""}, None, openai.omit]
)
def test_18_metadata_round_trips(caller: Caller, metadata: Any) -> None:
    """Metadata round-trips; absent or null gives null."""
    created = create_of_unknown_file(caller, metadata=metadata)
    expected = metadata if isinstance(metadata, dict) else None
    assert created.metadata == expected
    assert caller.batches.retrieve(created.id).metadata == expected


@pytest.mark.parametrize(
    ("metadata", "code", "param"),
    [
        ({f"key-{i}": "" for i in range(17)}, "object_above_max_properties", "metadata"),
        ({"k" * 65: "v"}, "property_name_above_max_length", f"metadata.{'k' * 65}"),
        ({"k": "v" * 513}, "string_above_max_length", "metadata.k"),
        ({"k": ["v"]}, "invalid_type", "metadata.k"),
    ],
    ids=["17 pairs", "long key", "long value", "list"],
)
def test_18_metadata_out_of_bounds_is_refused(
    caller: Caller, metadata: Any, code: str, param: str
) -> None:
    """17 pairs, a 65-character key, a 513-character value and a list value each give 400 with the
    code of section 5."""
    with pytest.raises(openai.BadRequestError) as refused:
        create_of_unknown_file(caller, metadata=metadata)
    check_error(refused.value, code=code, param=param)


@pytest.mark.parametrize(
    "metadata",
    [{f"key-{i}": "v" for i in range(16)}, {"k" * 64: "v"}, {"文" * 64: "文" * 512}],
    ids=["16 pairs", "64 characters", "not bytes"],
)
def test_19_metadata_at_the_bounds_is_taken(caller: Caller, metadata: dict[str, str]) -> None:
    """Exactly 16 pairs, 64 and 512 characters are accepted; length counts characters, not
    bytes."""
    assert create_of_unknown_file(caller, metadata=metadata).metadata == metadata


def test_20_an_unknown_endpoint_is_refused(caller: Caller) -> None:
    """Unknown endpoint: 400 `invalid_value`, param `endpoint`, message lists supported values."""
    with pytest.raises(openai.BadRequestError) as refused:
        create_of_unknown_file(caller, endpoint="/v1/x")
    check_error(refused.value, code="invalid_value", param="endpoint")
    assert isinstance(refused.value.body, dict)
    message = refused.value.body["message"]
    assert message.startswith("Invalid value: '/v1/x'. Supported values are: ")
    assert f"'{CHAT}'" in message


@pytest.mark.parametrize("window", ["1h", "48h", "invalid", ""])
def test_21_another_window_is_refused(caller: Caller, window: str) -> None:
    """Windows `1h`, `48h`, `invalid`, `""`: 400, param `completion_window` (default
    configuration)."""
    with pytest.raises(openai.BadRequestError) as refused:
        create_of_unknown_file(caller, completion_window=window)
    check_error(refused.value, code="invalid_value", param="completion_window")


@pytest.mark.parametrize("field", ["input_file_id", "endpoint", "completion_window"])
def test_22_every_required_field_is_missed(raw: RawHttp, field: str) -> None:
    """Missing each required field: 400 `missing_required_parameter` with that param."""
    reply = raw.post("/v1/batches", without(WHOLE, field))
    assert reply.status == 400
    error = reply.json["error"]
    assert set(error) == ENVELOPE
    assert (error["code"], error["param"]) == ("missing_required_parameter", field)


def test_23_a_batch_of_an_unknown_file_fails(caller: Caller) -> None:
    """Unknown `input_file_id`: 200 validating, then failed with one error `invalid_request`, line
    null, text contains "Cannot find file"."""
    created = create_of_unknown_file(caller)
    assert (created.status, created.input_file_id) == ("validating", UNKNOWN_FILE)

    failed = caller.wait_until_ended(created.id)

    assert failed.status == "failed"
    assert errors(failed) == [("invalid_request", "file_id", None)]
    assert failed.errors is not None and failed.errors.data is not None
    assert "Cannot find file" in (failed.errors.data[0].message or "")


def test_24_a_file_of_another_purpose_never_runs(caller: Caller) -> None:
    """A file of another purpose: never runs (failed batch)."""
    file_id = caller.upload([chat_line("a")], purpose="user_data").id

    failed = caller.run(file_id)

    assert (failed.status, failed.in_progress_at) == ("failed", None)
    assert errors(failed) == [("invalid_request", "file_id", None)]


def test_25_an_unknown_batch_is_not_found(caller: Caller) -> None:
    """Retrieve unknown `batch_x`: 404, code and param null."""
    with pytest.raises(openai.NotFoundError) as missing:
        caller.batches.retrieve("batch_x")
    check_error(missing.value)


def test_25_an_id_of_something_else_is_refused(caller: Caller) -> None:
    """Retrieve `nope`: 400 `invalid_value`, param `batch_id`."""
    with pytest.raises(openai.BadRequestError) as refused:
        caller.batches.retrieve("nope")
    check_error(refused.value, code="invalid_value", param="batch_id")


def test_26_batches_are_listed_newest_first(caller: Caller) -> None:
    """`batches.list()` is newest first; default page 20; limit 1 and 100 work; 101 is 400."""
    newest = [create_of_unknown_file(caller).id for _ in range(22)][::-1]

    assert [batch.id for batch in caller.batches.list().data] == newest[:20]
    assert [batch.id for batch in caller.batches.list(limit=1).data] == newest[:1]
    assert [batch.id for batch in caller.batches.list(limit=100).data][:22] == newest
    behind = caller.batches.list(limit=2, after=newest[19])
    assert [batch.id for batch in behind.data] == newest[20:]
    everything = [batch.id for batch in caller.batches.list(limit=7)]
    assert everything[:22] == newest
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize(
    ("limit", "code"), [(101, "integer_above_max_value"), (0, "integer_below_min_value")]
)
def test_26_a_limit_out_of_bounds_is_refused(caller: Caller, limit: int, code: str) -> None:
    """Limit 101 is 400."""
    with pytest.raises(openai.BadRequestError) as refused:
        caller.batches.list(limit=limit)
    check_error(refused.value, code=code, param="limit")


def test_26_an_unknown_cursor_is_refused(caller: Caller) -> None:
    """A stale cursor never restarts from the top."""
    with pytest.raises(openai.NotFoundError) as missing:
        caller.batches.list(after="batch_x")
    check_error(missing.value, param="after")


def make_key(rig: DeploymentRig, name: str) -> str:
    """A new API key."""
    return str(rig.ask("keys", "create", name)["key"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_27_another_key_sees_nothing(rig: DeploymentRig, kind: str) -> None:
    """Another API key sees none of these files or batches (404, empty lists)."""
    rig.use_fake_engine(f"--model={MODEL}")
    mine, other = make_key(rig, "mine"), make_key(rig, "other")
    rig.ask("up", "-d")
    with connect(rig.port, kind, api_key=mine) as owner:
        batch = owner.run([chat_line("a")])
        file_ids = [batch.input_file_id, str(batch.output_file_id)]

    with connect(rig.port, kind, api_key=other) as caller:
        assert [*caller.files.list(), *caller.batches.list()] == []
        for file_id in file_ids:
            for use in (caller.files.retrieve, caller.files.content, caller.files.delete):
                with pytest.raises(openai.NotFoundError) as missing:
                    use(file_id)
                check_error(missing.value, param="id")
        for ask in (caller.batches.retrieve, caller.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        assert caller.run(batch.input_file_id).status == "failed"
