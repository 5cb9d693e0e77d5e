"""Many results at once: in few statements, in bounded batches, acknowledged in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from store_builders import answered, refused

from batchrun.daemon import writer as writing
from batchrun.daemon.writer import Entry, ResultWriter
from batchrun.store import jobs, results
from batchrun.store.database import STATEMENT_ROWS, Store, _statement, insert_new
from batchrun.store.jobs import NewJob
from batchrun.store.schema import attempts
from batchrun.store.schema import results as results_table


def new_seq(store: Store, num_rows: int = 10_000) -> int:
    return jobs.create(store, NewJob("name", "{}", "{}", "hash", num_rows), now_s=0.0).seq


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 63, 64, 511, 512, 513, 1_671])
def test_any_number_of_rows_is_inserted(store: Store, num_rows: int) -> None:
    rows = [(1, row, row + 1) for row in range(num_rows)]

    with store.write() as connection:
        assert insert_new(connection, attempts, rows) == num_rows

    assert results.attempts_so_far(store, 1) == {row: row + 1 for row in range(num_rows)}


def test_rows_that_are_there_or_come_twice_are_inserted_once(store: Store) -> None:
    first = [(1, row, 1) for row in range(0, 600, 2)]
    second = [(1, row, 2) for row in range(600)] + [(1, 1, 3)]

    with store.write() as connection:
        assert insert_new(connection, attempts, first) == 300
        assert insert_new(connection, attempts, second) == 300

    assert results.attempts_so_far(store, 1) == {row: 1 + row % 2 for row in range(600)}


@pytest.mark.parametrize("size", STATEMENT_ROWS)
def test_postgresql_gets_the_same_statement_with_named_parameters(size: int) -> None:
    text, names = _statement("postgresql", results_table, size)

    assert text.endswith("ON CONFLICT DO NOTHING")
    assert names is not None
    assert names[:2] == ("job_seq_m0", "row_m0")
    assert len(set(names)) == size * len(results_table.columns)


def test_a_batch_of_answers_and_errors_reads_back_whole(store: Store) -> None:
    seq = new_seq(store)
    outcomes = [(seq, refused(row) if row % 5 == 0 else answered(row)) for row in range(1_500)]

    assert results.commit(store, outcomes, now_s=1.0) == 1_500

    read = list(results.read(store, seq))
    assert [result.row for result in read] == list(range(1_500))
    assert [result.error is not None for result in read] == [row % 5 == 0 for row in range(1_500)]


async def test_a_rush_of_results_is_committed_in_batches_of_bounded_size(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_BATCH", 100)
    seq = new_seq(store)
    batches: list[list[int]] = []

    def on_committed(batch: Sequence[Entry]) -> None:
        batches.append([outcome.row for _, outcome in batch])

    writer = ResultWriter(store, on_committed)
    for row in range(250):
        writer.put(seq, answered(row))
    running = asyncio.create_task(writer.run())
    await writer.flush()
    running.cancel()

    assert [len(batch) for batch in batches] == [100, 100, 50]
    assert [row for batch in batches for row in batch] == list(range(250))


async def test_results_are_committed_without_a_flush(store: Store) -> None:
    seq = new_seq(store)
    committed = asyncio.Event()
    writer = ResultWriter(store, lambda _: committed.set())
    running = asyncio.create_task(writer.run())

    writer.put(seq, answered(0))
    await committed.wait()

    assert results.done_rows(store, seq).tolist() == [0]
    running.cancel()


async def test_a_flush_waits_for_what_was_handed_over_before_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_BATCH", 10)
    seq = new_seq(store)
    writer = ResultWriter(store, lambda _: None)
    running = asyncio.create_task(writer.run())
    for row in range(35):
        writer.put(seq, answered(row))

    flushes = [asyncio.create_task(writer.flush()) for _ in range(3)]
    await asyncio.gather(*flushes)

    assert len(results.done_rows(store, seq)) == 35
    await writer.flush()
    running.cancel()


async def test_a_commit_that_hangs_is_told_until_it_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SLOW_COMMIT_S", 0.1)
    seq = new_seq(store)
    writer = ResultWriter(store, lambda _: None)
    running = asyncio.create_task(writer.run())
    with store.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("LOCK TABLE results IN EXCLUSIVE MODE")
        writer.put(seq, answered(0))
        async with asyncio.timeout(30):
            while not (told := writer.stalled):
                await asyncio.sleep(0.01)
        assert told.endswith("to be committed")

    await writer.flush()
    assert [writer.stalled] == [None]
    running.cancel()
