"""Jobs beside each other: rows by weight, room for a job that is due, pauses without a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_builders import make_tree_job

from batchrun.daemon.dispatch import Assigner, pools_of
from batchrun.daemon.dispatcher import SentRow
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.prices import USUAL, output_token_s
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.pool.fair_share import NO_POOL
from batchrun.pool.job_shares import Owner
from batchrun.pool.row_queue import RowLoad, Window
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


def end(assigner: Rows, assignment: SentRow, output_tokens: int = 128) -> None:
    """The row is done, mostly at the cost that was expected."""
    job, row = assignment.job, assignment.row
    assignment.slot.release(assignment)
    assigner.settle(assignment, Usage(ROW_TOKENS - 128, output_tokens, 0))
    job.queue.finish(row)


def run(
    assigner: Rows, seconds: float, rows_per_s: int, now_s: float = 0.0, output_tokens: int = 128
) -> list[str]:
    """The engine ends so many rows a second, the oldest first; the jobs of these rows."""
    in_flight: list[SentRow] = []
    ended: list[str] = []
    for number in range(round(seconds * rows_per_s)):
        in_flight += fill(assigner, now_s + number / rows_per_s)
        first = in_flight.pop(0)
        end(assigner, first, output_tokens)
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


def test_a_speed_is_seen_by_answers_as_long_as_they_turn_out(assigner: Rows) -> None:
    assigner.join(make_tree_job("long", letters(400)), deadline_at=None)
    row_s = 4_000 * output_token_s(USUAL, ROW_TOKENS - 128.0)

    run(assigner, seconds=75, rows_per_s=round(1 / row_s), output_tokens=4_000)

    assert assigner.slots[0].load.speed == pytest.approx(1.0, abs=0.05)


def test_rows_that_fail_at_once_make_no_engine_fast(assigner: Rows) -> None:
    assigner.join(make_tree_job("job", letters(400)), deadline_at=None)
    for assignment in fill(assigner, 0.0):
        assignment.slot.release(assignment)
        assigner.settle(assignment, Usage(), is_ok=False)
        assignment.job.queue.finish(assignment.row)

    assert assigner.slots[0].load.speed == 1.0


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


def test_jobs_share_a_pool_where_their_models_share_an_engine(assigner: Rows) -> None:
    models = [("small",), ("large",), ("adapter",), ("large", "adapter"), None]
    slots = [replace(assigner.slots[0], models=each) for each in models]

    numbers: dict[str, int] = {}
    assert pools_of(slots, numbers) == [0, 1, 1, 1, NO_POOL]
    assert pools_of(slots[1:], numbers) == [1, 1, 1, NO_POOL], "though the first engine has gone"
    slots[2].models, slots[3].models = ("a",), ("large", "a")
    assert pools_of(slots[1:], numbers) == [1, 1, 1, NO_POOL], "though another adapter is there"
    slots[3].models = ("large",)
    assert pools_of(slots, numbers) == [0, 1, 2, 1, NO_POOL]
    assert pools_of([*slots, assigner.slots[0]], numbers) == [0, 0, 0, 0, NO_POOL, 0]


def test_the_first_engine_may_come_late_and_go_early(assigner: Rows) -> None:
    slots = [replace(assigner.slots[0], models=each) for each in [None, ("base",), ("base",)]]
    late: Rows = Assigner(slots)
    late.join(make_tree_job("job", letters(9)), deadline_at=None)
    slots[0].models = ("base",)
    assert late.pool_of("base") == (0, slots)
    first = AttachedEngine(AttachedSettings(name="first", url="http://127.0.0.1:9001"))
    first.state, slots[0].engine = EnginePhase.STOPPED, first
    assert late.pool_of("base") == (0, slots[1:])


def test_a_pool_is_full_whatever_those_of_other_models_are(assigner: Rows) -> None:
    engine, window = assigner.slots[0].engine, Window(16, 10**6)
    slots = [
        Slot(engine, uses_priority=False, window=replace(window), models=(name,)) for name in "ab"
    ]
    beside: Rows = Assigner(slots)
    for model, num_rows in (("a", 3), ("b", 100)):
        job = make_tree_job(model, letters(num_rows))
        job.spec = job.spec.model_copy(update={"model": model})
        beside.join(job, deadline_at=None)

    assert len(fill(beside, 0.0)) == 3 + 16
    assert beside._saturated == {NO_POOL: False, 0: False, 1: True}


def test_a_model_has_the_pace_of_all_engines_that_share_models_with_its_own(
    assigner: Rows,
) -> None:
    slots = [replace(assigner.slots[0], models=each) for each in [("base",), ("base", "x"), None]]
    beside: Rows = Assigner(slots)

    assert beside.pool_of("x") == (0, slots[:2])
    assert beside.pool_of("another") == (NO_POOL, [])
    slots[2].models = ("another",)
    assert beside.pool_of("another") == (1, slots[2:])


@pytest.mark.parametrize(("speeds", "left"), [((1.0, 3.0), 0.25), ((None, None), 0.5)])
def test_an_eta_counts_the_engines_that_may_run_rows(
    assigner: Rows, speeds: tuple[float | None, ...], left: float
) -> None:
    one = assigner.slots[0]
    slots = [replace(one, window=Window(WINDOW_ROWS, 10**6), load=RowLoad(each)) for each in speeds]
    both: Rows = Assigner(slots)
    both.join(make_tree_job("job", letters(20_000)), deadline_at=None)
    run(both, seconds=120, rows_per_s=100)
    before = both.turns.predict(1.0, 10**6)
    slots[1].is_down = True
    fill(both, 120.0)
    after = both.turns.predict(1.0, 10**6)

    assert before is not None and after is not None
    assert after.expected_s == pytest.approx(before.expected_s / left, rel=0.01)


def test_rows_from_before_a_restart_cost_nothing_on_engines_of_other_models(
    assigner: Rows,
) -> None:
    engine, window = assigner.slots[0].engine, Window(16, 10**6)
    slots = [
        Slot(engine, uses_priority=False, window=replace(window), models=(name,)) for name in "ab"
    ]
    beside: Rows = Assigner(slots)
    for name, model in (("first", "a"), ("before", "b"), ("other", "a")):
        job = make_tree_job(name, letters(300))
        job.owner = Owner("other" if name == "other" else "key", is_bounded=True)
        job.spec = job.spec.model_copy(update={"model": model})
        beside.join(job, deadline_at=None)
    assert all(beside.adopt(beside.jobs["before"], row, 1, 0.0) for row in range(256))

    assert {row.job.id for row in fill(beside, 1.0) if row.engine == 0} == {"first", "other"}


def test_rows_that_an_engine_has_from_before_are_in_flight_from_now_on(assigner: Rows) -> None:
    job = make_tree_job("before", letters(64))
    assigner.join(job, deadline_at=None)
    adopted = [assigner.adopt(job, row, 0, 900_000.0) for row in range(32)]
    assigner.idle(900_005.0)
    for assignment in adopted[:16]:
        assert assignment is not None
        end(assigner, assignment)

    left_s = assigner.turns._times["before"].last_end_s(900_005.0)
    assert left_s is not None and left_s.high_s < 10


def test_rows_of_a_job_that_left_are_nobodys(assigner: Rows) -> None:
    job = make_tree_job("paused", letters(8))
    assigner.join(job, deadline_at=None)
    first, second, *_ = fill(assigner, 0.0)

    assigner.leave(job)
    end(assigner, first)
    assigner.give_back(second)

    assert assigner.assign(0.0) == ([], None)
    assert assigner.turns._shares.accounts == {}
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
