"""Batches of OpenAI's API from upload to download: gateway, daemon, fake engine."""

from __future__ import annotations

import json
import signal
from collections import Counter
from functools import partial
from typing import Any

import pytest
from batch_client import BatchClient, chat_line, chat_lines, deployment_client
from batch_rig import CHAT
from deployment_rig import DeploymentRig
from openai import ConflictError
from openai.types import Batch
from openai.types.chat import ChatCompletion

REFUSED = json.dumps({"error": {"message": "no", "type": "Bad", "param": "p", "code": 400}})


def rule(text: str, **action: Any) -> dict[str, Any]:
    """What the engine does with requests that hold a text."""
    return {"match": {"substring": text}, "action": action}


def counts(batch: Batch) -> tuple[int, int, int]:
    """(total, completed, failed)."""
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def has_more_than(num_completed: int, batch: Batch) -> bool:
    """Whether more requests are answered than these."""
    return counts(batch)[1] > num_completed


def ids_of(client: BatchClient, batch: Batch) -> Counter[str]:
    """How often each custom id stands in the files of results."""
    lines = client.lines(batch.output_file_id) + client.lines(batch.error_file_id)
    return Counter(line["custom_id"] for line in lines)


def test_a_batch_goes_from_upload_to_download(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    with deployment_client(rig) as client:
        made = client.create(chat_lines(40), metadata={"team": "eval"})
        assert (made.status, made.output_file_id, made.errors) == ("validating", None, None)

        batch = client.wait_until_ended(made.id)

        assert (batch.status, batch.model, batch.error_file_id) == ("completed", "fake", None)
        assert counts(batch) == (40, 40, 0)
        lines = client.lines(batch.output_file_id)
    assert {line["custom_id"] for line in lines} == {f"row-{i}" for i in range(40)}
    answers = [ChatCompletion.model_validate(line["response"]["body"]) for line in lines]
    used = [answer.usage for answer in answers if answer.usage is not None]
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(usage.total_tokens for usage in used)
    (job,) = rig.ask("status")["jobs"]
    assert (job["id"], job["state"]) == (made.id, "completed")
    assert "nothing is wrong" in rig.call("store", "check").stdout


@pytest.mark.slow
def test_a_batch_completes_however_many_of_its_requests_fail(rig: DeploymentRig) -> None:
    rig.use_fake_engine(rules=[rule("question", status=400, body=REFUSED)])
    with deployment_client(rig) as client:
        batch = client.wait_until_ended(client.create(chat_lines(45)).id)

        assert (batch.status, counts(batch)) == ("completed", (45, 0, 45))
        assert (batch.output_file_id, batch.errors) == (None, None)
        line = client.lines(batch.error_file_id)[0]
    assert line["error"] is None
    assert (line["response"]["status_code"], line["response"]["body"]) == (
        400, {"error": {"message": "no", "type": "Bad", "param": "p", "code": None}},
    )  # fmt: skip


@pytest.mark.nightly
def test_what_passes_is_tried_again_unseen(rig: DeploymentRig) -> None:
    busy = [{**rule("question 0", status=status), "times": 1} for status in (429, 503)]
    rig.use_fake_engine(rules=busy)
    with deployment_client(rig) as client:
        batch = client.wait_until_ended(client.create(chat_lines(2)).id)

    assert (counts(batch), batch.error_file_id) == ((2, 2, 0), None)


def test_a_cancel_keeps_what_is_in_flight_and_names_the_rest(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    with deployment_client(rig, max_retries=0) as client:
        made = client.create(chat_lines(600))
        client.wait_for(made.id, lambda batch: len(rig.executions()) > 10)

        cancelling = client.openai.batches.cancel(made.id)
        begun = len(rig.executions())
        assert (cancelling.status, cancelling.output_file_id) == ("cancelling", None)
        assert client.openai.batches.cancel(made.id).status in {"cancelling", "cancelled"}
        batch = client.wait_until_ended(made.id)

        total, completed, failed = counts(batch)
        assert (batch.status, total, failed) == ("cancelled", 600, 0)
        # What was on its way to the engine when it was counted ran too.
        assert 0 < begun <= completed == len(rig.executions()) < 100
        rest = client.lines(batch.error_file_id)
        assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
        assert ids_of(client, batch) == Counter(f"row-{i}" for i in range(600))
        assert client.openai.batches.cancel(made.id) == batch

        other = client.openai.batches.cancel(client.create(chat_lines(600)).id)
        assert (other.status, other.cancelling_at is None) == ("cancelling", False)
        assert client.wait_until_ended(other.id).status == "cancelled"


def test_a_batch_that_was_completed_cannot_be_cancelled(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    with deployment_client(rig) as client:
        batch = client.wait_until_ended(client.create(chat_lines(1)).id)

        with pytest.raises(ConflictError, match="Cannot cancel a batch with status") as refusal:
            client.openai.batches.cancel(batch.id)

    assert refusal.value.response.headers["x-should-retry"] == "false"


@pytest.mark.nightly
def test_an_expired_batch_keeps_what_is_done(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5", completion_windows=["24h", "5s"])
    with deployment_client(rig) as client:
        made = client.create(chat_lines(2000), completion_window="5s")
        batch = client.wait_until_ended(made.id)

        total, completed, failed = counts(batch)
        assert (batch.status, batch.completion_window, total, failed) == ("expired", "5s", 2000, 0)
        assert batch.expires_at == batch.created_at + 5
        assert batch.expired_at is not None and batch.expired_at >= batch.expires_at
        assert 0 < completed == len(client.lines(batch.output_file_id))
        rest = client.lines(batch.error_file_id)
        assert {line["error"]["code"] for line in rest} == {"batch_expired"}
        assert ids_of(client, batch) == Counter(f"row-{i}" for i in range(2000))


@pytest.mark.nightly
def test_a_batch_is_paused_and_resumed_from_the_command_line(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.2")
    with deployment_client(rig) as client:
        made = client.create(chat_lines(2000))
        client.wait_for(made.id, lambda batch: counts(batch)[1] > 5)

        assert rig.ask("pause", made.id)["state"] == "paused"
        assert client.openai.batches.retrieve(made.id).status == "in_progress"
        assert rig.ask("resume", made.id)["state"] == "running"
        batch = client.wait_until_ended(made.id)
        assert (batch.status, counts(batch)) == ("completed", (2000, 2000, 0))

        other = client.create(chat_lines(2000))
        client.wait_for(other.id, lambda batch: counts(batch)[1] > 5)
        rig.ask("cancel", other.id)
        assert client.wait_until_ended(other.id).status == "cancelled"
        answers = rig.ask("results", made.id)
    assert answers["rows"] == 2000


@pytest.mark.slow
def test_an_input_that_is_deleted_is_missed_before_validation_only(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.2")
    with deployment_client(rig) as client:
        made = client.create(chat_lines(200))
        client.wait_for(made.id, lambda batch: batch.status == "in_progress")
        client.openai.files.delete(made.input_file_id)
        rig.kill("daemon")
        rig.ask("up", "-d")
        again = client.openai.batches.create(
            input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h"
        )

        failed = client.wait_until_ended(again.id)
        batch = client.wait_until_ended(made.id)

    assert (batch.status, counts(batch)) == ("completed", (200, 200, 0))
    assert failed.errors is not None and failed.errors.data is not None
    (error,) = failed.errors.data
    assert (failed.status, error.code, error.line) == ("failed", "invalid_request", None)
    assert (failed.in_progress_at, counts(failed)) == (None, (0, 0, 0))


def test_one_bad_line_fails_the_batch_and_nothing_runs(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    with deployment_client(rig) as client:
        lines = [chat_line("a"), b"nope", chat_line("b"), chat_line("a")]
        batch = client.wait_until_ended(client.create(lines).id)

    assert batch.errors is not None and batch.errors.data is not None
    found = [(error.code, error.line) for error in batch.errors.data]
    assert found == [("invalid_json_line", 2), ("duplicate_custom_id", 4)]
    assert (batch.status, counts(batch), rig.executions()) == ("failed", (0, 0, 0), [])


def test_one_idempotency_key_makes_one_batch(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    with deployment_client(rig) as client:
        asked: dict[str, Any] = {
            "input_file_id": client.upload(chat_lines(1)),
            "endpoint": CHAT,
            "completion_window": "24h",
            "extra_headers": {"Idempotency-Key": "one"},
        }
        first = client.openai.batches.create(**asked)
        again = client.openai.batches.create(**asked)
        with pytest.raises(ConflictError):
            client.openai.batches.create(**asked, metadata={"other": "body"})

        assert first.id == again.id
        assert len(client.openai.batches.list().data) == 1


def test_a_line_of_spaces_is_no_request(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    lines = chat_lines(1_004)
    with deployment_client(rig) as client:
        made = client.create([*lines[:1_001], b"      ", *lines[1_001:]])
        batch = client.wait_until_ended(made.id)

        assert (batch.status, counts(batch)) == ("completed", (1_004, 1_004, 0))
        assert ids_of(client, batch) == Counter(f"row-{i}" for i in range(1_004))


@pytest.mark.nightly
@pytest.mark.parametrize("num_kills", [3])
def test_a_batch_outlives_kills_of_the_daemon(rig: DeploymentRig, num_kills: int) -> None:
    rig.use_fake_engine("--latency-s=0.1")
    with deployment_client(rig, max_retries=20) as client:
        made = client.create(chat_lines(900))
        for kill in range(num_kills):
            client.wait_for(made.id, partial(has_more_than, 150 * kill))
            rig.kill("daemon", signal.SIGKILL)
            rig.ask("up", "-d")
        batch = client.wait_until_ended(made.id)

        assert (batch.status, counts(batch)) == ("completed", (900, 900, 0))
        assert ids_of(client, batch) == Counter(f"row-{i}" for i in range(900))
    assert "nothing is wrong" in rig.call("store", "check").stdout
