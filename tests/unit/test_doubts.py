"""A 404 may be one row's fault, or the job's: that rows fail alike, and none succeeds."""

from __future__ import annotations

from random import Random

import pytest

from batchrun.daemon.faults import (
    FIRST_DELAY_S,
    IDENTICAL_ERRORS_LIMIT,
    MAX_DOUBTS,
    MAX_RESTS,
    Doubts,
    Verdict,
)
from batchrun.types import RowError

ROW, JOB, REST, UNKNOWN = Verdict.ROW, Verdict.JOB, Verdict.REST, Verdict.UNKNOWN
MISSING = RowError("http_404", "Response with id 'resp_123' not found.", 404)
MODEL = RowError("model_not_found", "The model x does not exist.", 404)


def test_rows_that_fail_alike_before_any_succeeds_are_the_job_s_fault() -> None:
    doubts = Doubts()

    assert [doubts.judge(row, MODEL, {row}) for row in range(3)] == [UNKNOWN, UNKNOWN, JOB]


def test_rows_speak_for_no_others_that_are_in_flight() -> None:
    doubts, in_flight = Doubts(), set(range(40))

    verdicts = [doubts.judge(row, MISSING, in_flight) for row in range(3)]
    doubts.succeeded()
    verdicts += [doubts.judge(row, MISSING, in_flight) for row in range(3)]

    assert verdicts == [UNKNOWN] * 3 + [ROW] * 3


def test_a_job_whose_model_is_gone_pauses_once_all_rows_of_before_have_failed() -> None:
    doubts, in_flight, verdicts = Doubts(), set(range(256)), []
    for row in range(258):
        verdicts.append(doubts.judge(row, MODEL, in_flight))
        in_flight.remove(row)
        in_flight.add(256 + row)

    assert verdicts == [UNKNOWN] * 257 + [JOB]


@pytest.mark.parametrize("is_batch", [False, True])
def test_so_few_rows_as_speak_for_none_end_with_their_errors(*, is_batch: bool) -> None:
    doubts = Doubts(is_batch=is_batch)
    verdicts = [doubts.judge(row, MODEL, {row}) for _ in range(4) for row in range(2)]

    assert verdicts == [UNKNOWN] * 6 + [ROW] * 2


def test_a_batch_rests_while_each_of_its_rows_is_refused() -> None:
    doubts = Doubts(is_batch=True)
    verdicts = [doubts.judge(row, MODEL, {row}) for _ in range(9) for row in range(50)]

    assert verdicts == [UNKNOWN] * 2 + [REST] * 448
    beside = Doubts(is_batch=True)
    assert [beside.judge(row, MODEL, {row, 99}) for row in range(50)] == [UNKNOWN] * 50
    assert doubts.rest_s(Random(1)) <= FIRST_DELAY_S < doubts.rest_s(Random(1))
    rested_s = sum(doubts.rest_s(Random(1)) for _ in range(MAX_RESTS - 2))
    assert 300 < rested_s < 900
    assert doubts.judge(1, MODEL, {1}) is ROW, "who asks may be at fault"


def test_a_batch_waits_for_the_operator_where_the_engine_does_not_know_him() -> None:
    doubts, error = Doubts(is_batch=True), RowError("http_401", "Unauthorized", 401)

    assert [doubts.judge(row, error, {row}) for row in range(3)] == [UNKNOWN, UNKNOWN, JOB]


def test_a_row_that_fails_while_others_succeed_ends_with_its_error() -> None:
    doubts = Doubts()

    assert doubts.judge(4, MISSING, {4}) is UNKNOWN
    doubts.succeeded()
    assert doubts.judge(4, MISSING, {4}) is ROW


def test_the_last_row_of_a_job_that_went_well_ends_with_its_error() -> None:
    doubts = Doubts(num_ok=5)
    verdicts = [doubts.judge(4, MISSING, {4}) for _ in range(MAX_DOUBTS + 1)]

    assert verdicts == [UNKNOWN] * MAX_DOUBTS + [ROW]


def test_rows_that_fail_each_in_its_way_end_with_their_errors() -> None:
    doubts = Doubts()
    errors = [RowError("http_404", f"no response resp_{row}", 404) for row in range(8)]
    verdicts = [
        doubts.judge(row, error, {row})
        for _ in range(MAX_DOUBTS + 1)
        for row, error in enumerate(errors)
    ]

    assert set(verdicts[-8:]) == {ROW} and JOB not in verdicts


def test_a_setting_that_breaks_in_the_middle_of_a_job_pauses_it() -> None:
    doubts = Doubts(num_ok=50)
    verdicts = [doubts.judge(row, MODEL, {row}) for row in range(IDENTICAL_ERRORS_LIMIT)]

    assert verdicts[-1] is JOB and set(verdicts[:-1]) == {UNKNOWN}


def test_one_row_that_is_tried_again_speaks_for_no_other() -> None:
    doubts = Doubts()

    assert JOB not in [doubts.judge(0, MODEL, {0}) for _ in range(3)]


def test_a_row_that_fails_while_another_engine_answers_is_not_at_fault_yet() -> None:
    doubts = Doubts()
    verdicts = []
    for answers in (None, 1, 0):
        if answers is not None:
            doubts.succeeded(answers)
        verdicts.append(doubts.judge(4, MISSING, {4}, 0))

    assert verdicts == [UNKNOWN, UNKNOWN, ROW]
