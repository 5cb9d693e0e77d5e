"""The way of a batch: checks 36 to 41 and 44 to 46 of the API's specification."""

from __future__ import annotations

from itertools import pairwise

import pytest
from batch_rig import (
    LATE,
    MODEL,
    REFUSED,
    TERMINAL,
    Caller,
    busy,
    chat_line,
    chat_lines,
    counts,
    offline_work_held,
)
from deployment_rig import DeploymentRig
from openai.types import Batch

NUM_ROWS = 200
NEXT = {
    "validating": {"in_progress", "failed", "expired", "cancelling"},
    "in_progress": {"finalizing", "expired", "cancelling"},
    "finalizing": {"completed", "cancelling"},
    "cancelling": {"cancelled"},
}
INSTANTS = {
    "completed": ["created_at", "in_progress_at", "finalizing_at", "completed_at"],
    "failed": ["created_at", "failed_at"],
    "cancelled": ["created_at", "in_progress_at", "cancelling_at", "cancelled_at"],
}
ALL_INSTANTS = {instant for path in INSTANTS.values() for instant in path} | {"expired_at"}


def life_of(caller: Caller, rig: DeploymentRig) -> list[Batch]:
    """All that a poller saw of a batch with good, late and refused requests, from create on."""
    lines = [*chat_lines(NUM_ROWS), *chat_lines(5, LATE), *chat_lines(2, REFUSED)]
    with offline_work_held(rig):
        seen = [caller.create(lines)]
        seen += caller.poll(seen[0].id, lambda batch: batch.status == "in_progress")
    seen += caller.poll(seen[0].id, lambda batch: batch.status in TERMINAL)
    return seen


def life_until(caller: Caller, rig: DeploymentRig, ending: str) -> list[Batch]:
    """The same for a batch with this ending."""
    if ending == "completed":
        return life_of(caller, rig)
    with offline_work_held(rig):
        seen = [caller.create([b"{}"] if ending == "failed" else chat_lines(3))]
        if ending == "cancelled":
            seen += caller.poll(seen[0].id, lambda batch: batch.status == "in_progress")
            seen.append(caller.batches.cancel(seen[0].id))
        return seen + caller.poll(seen[0].id, lambda batch: batch.status in TERMINAL)


def can_follow(status: str) -> set[str]:
    """This state and all that may come after it, at once or later."""
    return {status}.union(*(can_follow(later) for later in NEXT.get(status, ())))


@pytest.mark.parametrize("ending", INSTANTS)
def test_36_a_batch_goes_its_way(caller: Caller, batch_rig: DeploymentRig, ending: str) -> None:
    """Observed statuses form a path of the section 2 table; timestamps are non-decreasing in state
    order and never change once set."""
    seen = life_until(caller, batch_rig, ending)

    assert (seen[0].status, seen[-1].status) == ("validating", ending)
    for earlier, later in pairwise(seen):
        assert later.status in can_follow(earlier.status)
        for instant in ALL_INSTANTS:
            assert getattr(earlier, instant) in {None, getattr(later, instant)}
    last = seen[-1]
    instants = [getattr(last, instant) for instant in INSTANTS[ending]]
    assert None not in instants
    assert instants == sorted(instants)
    unset = ALL_INSTANTS.difference(INSTANTS[ending])
    assert all(getattr(last, instant) is None for instant in unset)


def test_37_counts_never_fall(caller: Caller, batch_rig: DeploymentRig) -> None:
    """`request_counts` never decreases and total is fixed from in_progress on."""
    seen = life_of(caller, batch_rig)

    for earlier, later in pairwise(counts(batch) for batch in seen):
        assert all(a <= b for a, b in zip(earlier, later, strict=True))
    totals = {counts(batch)[0] for batch in seen if batch.status != "validating"}
    assert totals == {NUM_ROWS + 7}
    assert {batch.model for batch in seen if batch.status != "validating"} == {MODEL}
    assert counts(seen[-1]) == (NUM_ROWS + 7, NUM_ROWS + 5, 2)


