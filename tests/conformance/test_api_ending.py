"""Cancel, expiry, faults: checks 50 to 56 of the API's specification."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_rig import (
    DAY_S,
    KIND_PARAMS,
    LATE,
    MODEL,
    NUM_STUCK_ONCE,
    REFUSED,
    STUCK,
    Caller,
    Line,
    chat_line,
    chat_lines,
    check_error,
    connect,
    counts,
    engine_rules,
    errors,
    offline_work_held,
    stuck_once,
)
from deployment_rig import DeploymentRig
from openai.types import Batch
from raw_http import RawHttp

from batchrun.failpoints import VARIABLE

NUM_MANY = 5_000


def ending_in_part(num_stuck: int = 3) -> list[Line]:
    """Five requests that succeed, two that the engine refuses, and some that never end."""
    return [*chat_lines(5), *chat_lines(2, REFUSED), *chat_lines(num_stuck, STUCK)]


def check_ended_in_part(caller: Caller, batch: Batch, code: str, message: str) -> None:
    """Such a batch kept what was done; the rest has this error and counts as nothing."""
    assert counts(batch) == (10, 5, 2)
    done, rest = (caller.lines(file) for file in (batch.output_file_id, batch.error_file_id))
    assert {line["custom_id"] for line in done} == {f"question-{i}" for i in range(5)}
    assert all(line["response"]["status_code"] == 200 for line in done)
    refused = [line for line in rest if line["custom_id"].startswith(REFUSED)]
    assert [line["response"]["status_code"] for line in refused] == [400, 400]
    unanswered = [line for line in rest if line["custom_id"].startswith(STUCK)]
    assert len(unanswered) == 3 and len(rest) == 5
    for line in unanswered:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["response"] is None
        assert line["error"]["code"] == code
        assert message in line["error"]["message"]


@pytest.mark.parametrize("when", ["at once", "in_progress"])
def test_50_cancel_ends_a_batch(caller: Caller, batch_rig: DeploymentRig, when: str) -> None:
    """Cancel while validating or in_progress: 200, cancelling with `cancelling_at` set; ends
    cancelled with `cancelled_at`."""
    with offline_work_held(batch_rig):
        batch = caller.create(chat_lines(NUM_MANY if when == "at once" else 3))
        if when == "in_progress":
            caller.wait_for_status(batch.id, "in_progress")

        cancelling = caller.batches.cancel(batch.id)
        ended = caller.wait_until_ended(batch.id)

    assert cancelling.id == batch.id
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None and cancelling.cancelled_at is None
    assert cancelling.output_file_id is cancelling.error_file_id is None
    assert (ended.status, ended.cancelling_at) == ("cancelled", cancelling.cancelling_at)
    assert ended.cancelled_at is not None and ended.cancelled_at >= cancelling.cancelling_at
    assert ended.completed_at is None and ended.output_file_id is None


def test_51_cancel_keeps_what_was_done(caller: Caller, batch_rig: DeploymentRig) -> None:
    """Requests done before or during cancelling are in the output file; the rest are
    `batch_cancelled` lines with `response: null`; `failed` excludes them."""
    batch = caller.create(ending_in_part())
    caller.wait_for_counts(batch.id, 7)

    with offline_work_held(batch_rig):
        ended = caller.cancel(batch.id)

    assert ended.status == "cancelled"
    check_ended_in_part(caller, ended, "batch_cancelled", "")


def test_52_cancel_twice_is_fine(caller: Caller, batch_rig: DeploymentRig) -> None:
    """Cancel twice is 200."""
    with offline_work_held(batch_rig):
        batch = caller.create(chat_lines(3))
        first, second = caller.batches.cancel(batch.id), caller.batches.cancel(batch.id)
        ended = caller.wait_until_ended(batch.id)
    third = caller.batches.cancel(batch.id)

    assert first.cancelling_at == second.cancelling_at is not None
    assert (ended.status, third) == ("cancelled", ended)


def test_51_cancel_keeps_what_is_done_meanwhile(caller: Caller, batch_rig: DeploymentRig) -> None:
    """Requests done before or during cancelling are in the output file."""
    lines = [*chat_lines(3), *chat_lines(2, LATE), *chat_lines(1, STUCK)]
    num_before = len(batch_rig.executions())
    batch = caller.create(lines)
    batch_rig.wait_for_executions(num_before + len(lines))

    caller.batches.cancel(batch.id)
    caller.wait_for_counts(batch.id, 5)
    with offline_work_held(batch_rig):
        ended = caller.wait_until_ended(batch.id)

    assert (ended.status, counts(ended)) == ("cancelled", (6, 5, 0))
    done = {line["custom_id"] for line in caller.lines(ended.output_file_id)}
    assert done == {line["custom_id"] for line in lines[:5]}


@pytest.mark.parametrize(("line", "status"), [(chat_line("a"), "completed"), (b"{}", "failed")])
def test_52_an_ended_batch_is_not_cancelled(
    caller: Caller, line: Line | bytes, status: str
) -> None:
    """Cancel of completed or failed is ConflictError after exactly **one** HTTP request (needs
    `x-should-retry: false`)."""
    batch = caller.run([line])
    caller.requests.clear()

    with pytest.raises(openai.ConflictError) as refused:
        caller.batches.cancel(batch.id)

    assert caller.requests == [f"POST /v1/batches/{batch.id}/cancel"]
    check_error(refused.value)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"] == f"Cannot cancel a batch with status '{status}'."
    assert caller.batches.retrieve(batch.id) == batch


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_53_an_expired_batch_keeps_what_was_done(
    rig: DeploymentRig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expiry (short test window): expired, `expired_at >= expires_at`, finished lines kept, rest
    `batch_expired`, `failed` excludes them.

    The window stays 24h; the deployment's clock moves on by a day.
    """
    clock = rig.folder / "clock"
    monkeypatch.setenv(VARIABLE, f"clock={clock}")
    rig.use_fake_engine(f"--model={MODEL}", rules=engine_rules())
    rig.ask("up", "-d")
    with connect(rig.port, kind) as caller:
        batch = caller.create(ending_in_part())
        caller.wait_for_counts(batch.id, 7)

        set_clock(clock, DAY_S)
        ended = caller.wait_until_ended(batch.id)

        assert ended.status == "expired"
        assert ended.expired_at is not None and ended.expires_at is not None
        assert ended.expired_at >= ended.expires_at == batch.created_at + DAY_S
        assert ended.completed_at is ended.cancelled_at is ended.failed_at is None
        check_ended_in_part(
            caller,
            ended,
            "batch_expired",
            "This request could not be executed before the completion window expired.",
        )
        set_clock(clock, 32 * DAY_S)
        for file_id in (ended.output_file_id, batch.input_file_id):
            with pytest.raises(openai.NotFoundError) as missing:
                caller.files.content(str(file_id))
            check_error(missing.value, param="id")


