"""What waits, what is read and what is written at once is bounded in bytes, not in rows."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event
from store_builders import answered

from batchrun.daemon import writer as writing
from batchrun.daemon.writer import BatchCreator, Entry, ResultWriter
from batchrun.errors import QuotaError
from batchrun.jobs.batch import new_batch_job
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.results.output_file import write_output
from batchrun.jobs.spec import JobSpec
from batchrun.store import batches, files, jobs, results
from batchrun.store.batches import BatchRecord, NewBatch, WantedBatch
from batchrun.store.database import Store
from batchrun.store.files import NewFile
from batchrun.store.jobs import NewJob
from batchrun.store.results import StoredResult

CHAT = "/v1/chat/completions"
MIB = 1 << 20


def new_seq(store: Store, num_rows: int = 10_000) -> int:
    return jobs.create(store, NewJob("name", "{}", "{}", "hash", num_rows), now_s=0.0).seq


def wanted(key: str | None = None, max_open: int | None = None) -> WantedBatch:
    asked = NewBatch("file-1", CHAT, "24h", None, None, "r", key, "key_1")
    job = new_batch_job(Path("/srv"), CHAT, deadline_s=60, weight=1)
    return WantedBatch(asked, job, max_open)


async def test_long_replies_are_committed_few_at_a_time_and_others_wait_for_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_BATCH_BYTES", 1_000)
    seq, sizes = new_seq(store), []

    def on_committed(batch: Sequence[Entry]) -> None:
        sizes.append(len(batch))

    writer = ResultWriter(store, on_committed)
    for row in range(6):
        writer.put(seq, answered(row, "x" * 400))
    waiting = asyncio.create_task(writer.room("one").__aenter__())
    await asyncio.sleep(0)
    assert not waiting.done()
    running = asyncio.create_task(writer.run())
    await waiting
    await writer.flush()
    running.cancel()

    assert sizes == [3, 3]
    assert results.done_rows(store, seq).tolist() == list(range(6))


def test_results_are_read_by_their_bytes(store: Store) -> None:
    seq, rng = new_seq(store), random.Random(1)
    bodies = [rng.randbytes(MIB) for _ in range(40)]
    outcomes = [(seq, replace(answered(row), body=body)) for row, body in enumerate(bodies)]
    results.commit(store, outcomes, now_s=1.0)

    tracemalloc.start()
    try:
        same = [found.body == bodies[found.row] for found in results.read(store, seq)]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert same == [True] * 40
    assert len(list(results.read(store, seq, limit=33))) == 33
    assert peak_bytes < 25 * MIB


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_an_output_file_is_written_by_the_bytes_of_its_replies(tmp_path: Path, name: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n' * 120)
    values = {"path": str(tmp_path / "in.jsonl"), "messages": "{{ x }}"}
    output = {"path": str(tmp_path / name), "keep": ["x"]}
    spec = JobSpec.model_validate({"name": "x", "input": values, "output": output})

    def replies() -> Iterator[StoredResult]:
        for row in range(120):
            content = chr(ord("a") + row % 26) * MIB
            body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
            yield StoredResult(row, body)

    tracemalloc.start()
    try:
        with open_input(spec.input) as data:
            num_rows = write_output(tmp_path / name, replies(), spec=spec, data=data, missing=None)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert num_rows == 120
    assert peak_bytes < 80 * MIB


async def test_batches_that_are_made_at_once_share_their_commits(store: Store) -> None:
    num_commits = 0

    def count(_connection: object) -> None:
        nonlocal num_commits
        num_commits += 1

    event.listen(store.engine, "commit", count)
    creator = BatchCreator(store)
    made = await asyncio.gather(*(creator.create(wanted()) for _ in range(200)))

    assert len({batch.job.id for batch in made}) == len(jobs.list_jobs(store)) == 200
    assert num_commits <= 3


def test_a_batch_that_was_made_is_found_though_its_owner_has_stored_too_much(store: Store) -> None:
    full, more = (replace(wanted(key), max_stored_bytes=5_000) for key in "ab")
    (made,) = batches.create_all(store, [full], now_s=1.0)
    files.add(store, NewFile("in", "batch", 5_000, "0" * 64, None, "key_1"), now_s=1.0)

    again, other = batches.create_all(store, [full, more], now_s=2.0)

    assert again == made
    assert isinstance(other, QuotaError)


async def test_a_caller_who_goes_takes_no_batch_from_others(store: Store) -> None:
    creator = BatchCreator(store)
    asked = [asyncio.create_task(creator.create(wanted(name))) for name in "abc"]
    await asyncio.sleep(0)
    asked[0].cancel()
    made = await asyncio.gather(*asked[1:])

    assert len({batch.job.id for batch in made}) == 2
    assert len(jobs.list_jobs(store)) == 3


async def test_each_of_those_made_at_once_hears_what_became_of_it(store: Store) -> None:
    creator = BatchCreator(store)
    asked = [wanted("a"), wanted("a"), wanted(max_open=1), wanted("b")]
    first, again, refused, last = await asyncio.gather(
        *(creator.create(one) for one in asked), return_exceptions=True
    )

    assert isinstance(first, BatchRecord) and isinstance(again, BatchRecord)
    assert isinstance(last, BatchRecord) and isinstance(refused, QuotaError)
    assert first.job.id == again.job.id != last.job.id
