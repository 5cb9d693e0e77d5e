"""The daemon's pure parts, and its writer on a real store."""

from __future__ import annotations

import asyncio
import gzip
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from file_calls import largest_file_bytes
from job_builders import make_active_job

from batchrun.cli import status
from batchrun.config import TimeoutsConfig
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.faults import (
    IDENTICAL_ERRORS_LIMIT,
    LONGEST_DELAY_S,
    CircuitBreaker,
    retry_delay_s,
)
from batchrun.daemon.view import view_job, view_stored, with_deadline
from batchrun.daemon.writer import Entry, ResultWriter
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import prepare_job
from batchrun.store import jobs, results
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import Counts, NewJob
from batchrun.types import JobState, Outcome, OutcomeKind, RowError


def failed(message: str = "no", *, row: int = 0) -> Outcome:
    return Outcome("job", row, 1, OutcomeKind.ROW_ERROR, error=RowError("code", message))


def answered(row: int = 0) -> Outcome:
    return Outcome("job", row, 1, OutcomeKind.OK, body=b"{}")


def test_the_breaker_trips_on_the_last_of_identical_errors() -> None:
    breaker = CircuitBreaker(None)
    seen = [breaker.see(failed()) for _ in range(IDENTICAL_ERRORS_LIMIT)]

    assert seen[:-1] == [None] * (IDENTICAL_ERRORS_LIMIT - 1)
    assert seen[-1] is not None
    assert "no" in seen[-1]


@pytest.mark.parametrize("between", [answered(), failed("another")])
def test_anything_else_between_breaks_the_streak(between: Outcome) -> None:
    breaker = CircuitBreaker(None)
    outcomes = [failed()] * (IDENTICAL_ERRORS_LIMIT - 1) + [between, failed()]

    assert not any(breaker.see(outcome) for outcome in outcomes)


def test_the_breaker_counts_the_rows_that_failed_before_a_restart() -> None:
    breaker = CircuitBreaker(max_failed_rows=3, num_failed_rows=2)

    assert breaker.see(failed("a")) is None
    reason = breaker.see(failed("b"))
    assert reason is not None
    assert "max_failed" in reason


@pytest.mark.parametrize("attempt", [1, 2, 5, 40])
def test_delays_grow_and_stay_bounded(attempt: int) -> None:
    delay_s = retry_delay_s(attempt, None, random.Random(1))

    assert min(LONGEST_DELAY_S, 0.5 * 2 ** (attempt - 1)) / 2 <= delay_s <= LONGEST_DELAY_S


def test_the_engine_may_ask_for_a_longer_wait_but_not_for_an_endless_one() -> None:
    assert retry_delay_s(1, 7.0, random.Random(1)) == 7.0
    assert retry_delay_s(1, 1e9, random.Random(1)) == LONGEST_DELAY_S


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.db")
    yield opened
    opened.close()


async def test_what_is_flushed_is_in_the_store_and_acknowledged_once(store: Store) -> None:
    job = jobs.create(store, NewJob("name", "{}", "{}", "hash", 100), now_s=0.0)
    acknowledged: list[int] = []

    def on_committed(batch: Sequence[Entry]) -> None:
        done = set(results.done_rows(store, job.seq).tolist())
        assert {outcome.row for _, outcome in batch} <= done
        acknowledged.extend(outcome.row for _, outcome in batch)

    writer = ResultWriter(store, on_committed)
    running = asyncio.create_task(writer.run())
    for row in range(100):
        writer.put(job.seq, answered(row))
    await writer.flush()
    running.cancel()

    assert acknowledged == list(range(100))


async def test_a_store_that_cannot_be_written_holds_results_back_until_it_can(
    store: Store, tmp_path: Path
) -> None:
    job = jobs.create(store, NewJob("name", "{}", "{}", "hash", 1), now_s=0.0)
    blocker = open_store(tmp_path / "store.db")
    writer = ResultWriter(store, lambda _: None)
    with store.read() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout=50")
    running = asyncio.create_task(writer.run())
    with blocker.write():
        writer.put(job.seq, answered())
        stalled = None
        while stalled is None:
            await asyncio.sleep(0.05)
            stalled = writer.stalled
        assert "locked" in stalled
    await writer.flush()

    assert writer.stalled is None
    assert results.count(store, job.seq).num_completed == 1
    running.cancel()
    blocker.close()


async def test_a_job_without_a_deadline_has_that_of_the_timeouts(
    store: Store, tmp_path: Path
) -> None:
    daemon = Daemon(store, [], tmp_path, timeouts=TimeoutsConfig(job=3_600.0))
    record = jobs.create(store, NewJob("name", "{}", "{}", "hash", 1), now_s=time.time())
    job = make_active_job(tmp_path / "job", ["a"])
    daemon._opening[record.seq] = record

    assert await daemon._start(record, job)

    own, ended = replace(record, expires_at=5.0), replace(record, state=JobState.CANCELLED)
    assert job.record.expires_at == record.created_at + 3_600
    assert job.left_s < math.inf
    assert [with_deadline(each, 3_600.0) for each in (own, ended)] == [own, ended]
    (view,) = cast(list[dict[str, object]], view_stored(store, job_s=60.0)["jobs"])
    assert view["expires_at"] == record.created_at + 60


def test_a_hit_rate_is_no_larger_than_what_is_said_to_be_possible(tmp_path: Path) -> None:
    job = make_active_job(tmp_path / "job", [f"{'w ' * 110}{row}" for row in range(9)])
    counts = Counts(9, num_prompt_tokens=1_000, num_cached_tokens=850)
    more = {"num_cut": 0, "on_done": None, "engine_s": 0.0, "cost": None}

    shown = dict(status._details(view_job(job.record, counts, active=job) | more, is_run=True))

    assert shown["hit rate"] == "85% (best possible 85%)"


async def test_a_task_of_the_daemons_own_that_fails_ends_it_and_says_why(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(results, "commit", fail)
    monkeypatch.setattr("batchrun.daemon.daemon.CLEAN_STOP_S", 0.1)
    daemon = Daemon(store, [], tmp_path)
    daemon.writer.put(1, answered(0))

    with pytest.raises(ZeroDivisionError, match="a bug"):
        await asyncio.wait_for(daemon.run(), 60)


async def test_a_job_without_room_for_a_scratch_copy_pauses_until_there_is(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "%s"}\n' % (b"x" * 1_000) * 16_000))
    spec = JobSpec.model_validate({
        "name": "packed",
        "input": {"path": str(path), "messages": [{"role": "user", "content": "{{ text }}"}]},
        "output": {"path": str(tmp_path / "out.jsonl")},
    })
    record = jobs.create(store, prepare_job(spec, links=tmp_path / "links"), now_s=time.time())
    daemon = Daemon(store, [], tmp_path / "links")
    with largest_file_bytes(8_000_000):
        running = asyncio.create_task(daemon.run())
        async with asyncio.timeout(60):
            while (now := jobs.get(store, record.id)).state is not JobState.PAUSED:
                await asyncio.sleep(0.01)
    assert f"no room for a scratch copy of {path}; free some space" in str(now.reason)

    await daemon.resume(record.id)
    async with asyncio.timeout(60):
        while record.seq not in daemon.active:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
