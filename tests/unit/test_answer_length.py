"""How long answers will be: learnt from those that ended, and not misled by who ends first."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.estimator.answer_length import (
    OVERTAKEN_BY_ANSWERS,
    PRIOR_ANSWERS,
    REMEMBERED_ANSWERS,
    ROOM_LEVEL,
    AnswerLengths,
)

BUCKET_SHARE = 1.1


def chat_length(rng: random.Random) -> int:
    return min(800, max(4, int(rng.lognormvariate(5.0, 0.8))))


def run(answers: AnswerLengths, lengths: list[int], *, at_once: int, until: int) -> None:
    """Rows that generate a token each in a step, `at_once` side by side, until so many ended."""
    running: list[list[int]] = []
    queue = list(enumerate(lengths))
    num_ended = 0
    while num_ended < until:
        while queue and len(running) < at_once:
            row, length = queue.pop(0)
            answers.sent(row)
            running.append([row, length, length])
        steps = min(left for _, _, left in running)
        for entry in running:
            entry[2] -= steps
        for row, length, left in list(running):
            if not left:
                answers.ended(row, length)
                num_ended += 1
        running = [entry for entry in running if entry[2]]


def test_before_the_first_answer_the_prior_is_all_there_is() -> None:
    guess, others = AnswerLengths([128]), AnswerLengths([50] * 90 + [500] * 10)

    assert (guess.mean_tokens, guess.room_tokens) == (128, 128)
    assert others.mean_tokens == pytest.approx(95)
    assert others.quantile_tokens(0.95) >= 500


def test_a_few_answers_do_not_make_the_estimate_jump() -> None:
    answers = AnswerLengths([128])
    for row in range(3):
        answers.sent(row)
        answers.ended(row, 4)

    assert answers.room_tokens == 128
    assert answers.mean_tokens > 110


def test_the_prior_fades() -> None:
    answers = AnswerLengths([128])
    for row in range(10 * PRIOR_ANSWERS):
        answers.sent(row)
        answers.ended(row, 10)

    assert answers.room_tokens <= 10 * BUCKET_SHARE
    assert answers.mean_tokens < 25


def answer(answers: AnswerLengths, rows: Iterable[int], tokens: int, num_choices: int) -> list[int]:
    """Rows end one by one, with so many tokens a choice; the room that each was told."""
    told = []
    for row in rows:
        answers.sent(row)
        told.append(answers.room_tokens)
        answers.ended(row, tokens * num_choices, num_choices)
    return told


def test_each_choice_of_a_row_has_room_as_long_as_choices_are() -> None:
    known, own = AnswerLengths([400], num_choices=4), AnswerLengths([100], num_choices=None)
    told = answer(known, range(500), 100, 4) + answer(own, range(500), 100, 4)

    assert 100 <= min(told) <= max(told) <= 100 * BUCKET_SHARE
    assert known.mean_tokens == pytest.approx(400)
    assert 350 < own.mean_tokens < 400


@pytest.mark.parametrize("seed", range(3))
def test_rows_with_unlike_numbers_of_choices_all_get_room_for_one(seed: int) -> None:
    rng, answers = random.Random(seed), AnswerLengths([100], num_choices=None)
    told = []
    for row in range(3_000):
        told += answer(answers, [row], 100, rng.choice((1, 8, 512)))

    assert 100 <= min(told) <= max(told) <= 100 * BUCKET_SHARE


def test_after_a_restart_stored_answers_are_soon_forgotten_as_choices() -> None:
    """How many choices a stored answer had is not known where rows bring their own number."""
    again = AnswerLengths([100], [800] * 1_000, num_choices=None)
    assert again.mean_tokens > 700
    answer(again, range(100), 100, 8)

    assert 100 <= again.room_tokens <= 100 * BUCKET_SHARE


@pytest.mark.parametrize("untold", [0, -200])
def test_where_choices_are_not_told_rows_have_as_many_as_known(untold: int) -> None:
    answers = AnswerLengths([400], num_choices=4)
    for row in range(200):
        answers.sent(row)
        answers.ended(row, 400, untold)

    assert 100 <= answers.room_tokens <= 100 * BUCKET_SHARE


def test_the_room_holds_its_share_of_the_answers() -> None:
    rng = random.Random(1)
    lengths = [chat_length(rng) for _ in range(20_000)]
    answers = AnswerLengths([128])

    run(answers, lengths, at_once=100, until=19_000)

    others = sorted(chat_length(rng) for _ in range(5_000))
    within = sum(length <= answers.room_tokens for length in others) / len(others)
    assert ROOM_LEVEL - 0.03 <= within <= ROOM_LEVEL + 0.05
    assert answers.mean_tokens == pytest.approx(statistics.fmean(others), rel=0.06)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_answers_are_the_shortest_and_do_not_mislead(seed: int) -> None:
    """A third of the first wave has ended: the mean of these alone is half of the truth."""
    rng = random.Random(seed)
    lengths = [chat_length(rng) for _ in range(256)]
    answers, truth = AnswerLengths([204]), statistics.fmean(lengths)
    naive = statistics.fmean(sorted(lengths)[:85])

    run(answers, lengths, at_once=256, until=85)

    assert naive < 0.5 * truth
    assert answers.mean_tokens > 0.75 * truth


def test_a_row_that_many_have_overtaken_counts_as_longer_than_they() -> None:
    answers = AnswerLengths([10])
    answers.sent("long")
    for row in range(OVERTAKEN_BY_ANSWERS):
        answers.sent(row)
        answers.ended(row, 10)
    assert answers.quantile_tokens(1.0) <= 10 * BUCKET_SHARE

    answers.ended("long", 10_000)

    assert answers.quantile_tokens(1.0) >= 10_000
    num = PRIOR_ANSWERS + OVERTAKEN_BY_ANSWERS + 1
    assert answers.mean_tokens == pytest.approx((10_000 + 10 * (num - 1)) / num)


def test_rows_that_come_back_without_an_answer_hold_up_nobody() -> None:
    answers = AnswerLengths([128])
    answers.sent("lost")
    for row in range(3 * PRIOR_ANSWERS):
        answers.sent(row)
    for row in range(3 * PRIOR_ANSWERS):
        answers.ended(row, 20) if row % 3 else answers.ended(row, 0)
    answers.lost("lost")

    assert answers.num_ended == 2 * PRIOR_ANSWERS
    assert answers.mean_tokens == pytest.approx((128 + 2 * 20) / 3)


def test_it_follows_rows_that_become_longer() -> None:
    rng = random.Random(3)
    lengths = [round(chat_length(rng) * (1 + i / 3_000)) for i in range(9_000)]
    answers = AnswerLengths([128])

    run(answers, lengths, at_once=100, until=8_900)

    latest = statistics.fmean(lengths[-1_000:])
    assert 0.75 * latest <= answers.mean_tokens <= 1.1 * latest
    assert answers.mean_tokens > 1.3 * statistics.fmean(lengths)


def test_the_answers_from_before_a_restart_count_as_if_they_came_now() -> None:
    rng = random.Random(7)
    lengths = [chat_length(rng) for _ in range(3 * REMEMBERED_ANSWERS)]
    before, after = AnswerLengths([128]), AnswerLengths([128], lengths[-REMEMBERED_ANSWERS:])
    for row, length in enumerate(lengths):
        before.sent(row)
        before.ended(row, length)

    assert after.room_tokens == pytest.approx(before.room_tokens, rel=0.1)
    assert after.mean_tokens == pytest.approx(before.mean_tokens, rel=0.06)
    assert after.num_ended == REMEMBERED_ANSWERS


@given(
    st.lists(
        st.tuples(st.sampled_from("sel"), st.integers(0, 40), st.integers(0, 200_000)),
        max_size=600,
    )
)
def test_whatever_happens_the_estimates_lie_among_the_lengths(
    events: list[tuple[str, int, int]],
) -> None:
    answers = AnswerLengths([128])
    seen = [128]
    for event, row, length in events:
        if event == "s":
            answers.lost(row)
            answers.sent(row)
        elif event == "e":
            answers.ended(row, length)
            seen.append(length or 128)
        else:
            answers.lost(row)
        assert min(seen) * 0.999 <= answers.mean_tokens <= max(seen) * 1.001
        assert min(seen) * 0.999 <= answers.room_tokens <= max(seen) * BUCKET_SHARE + 1
