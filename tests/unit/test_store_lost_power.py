"""A disk that lied about what it had written: the newest commits are gone, and nothing else is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from store_builders import answered

from batchrun.store import jobs, results
from batchrun.store.check import check_store
from batchrun.store.database import open_store
from batchrun.store.jobs import NewJob

NUM_BATCHES, BATCH_ROWS = 20, 10


@pytest.mark.parametrize("kept_share", [0.0, 0.013, 0.21, 0.5, 0.77, 0.94, 0.999, 1.0])
def test_a_torn_log_loses_whole_commits_and_their_rows_can_be_written_again(
    tmp_path: Path, kept_share: float
) -> None:
    torn = tmp_path / "torn" / "store.db"
    seq = write_and_tear(tmp_path / "store.db", torn, kept_share)

    store = open_store(torn)
    done = results.done_rows(store, seq).tolist()

    assert done == list(range(len(done)))
    assert len(done) % BATCH_ROWS == 0
    assert list(check_store(store)) == []
    every = [(seq, answered(row)) for row in range(NUM_BATCHES * BATCH_ROWS)]
    assert results.commit(store, every, now_s=2.0) == len(every) - len(done)
    assert [result.row for result in results.read(store, seq)] == list(range(len(every)))
    store.close()


def write_and_tear(path: Path, torn: Path, kept_share: float) -> int:
    """Commit batches, and leave at `torn` what a disk has that lost the end of the log."""
    opened = open_store(path)
    job = jobs.create(opened, NewJob("name", "{}", "{}", "hash", 200), now_s=0.0)
    opened.close()
    store = open_store(path)
    for first in range(0, NUM_BATCHES * BATCH_ROWS, BATCH_ROWS):
        batch = [(job.seq, answered(row)) for row in range(first, first + BATCH_ROWS)]
        results.commit(store, batch, now_s=1.0)
    torn.parent.mkdir()
    shutil.copy(path, torn)
    log = path.with_name("store.db-wal").read_bytes()
    torn.with_name("store.db-wal").write_bytes(log[: int(len(log) * kept_share)])
    store.close()
    return job.seq
