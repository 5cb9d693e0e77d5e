"""A daemon in this process: a job is taken up once, and aborting its rows gives each one back."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.engine.command import AttachedSettings, ManagedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.pool.row_queue import Window
from batchrun.store import jobs
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState

JOB = """\
name: sample
input: {path: rows.parquet, messages: [{role: user, content: "{{ text }}"}]}
request: {max_tokens: 4}
output: {path: out.parquet}
"""


@asynccontextmanager
async def slot_of(
    folder: Path, engine_url: str, **slot_options: Any
) -> AsyncIterator[tuple[Store, Slot]]:
    """A store of its own, and a slot attached to an engine."""
    store = open_store(folder / "store.db")
    engine = AttachedEngine(AttachedSettings(name="fake", url=engine_url))
    await engine.start()
    (folder / "inputs").mkdir()
    try:
        yield store, Slot(engine, uses_priority=False, window=Window(32, 400_000), **slot_options)
    finally:
        await engine.stop()
        store.close()


@asynccontextmanager
async def running_daemon(
    folder: Path, engine_url: str, **slot_options: Any
) -> AsyncIterator[Daemon]:
    """A daemon in this process."""
    async with slot_of(folder, engine_url, **slot_options) as (store, slot):
        daemon = Daemon(store, [slot], folder / "inputs")
        running = asyncio.create_task(daemon.run())
        try:
            yield daemon
        finally:
            running.cancel()
            await asyncio.wait([running])


def folder_in(folder: Path, name: str) -> Path:
    """A new folder in another one."""
    made = folder / name
    made.mkdir()
    return made


async def submit_rows(daemon: Daemon, folder: Path, num_rows: int, more: str = "") -> JobRecord:
    """Submit a job of so many rows."""
    pq.write_table(
        pa.table({"text": [f"row {i}" for i in range(num_rows)]}), folder / "rows.parquet"
    )
    (folder / "job.yaml").write_text(JOB + more)
    spec = load_job_file(folder / "job.yaml", cwd=folder)
    return await daemon.submit(prepare_job(spec, links=daemon.links))


async def test_rows_aborted_before_their_first_step_run_again(
    tmp_path: Path, shared_fake_engine: ManagedSettings
) -> None:
    async with running_daemon(tmp_path, shared_fake_engine.base_url) as daemon:
        record = await submit_rows(daemon, tmp_path, 16)
        async with asyncio.timeout(60):
            while not (record.seq in daemon.active and daemon.active[record.seq].tasks):
                await asyncio.sleep(0)
        job = daemon.active[record.seq]

        await daemon.dispatcher.abort(job)

        job.queue.check()
        async with asyncio.timeout(60):
            while not job.queue.is_finished:
                await asyncio.sleep(0.01)


async def test_a_job_whose_input_is_not_read_holds_up_no_other(
    tmp_path: Path, shared_fake_engine: ManagedSettings
) -> None:
    async with running_daemon(tmp_path, shared_fake_engine.base_url) as daemon:
        slow = await submit_rows(daemon, folder_in(tmp_path, "slow"), 20_000)
        async with asyncio.timeout(60):
            while slow.seq not in daemon.active:
                await asyncio.sleep(0.01)
        job = daemon.active[slow.seq]
        async with job.reading:  # As by a read that does not come back.
            num_done = job.counts.num_completed
            other = await submit_rows(daemon, folder_in(tmp_path, "other"), 16)
            async with asyncio.timeout(60):
                while jobs.get(daemon.store, other.id).state is not JobState.COMPLETED:
                    await asyncio.sleep(0.05)
            assert job.counts.num_completed <= num_done + 2 * 32
            await daemon.cancel(slow.id)
            async with asyncio.timeout(60):
                while jobs.get(daemon.store, slow.id).state is not JobState.CANCELLED:
                    await asyncio.sleep(0.05)


async def test_an_overdue_job_is_ended_by_one_task_however_long_the_store_is_locked(
    tmp_path: Path, shared_fake_engine: ManagedSettings
) -> None:
    async with running_daemon(tmp_path, shared_fake_engine.base_url) as daemon:
        daemon.dispatcher.is_offline_on = False
        record = await submit_rows(daemon, folder_in(tmp_path, "due"), 16, "deadline: 2s\n")
        async with asyncio.timeout(60):
            while record.seq not in daemon.active:
                await asyncio.sleep(0.01)
        before = len(daemon._tasks._tasks)
        with closing(sqlite3.connect(tmp_path / "store.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(6)
            assert len(daemon._tasks._tasks) <= before + 1
        async with asyncio.timeout(60):
            while jobs.get(daemon.store, record.id).state is not JobState.EXPIRED:
                await asyncio.sleep(0.05)


async def test_a_job_submitted_before_the_daemon_runs_is_taken_up_once(
    tmp_path: Path, shared_fake_engine: ManagedSettings
) -> None:
    async with slot_of(tmp_path, shared_fake_engine.base_url) as (store, slot):
        daemon = Daemon(store, [slot], tmp_path / "inputs")
        writing = asyncio.create_task(daemon.writer.run())
        record = await submit_rows(daemon, tmp_path, 16)
        async with asyncio.timeout(60):
            while record.seq not in daemon.active:
                await asyncio.sleep(0.01)
        writing.cancel()

        running = asyncio.create_task(daemon.run())
        async with asyncio.timeout(60):
            while jobs.get(store, record.id).state is not JobState.COMPLETED:
                assert jobs.get(store, record.id).state is not JobState.PAUSED
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running])