def test_38_files_come_at_the_end(caller: Caller, batch_rig: DeploymentRig) -> None:
    """File ids are null in every non-terminal poll."""
    *running, ended = life_of(caller, batch_rig)

    assert {"validating", "in_progress"} <= {batch.status for batch in running}
    assert {batch.output_file_id for batch in running} == {None}
    assert {batch.error_file_id for batch in running} == {None}
    assert ended.output_file_id and ended.error_file_id


def test_39_all_succeed(caller: Caller) -> None:
    """All succeed: completed, output file set, `error_file_id` null, `errors` null."""
    batch = caller.run(chat_lines(10))

    assert batch.status == "completed"
    assert batch.output_file_id is not None
    assert batch.error_file_id is None and batch.errors is None
    assert counts(batch) == (10, 10, 0)
    assert len(caller.lines(batch.output_file_id)) == 10


def test_40_all_fail(caller: Caller) -> None:
    """All fail at the engine (400): completed, `output_file_id` null, error file set."""
    batch = caller.run(chat_lines(60, REFUSED))

    assert batch.status == "completed"
    assert batch.output_file_id is None and batch.errors is None
    assert counts(batch) == (60, 0, 60)
    assert len(caller.lines(batch.error_file_id)) == 60


def test_41_some_fail(caller: Caller) -> None:
    """Mixed: counts match line counts; ids are disjoint; the union equals the input set."""
    good, bad = chat_lines(12), chat_lines(5, REFUSED)

    batch = caller.run([*good[:6], *bad, *good[6:]])

    assert (batch.status, counts(batch)) == ("completed", (17, 12, 5))
    done, failed = (caller.lines(file) for file in (batch.output_file_id, batch.error_file_id))
    assert len(done) == 12 and len(failed) == 5
    assert {line["custom_id"] for line in done} == {line["custom_id"] for line in good}
    assert {line["custom_id"] for line in failed} == {line["custom_id"] for line in bad}


@pytest.mark.parametrize(
    "custom_id",
    [
        "\"quoted\" and 'so'",
        "🦜🇺🇦 é e\u0301",
        "two\nlines\r\n\ttabs",
        "x" * 512,
        "文" * 512,
        "\\u0041/",
    ],
    ids=["quotes", "emoji", "newlines", "long", "long in bytes", "escapes"],
)
def test_44_every_id_round_trips(caller: Caller, custom_id: str) -> None:
    """`custom_id` with quotes, emoji, newline and 512 characters round-trips."""
    batch = caller.run([chat_line(custom_id), chat_line("b", REFUSED)])
    assert set(caller.results(batch)) == {custom_id, "b"}


def test_45_results_are_joined_by_id(caller: Caller) -> None:
    """Requests finishing out of order still give a correct join."""
    lines = [*chat_lines(4, LATE), *chat_lines(40)]

    results = caller.results(caller.run(lines))

    assert set(results) == {line["custom_id"] for line in lines}
    for line in lines:
        answer = results[line["custom_id"]]["response"]["body"]["choices"][0]["message"]
        online = caller.api.chat.completions.create(**line["body"])
        assert answer["content"] == online.choices[0].message.content


@pytest.mark.parametrize("status", [429, 503])
def test_46_refusals_that_pass_are_not_seen(
    caller: Caller, batch_rig: DeploymentRig, status: int
) -> None:
    """Engine 429 / 503 twice, then 200: one success line, no error line."""
    uses = batch_rig.folder / "script.json.used"
    num_before = len(uses.read_text().split()) if uses.exists() else 0

    batch = caller.run([chat_line("a", busy(status, caller.kind))])

    assert len(uses.read_text().split()) == num_before + 2
    assert (batch.status, counts(batch), batch.error_file_id) == ("completed", (1, 1, 0), None)
    (line,) = caller.lines(batch.output_file_id)
    assert (line["custom_id"], line["response"]["status_code"]) == ("a", 200)
