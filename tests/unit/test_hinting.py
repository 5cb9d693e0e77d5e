"""The hints that the daemon sends are hints that the scheduler reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from job_builders import make_active_job

from batchrun.daemon.dispatch import Assigner, shared_prefixes
from batchrun.daemon.engine_link import SCHEDULER_WINDOW
from batchrun.daemon.in_flight import Assignment, EngineSlot
from batchrun.daemon.job import ActiveJob, Hinter
from batchrun.estimator.answer_length import AnswerLengths
from batchrun.hints import HINT_KEY, MAX_NODES_WRITTEN, RowHint, SharedPrefixes, put_hint, read_hint
from batchrun.jobs.expected_answers import num_choices
from batchrun.pool.row_queue import Window
from batchrun.types import Usage

JobMaker = Callable[..., ActiveJob]


@pytest.fixture
def make_job(tmp_path: Path) -> JobMaker:
    return partial(make_active_job, tmp_path)


def hint_of(hinter: Hinter, job: ActiveJob, row: int, *, is_urgent: bool = False) -> RowHint:
    body: dict[str, object] = {"vllm_xargs": {"mine": 1}}
    sent = hinter.hint(job, row, shared_prefixes(job, row), is_urgent=is_urgent)
    assert sent is not None
    put_hint(body, sent, "secret")
    extra = body["vllm_xargs"]
    assert isinstance(extra, dict)
    assert extra["mine"] == 1
    read = read_hint(extra[HINT_KEY], "secret")
    assert isinstance(read, RowHint)
    return read


def test_rows_to_come_count_down_along_the_planned_order(make_job: JobMaker) -> None:
    documents = ["a" * 600, "b" * 600]
    job = make_job([documents[i % 2] + str(i) * 300 for i in range(6)])
    hinter = Hinter(epoch=4)

    hints = []
    for row in job.plan.order.rows.tolist():
        job.queue.take(row)
        hints.append(hint_of(hinter, job, row))

    assert [hint.rank - hints[0].rank for hint in hints] == list(range(6))
    assert [hint.nodes[0].num_rows_to_come for hint in hints] == [2, 1, 0, 2, 1, 0]
    assert len({hint.nodes[0].node for hint in hints[:3]}) == 1
    assert hints[0].nodes[0].node != hints[3].nodes[0].node
    assert hints[0].nodes[0].next_rank == hints[1].rank


def test_urgent_rows_go_before_all_that_wait_in_the_order_in_which_they_came(
    make_job: JobMaker,
) -> None:
    job = make_job([str(i) * 300 for i in range(5)])
    hinter = Hinter(epoch=1)

    ranks = [hint_of(hinter, job, row, is_urgent=row in {1, 3}).rank for row in range(5)]

    assert sorted(range(5), key=ranks.__getitem__) == [1, 3, 0, 2, 4]
    assert min(ranks) >= 0


def test_a_row_that_shares_nothing_has_no_nodes(make_job: JobMaker) -> None:
    job = make_job(["x" * 600, "y" * 600])

    assert hint_of(Hinter(1), job, 0).nodes == ()


def test_of_a_long_path_the_ends_are_told(make_job: JobMaker) -> None:
    texts = ["z" * (256 * n) + str(n) * 256 for n in range(1, 14)]
    job = make_job(texts)
    deepest = max(range(len(texts)), key=lambda row: len(job.queue.path_of(row)))
    path = job.queue.path_of(deepest)

    told = [node.node for node in hint_of(Hinter(1), job, deepest).nodes]

    assert len(path) > MAX_NODES_WRITTEN == len(told)
    assert told[0] == path[0]
    assert told[1:] == path[1 - MAX_NODES_WRITTEN :]


def test_the_room_that_answers_so_far_stay_within_is_told(make_job: JobMaker) -> None:
    job = make_job(["x" * 600, "y" * 600])
    before = hint_of(Hinter(1), job, 0).output_tokens
    for row in range(300):
        job.answers.sent(row)
        job.answers.ended(row, 16)

    assert (before, hint_of(Hinter(1), job, 1).output_tokens) == (128, 16)


@pytest.mark.parametrize("request_part", [{"n": 4}, {"n": "{{ n }}"}, {}])
def test_each_choice_of_a_row_is_told_its_own_share_of_the_room(
    tmp_path: Path, request_part: dict[str, object]
) -> None:
    """However the rows came to have four: by their job, a template, or each by its own body."""
    job = make_active_job(tmp_path, [str(row) * 600 for row in range(700)])
    job.spec = job.spec.model_copy(update={"request": request_part})
    num_known = num_choices(request_part)
    job.answers = AnswerLengths([100 * num_known], num_choices=num_known)
    assigner: Assigner[ActiveJob, EngineSlot] = Assigner([EngineSlot(window=Window(1_000, 10**9))])
    assigner.join(job, deadline_at=None)

    told = []
    for tick in range(100):
        for sent in assigner.assign(now_s=float(tick))[0]:
            told.append(hint_of(Hinter(1), job, sent.row).output_tokens)
            sent.slot.release(sent)
            job.queue.finish(sent.row)
            assigner.settle(sent, Usage(100, 400, 0, num_choices=4))

    assert len(told) == 700
    assert all(isinstance(tokens, int) and 100 <= tokens <= 110 for tokens in told)


def test_endpoints_without_a_place_for_it_get_no_hint(make_job: JobMaker) -> None:
    assert Hinter(1).hint(make_job(["x", "y"], "/v1/embeddings"), 0, SharedPrefixes()) is None
    assert Hinter(1).hint(make_job(["x", "y"], "/v1/responses"), 0, SharedPrefixes()) is not None


def test_rows_that_are_taken_together_count_as_rows_to_come(make_job: JobMaker) -> None:
    job = make_job(["a" * 600 + str(i) * 300 for i in range(4)])
    slot = EngineSlot(window=Window(*SCHEDULER_WINDOW))
    assigner: Assigner[ActiveJob, EngineSlot] = Assigner([slot])
    assigner.join(job, deadline_at=None)

    together, _ = assigner.assign(now_s=0.0)

    assert [sent.prefixes.nodes[0][1] for sent in together] == [3, 2, 1, 0]


def test_jobs_that_take_turns_tell_when_their_next_row_comes(tmp_path: Path) -> None:
    """A document of 12 rows is a turn; what all rows of a job begin with is used a turn later."""
    slot = EngineSlot(window=Window(1_000, 10**9))
    assigner: Assigner[ActiveJob, EngineSlot] = Assigner([slot])
    for name in "abc":
        texts = [name * 300 + str(i // 12) * 900 + str(i) * 50 for i in range(120)]
        assigner.join(make_active_job(tmp_path / name, texts), deadline_at=None)

    sent: list[Assignment[ActiveJob, EngineSlot]] = []
    for tick in range(200):
        sent += assigner.assign(tick / 10)[0]

    assert len(sent) == 360
    ranks: dict[str, list[int]] = {}
    for rank, row in enumerate(sent):
        ranks.setdefault(row.job.id, []).append(rank)
    told = {rank: rank + row.prefixes.next_in_rows for rank, row in enumerate(sent)}
    wrong = [
        rank
        for of_job in ranks.values()
        for rank, next_rank in pairwise(of_job)
        if told[rank] != next_rank
    ]
    assert [told[rank] - rank for rank in ranks[sent[0].job.id]].count(25) == 9
    assert len(wrong) == 3