def set_clock(clock: Path, ahead_s: int) -> None:
    """Let the deployment's clock be ahead by so much."""
    new = clock.with_suffix(".new")
    new.write_text(str(ahead_s))
    new.replace(clock)


def test_54_a_running_batch_needs_its_input_no_more(
    caller: Caller, batch_rig: DeploymentRig
) -> None:
    """Deleting the input file mid-run does not corrupt a validated batch [A]."""
    with offline_work_held(batch_rig):
        batch = caller.create(chat_lines(50))
        caller.wait_for_status(batch.id, "in_progress")
        caller.files.delete(batch.input_file_id)

    ended = caller.wait_until_ended(batch.id)

    assert (ended.status, counts(ended)) == ("completed", (50, 50, 0))
    assert len(caller.results(ended)) == 50


@pytest.mark.parametrize("is_deleted_first", [True, False])
def test_54_a_batch_that_is_not_validated_needs_its_input(
    caller: Caller, *, is_deleted_first: bool
) -> None:
    """Deleted before validation it fails as in 23."""
    file_id = caller.upload(chat_lines(NUM_MANY, REFUSED)).id
    if is_deleted_first:
        caller.files.delete(file_id)
    batch = caller.create(file_id)
    if not is_deleted_first:
        caller.files.delete(file_id)

    ended = caller.wait_until_ended(batch.id)

    if ended.status == "completed" and not is_deleted_first:
        assert len(caller.results(ended)) == NUM_MANY
    else:
        assert errors(ended) == [("invalid_request", "file_id", None)]


def test_55_a_killed_server_goes_on(caller: Caller, batch_rig: DeploymentRig) -> None:
    """Server killed and restarted mid-batch: the batch resumes, finished requests are not re-run
    into a second line, every `custom_id` has exactly one line."""
    num_before = len(batch_rig.executions())
    lines = [*chat_lines(20), *chat_lines(NUM_STUCK_ONCE, stuck_once(caller.kind), "stuck")]
    batch = caller.create(lines)
    before = caller.wait_for_counts(batch.id, 20)
    batch_rig.wait_for_executions(num_before + len(lines))

    batch_rig.kill("daemon")
    batch_rig.ask("up", "-d")
    ended = caller.wait_until_ended(batch.id)

    assert before.status == "in_progress"
    assert (ended.status, counts(ended)) == ("completed", (23, 23, 0))
    assert ended.in_progress_at == before.in_progress_at
    assert set(caller.results(ended)) == {line["custom_id"] for line in lines}
    assert len(batch_rig.executions()) == num_before + 20 + 2 * NUM_STUCK_ONCE


def drop_the_answer(port: int, fields: dict[str, Any], headers: dict[str, str]) -> None:
    """POST a batch as a client does that hangs up when the answer comes: it never reads it."""
    content = json.dumps(fields).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
            f"Content-Type: application/json\r\n{head}\r\n".encode()
            + content
        )
        assert connection.recv(1)


def test_56_a_create_is_repeated_once(caller: Caller, batch_rig: DeploymentRig) -> None:
    """Create retried after a client timeout with the same `Idempotency-Key`: one batch (our
    extension)."""
    file_id = caller.upload([chat_line("a")]).id
    fields = {"input_file_id": file_id, "endpoint": chat_line("a")["url"]}
    fields["completion_window"] = "24h"
    key = {"Idempotency-Key": f"key of {file_id}"}

    drop_the_answer(batch_rig.port, fields, key)
    again = [caller.create(file_id, extra_headers=key) for _ in range(2)]

    listed = [batch for batch in caller.batches.list() if batch.input_file_id == file_id]
    assert {batch.id for batch in again} == {listed[0].id}
    assert len(listed) == 1
    with pytest.raises(openai.ConflictError) as refused:
        caller.create(file_id, extra_headers=key, metadata={"another": "body"})
    check_error(refused.value)
    assert caller.create(file_id).id != listed[0].id


def test_56_other_keys_make_other_batches(caller: Caller, raw: RawHttp) -> None:
    """A create with another `Idempotency-Key`, or none, is a batch of its own."""
    file_id = caller.upload([chat_line("a")]).id
    headers = [{"Idempotency-Key": f"{name} {file_id}"} for name in ("one", "two")]
    ids = {caller.create(file_id, extra_headers=header).id for header in [*headers, {}, {}]}
    assert len(ids) == 4
