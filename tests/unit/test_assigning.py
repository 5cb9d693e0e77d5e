"""Jobs beside each other: rows by weight, room for a job that is due, pauses without a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_builders import make_tree_job

from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.dispatcher import SentRow
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.job import ActiveJob
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.pool.row_queue import Window
from batchrun.types import EnginePhase, Usage

Rows = Assigner[ActiveJob, Slot]
WINDOW_ROWS = 16
ROW_TOKENS = 256 // 4 + 128
"""What a row computes: a prompt of one letter, and its answer."""


@pytest.fixture
def assigner() -> Rows:
    """One engine that answers, with a small window."""
    engine = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9000"))
    engine.state = EnginePhase.READY
    return Assigner([Slot(engine, uses_priority=False, window=Window(WINDOW_ROWS, 10**6))])


def fill(assigner: Rows, now_s: float) -> list[SentRow]:
    """All that the window takes now."""
    assigned: list[SentRow] = []
    while new := assigner.assign(now_s)[0]:
        assigned += new
    return assigned


def end(assigner: Rows, assignment: SentRow) -> None:
    """The row is done, at the cost that was expected."""
    job, row = assignment.job, assignment.row
    assignment.slot.release(assignment)
    assigner.settle(assignment, Usage(ROW_TOKENS - 128, 128, 0))
    job.queue.finish(row)


def run(assigner: Rows, seconds: float, rows_per_s: int, now_s: float = 0.0) -> list[str]:
    """The engine ends so many rows a second, the oldest first; the jobs of these rows."""
    in_flight: list[SentRow] = []
    ended: list[str] = []
    for number in range(round(seconds * rows_per_s)):
        in_flight += fill(assigner, now_s + number / rows_per_s)
        first = in_flight.pop(0)
        end(assigner, first)
        ended.append(first.job.record.id)
    for assignment in in_flight:
        assignment.slot.release(assignment)
        assigner.give_back(assignment)
    return ended


def letters(num_rows: int, letter: str = "a") -> list[str]:
    return [letter] * num_rows


def test_rows_of_equal_cost_end_by_weight(assigner: Rows) -> None:
    for name, weight in (("light", 1.0), ("heavy", 3.0)):
        job = make_tree_job(name, letters(6_000, name[0].replace("l", "b").replace("h", "c")))
        job = replace(job, spec=job.spec.model_copy(update={"weight": weight}))
        assigner.join(job, deadline_at=None)

    ended = run(assigner, seconds=60, rows_per_s=100)

    quantum_rows = 32_768 // ROW_TOKENS
    assert ended.count("light") == pytest.approx(1_500, abs=quantum_rows)


def test_a_job_that_is_due_soon_gets_into_a_full_window(assigner: Rows) -> None:
    assigner.join(make_tree_job("patient", letters(20_000)), deadline_at=None)
    run(assigner, seconds=120, rows_per_s=100)
    in_flight = fill(assigner, 120.0)
    assert len(in_flight) == WINDOW_ROWS

    assigner.join(make_tree_job("urgent", letters(400, "b")), deadline_at=128.0)
    first = assigner.assign(120.1)[0]

    assert [(a.job.record.id, a.is_urgent) for a in first] == [("urgent", True)] * 2


def test_a_job_whose_deadline_is_too_soon_is_told_at_once(assigner: Rows) -> None:
    assigner.join(make_tree_job("patient", letters(20_000)), deadline_at=None)
    run(assigner, seconds=120, rows_per_s=100)

    assigner.join(make_tree_job("late", letters(4_000, "b")), deadline_at=130.0)
    assigner.assign(120.1)

    outlook = assigner.turns.outlook("late")
    assert outlook is not None and not outlook.is_kept
    assert "will miss its deadline by about 18 s" in str(outlook)
    assert [news.job_id for news in assigner.turns.take_news()] == ["late"]


def test_an_engine_of_another_model_without_rows_hides_no_deadline(assigner: Rows) -> None:
    other = AttachedEngine(AttachedSettings(name="two", url="http://127.0.0.1:9001"))
    other.state = EnginePhase.READY
    slots = [Slot(other, uses_priority=False, window=Window(16, 10**6), models=("large",))]
    beside: Rows = Assigner([replace(assigner.slots[0], models=("small",)), *slots])
    job = make_tree_job("due", letters(200))
    job.spec = job.spec.model_copy(update={"model": "small"})
    beside.join(job, deadline_at=10.0)
    run(beside, 40.0, 2)
    outlook = beside.turns.outlook("due")
    assert outlook is not None and "miss" in str(outlook)


def test_rows_of_a_job_that_left_are_nobodys(assigner: Rows) -> None:
    job = make_tree_job("paused", letters(8))
    assigner.join(job, deadline_at=None)
    first, second, *_ = fill(assigner, 0.0)

    assigner.leave(job)
    end(assigner, first)
    assigner.give_back(second)

    assert assigner.assign(0.0) == ([], None)
    assert assigner.turns._shares.num_in_flight == 0
    job.queue.check()
    assigner.turns.check()


def test_a_turn_lasts_until_its_prefix_group_is_handed_out(assigner: Rows) -> None:
    for name in ("one", "two"):
        texts = [letter * 2 + tail for letter in "abcd" for tail in "xyz"]
        assigner.join(make_tree_job(name, texts), deadline_at=None)

    jobs = [a.job.record.id for a in fill(assigner, 0.0)]

    assert jobs[:12] == ["one"] * 3 + ["two"] * 3 + ["one"] * 3 + ["two"] * 3


def test_rows_that_the_engine_has_from_before_are_taken_over_and_not_handed_out(
    assigner: Rows,
) -> None:
    job = make_tree_job("job", ["aa", "ab", "ac", "b", "c"], done=[3])
    assigner.join(job, deadline_at=None)

    adopted = [assigner.adopt(job, row, 0, now_s=1.0) for row in (1, 2, 2, 3)]
    job.queue.check()
    assert [each is not None for each in adopted] == [True, True, False, False]
    first, second = adopted[:2]
    assert first is not None and second is not None
    assert sorted(each.row for each in fill(assigner, now_s=2.0)) == [0, 4]

    end(assigner, first)
    second.slot.release(second)
    assigner.give_back(second, ready_at_s=5.0)
    assert fill(assigner, now_s=4.0) == []
    again = assigner.adopt(job, 2, 0, now_s=4.0)
    assert again is not None
    end(assigner, again)
    job.queue.check()
    assert not job.queue.num_pending
    assert assigner.jobs["job"].queue.num_in_flight == 2
    assert fill(assigner, now_s=6.0) == []
