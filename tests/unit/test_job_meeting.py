"""Rows of several jobs that share a prefix run together."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_builders import make_active_job

from batchrun.daemon.dispatch import bring_together
from batchrun.daemon.job import ActiveJob

DOCUMENTS = [letter * 600 for letter in "abc"]


def take(job: ActiveJob, others: list[ActiveJob]) -> str:
    """Hand out the job's next row; the letter of its document."""
    row = job.queue.peek(0.0)
    assert row is not None
    job.queue.take(row)
    bring_together(job, row, [job, *others])
    return str(job.rows.read_rows([row])[0]["text"])[0]


@pytest.fixture
def first(tmp_path: Path) -> ActiveJob:
    texts = [document + f"first {i}" * 60 for document in DOCUMENTS for i in range(2)]
    return make_active_job(tmp_path / "first", texts)


def test_a_later_job_goes_on_with_the_document_that_is_at_work(
    first: ActiveJob, tmp_path: Path
) -> None:
    texts = [document + "later" * 99 for document in reversed(DOCUMENTS)]
    later = make_active_job(tmp_path / "later", texts)

    taken = [take(job, [other]) for job, other in [(first, later), (later, first)] * 3]

    assert taken == ["a", "a", "a", "c", "b", "b"]


def test_a_document_that_every_row_shares_changes_no_order(
    first: ActiveJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.daemon.dispatch.MAX_ROWS", 2)
    texts = [f"{i}" * 600 for i in range(2)] + [DOCUMENTS[0] + f"{i}" * 300 for i in range(3)]
    later = make_active_job(tmp_path / "later", texts)
    alone = later.queue.peek(0.0)

    take(first, [later])

    assert later.queue.peek(0.0) == alone


def test_jobs_of_other_models_do_not_meet(first: ActiveJob, tmp_path: Path) -> None:
    other = make_active_job(tmp_path / "other", ["x" * 600, DOCUMENTS[0]], "/v1/embeddings")
    alone = other.queue.peek(0.0)

    take(first, [other])

    assert other.queue.peek(0.0) == alone
