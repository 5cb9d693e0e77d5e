"""A 404 may be one row's fault, or the job's: that rows fail alike, and none succeeds."""

from __future__ import annotations

from batchrun.daemon.faults import IDENTICAL_ERRORS_LIMIT, MAX_DOUBTS, Doubts, Verdict
from batchrun.types import RowError

ROW, JOB, UNKNOWN = Verdict.ROW, Verdict.JOB, Verdict.UNKNOWN
MISSING = RowError("http_404", "Response with id 'resp_123' not found.", 404)
MODEL = RowError("model_not_found", "The model x does not exist.", 404)


def test_rows_that_fail_alike_before_any_succeeds_are_the_job_s_fault() -> None:
    doubts = Doubts()

    assert [doubts.judge(row, MODEL, 100) for row in range(3)] == [UNKNOWN, UNKNOWN, JOB]


def test_a_job_of_one_row_fails_with_it() -> None:
    assert Doubts().judge(0, MODEL, 1) is JOB


def test_a_row_that_fails_while_others_succeed_ends_with_its_error() -> None:
    doubts = Doubts()

    assert doubts.judge(4, MISSING, 6) is UNKNOWN
    doubts.succeeded()
    assert doubts.judge(4, MISSING, 5) is ROW


def test_the_last_row_of_a_job_that_went_well_ends_with_its_error() -> None:
    doubts = Doubts(num_ok=5)
    verdicts = [doubts.judge(4, MISSING, 1) for _ in range(MAX_DOUBTS + 1)]

    assert verdicts == [UNKNOWN] * MAX_DOUBTS + [ROW]


def test_rows_that_fail_each_in_its_way_end_with_their_errors() -> None:
    doubts = Doubts()
    errors = [RowError("http_404", f"no response resp_{row}", 404) for row in range(8)]
    verdicts = [
        doubts.judge(row, error, 8)
        for _ in range(MAX_DOUBTS + 1)
        for row, error in enumerate(errors)
    ]

    assert set(verdicts[-8:]) == {ROW} and JOB not in verdicts


def test_a_setting_that_breaks_in_the_middle_of_a_job_pauses_it() -> None:
    doubts = Doubts(num_ok=50)
    verdicts = [doubts.judge(row, MODEL, 100) for row in range(IDENTICAL_ERRORS_LIMIT)]

    assert verdicts[-1] is JOB and set(verdicts[:-1]) == {UNKNOWN}


def test_one_row_that_is_tried_again_speaks_for_no_other() -> None:
    doubts = Doubts()

    assert JOB not in [doubts.judge(0, MODEL, 9) for _ in range(3)]
