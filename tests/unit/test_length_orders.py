"""The orders by length that `benchmarks.buckets` tries: prefix groups stay whole in all of them."""

from __future__ import annotations

from itertools import groupby

import pytest

from batchrun.simulator.offline_jobs import JobShape
from benchmarks.buckets import ORDERS, PLANNED, by_length
from benchmarks.row_feeds import DrawnJob, drawn_job
from benchmarks.scenarios import Order, draw_job


@pytest.fixture
def job() -> DrawnJob:
    shape = JobShape(12, (100, 4_000), (1, 5), (10, 20), (4, 8))
    return drawn_job(draw_job(shape, 0, Order.SHUFFLED))


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_has_all_rows_and_keeps_documents_together(job: DrawnJob, name: str) -> None:
    rows = ORDERS[name](job).tolist()
    stretches = [document for document, _ in groupby(job.drawn.rows[row].document for row in rows)]

    assert sorted(rows) == list(range(len(job.drawn.rows)))
    assert len(stretches) == len(set(stretches)) == 12


def test_documents_stand_by_length_or_within_buckets_as_planned(job: DrawnJob) -> None:
    def lengths(rows: list[int]) -> list[int]:
        return [len(job.drawn.documents[job.drawn.rows[row].document]) for row in rows]

    shortest_first = lengths(by_length(job).tolist())
    longest_first = lengths(by_length(job, descends=True).tolist())

    assert shortest_first == sorted(shortest_first) == longest_first[::-1]
    assert by_length(job, 1).tolist() == ORDERS[PLANNED](job).tolist()
