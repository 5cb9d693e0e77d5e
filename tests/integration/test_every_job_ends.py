"""Every job reaches its end by its deadline, whatever its input, its engine and its daemon do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_builders import select

from batchrun.daemon.ending import OUTPUT_TRIES, JobEnd
from batchrun.daemon.writer import ResultWriter
from batchrun.failpoints import NAMES
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.store import jobs
from batchrun.store.check import check_store
from batchrun.store.database import open_store, open_to_read
from batchrun.types import JobState
from benchmarks.crash_account import read_jobs, read_output
from benchmarks.deployment import Deployment, wait_until

DEADLINE_S = 4
NUM_ROWS = 60
END_WAIT_S = 240.0
JOB_FILE = """\
name: sample
input:
  path: rows.parquet
  messages:
    - {role: user, content: "{{ text }}"}
output: {path: out.jsonl}
"""
NUM_SEEDS_AT_NIGHT = 16
ACTIONS: tuple[dict[str, object], ...] = (
    {"status": 503, "retry_after": "1"},
    {"status": 404},
    {"status": 302},
    {"status": 500},
    {"hang": True},
    {"garbage": True},
    {"drop_connection": True},
    {"delay_s": 1.5},
    {"finish_reason": "abort"},
)
ONCE: tuple[dict[str, object], ...] = ({"die": True}, {"stall": True})
"""The engine is gone, or does nothing any more, until it was started again."""


class Trouble:
    """A deployment with two jobs, and what may go wrong beside what its engine does."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rig = Deployment(folder)
        self._rng = rng
        actions = rng.sample(ACTIONS, 3)
        rules = [{"match": {"every": rng.randint(2, 9)}, "action": each} for each in actions]
        once = {"match": {"nth": rng.randint(1, 40)}, "action": rng.choice(ONCE), "times": 1}
        window = {"requests": 8}
        self.rig.use_fake_engine(0.1, rules=[once, *rules], window=window, timeouts={"row": 2})

    def submit(self) -> None:
        """Two jobs; the outputs have a folder of their own."""
        (self.rig.folder / "out").mkdir()
        for name in ("one", "two"):
            more = f"deadline: {DEADLINE_S}\n"
            file = self.rig.write_job(name, NUM_ROWS, more, "jsonl")
            file.write_text(file.read_text().replace(f"{name}.out", f"out/{name}.out"))
            self.rig.submit(file)

    def happen(self) -> None:
        """One thing goes wrong, after a while."""
        time.sleep(self._rng.uniform(0, DEADLINE_S / 3))
        kinds: tuple[Callable[[], None], ...] = (
            self.kill_daemon,
            self.kill_daemon,
            self.lose_input,
            self.change_input,
            self.block_output,
            self.stop_engine,
            self.kill_engine,
        )
        with suppress(OSError):
            self._rng.choice(kinds)()

    def kill_daemon(self) -> None:
        """It comes back with a disk that seems full at two places, and then with room for good. The
        full disk may have ended it by itself."""
        places = self._rng.sample(sorted({*NAMES} - {"store.migrate.before"}), 2)
        for failpoints in (",".join(f"{place}=raise" for place in places), ""):
            if self.rig.lives(self.rig.pid_of("daemon")):
                self.rig.kill("daemon")
            self.rig.failpoints = failpoints
            self.bring_up()

    def bring_up(self) -> None:
        """Start the daemon, and do not wait for an engine that is gone."""
        command = self.rig.popen("up", "-d")
        with suppress(subprocess.TimeoutExpired):
            command.wait(10)
        command.kill()
        command.wait()

    def lose_input(self) -> None:
        """Neither the file nor its link is there."""
        for path in (self.rig.folder / "one.in.parquet", *self.rig.home.inputs.iterdir()):
            path.unlink()

    def change_input(self) -> None:
        """The file, which the link shares, has other bytes."""
        with (self.rig.folder / "two.in.parquet").open("r+b") as file:
            file.write(bytes(200))

    def block_output(self) -> None:
        """A file lies where the folder of the outputs was."""
        (self.rig.folder / "out").rename(self.rig.folder / "elsewhere")
        (self.rig.folder / "out").touch()

    def stop_engine(self) -> None:
        os.kill(self.rig.pid_of("engine"), signal.SIGSTOP)

    def kill_engine(self) -> None:
        os.kill(self.rig.pid_of("engine"), signal.SIGKILL)

    def have_ended(self) -> bool:
        """Whether no job is open any more; a daemon that gave up is started again."""
        if not self.rig.lives(self.rig.pid_of("daemon")):
            self.bring_up()
        return all(job.state.is_terminal for job in read_jobs(self.rig))

    def check(self) -> None:
        """The store is sound, and each output that could be written holds every row once."""
        with closing(open_to_read(self.rig.home.store)) as store:
            assert [str(violation) for violation in check_store(store)] == []
        for job in read_jobs(self.rig):
            query = "SELECT count(*), count(DISTINCT row) FROM results WHERE job_seq = ?"
            ((num, num_rows),) = select(self.rig.home.store, query, job.seq)
            assert num == num_rows <= NUM_ROWS
            if job.reason is not None and "output not written" in job.reason:
                assert job.state is JobState.EXPIRED
                continue
            name = f"{job.name}.out.jsonl"
            places = [self.rig.folder / folder / name for folder in ("out", "elsewhere")]
            (output,) = (place for place in places if place.exists())
            ids = [row["id"] for row in read_output(output)]
            assert ids == [f"{job.name}-{row}" for row in range(NUM_ROWS)]


def see_jobs_end(folder: Path, seed: int) -> None:
    """Two jobs in trouble: both end, and nothing is lost or doubled."""
    trouble = Trouble(folder, random.Random(seed))
    try:
        trouble.rig.start()
        trouble.submit()
        for _ in range(3):
            trouble.happen()
        wait_until(trouble.have_ended, f"all jobs to end, seed {seed}", END_WAIT_S, poll_s=0.2)
        trouble.check()
    finally:
        trouble.rig.close()


@pytest.mark.slow
def test_jobs_in_trouble_end(tmp_path: Path) -> None:
    see_jobs_end(tmp_path / "t", seed=0)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, NUM_SEEDS_AT_NIGHT))
def test_many_jobs_in_trouble_end(tmp_path: Path, seed: int) -> None:
    see_jobs_end(tmp_path / "t", seed)


async def test_past_its_deadline_a_job_ends_whose_output_cannot_be_written(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "rows.parquet")
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    links = tmp_path / "links"
    job = prepare_job(load_job_file(file, cwd=tmp_path), links=links)
    (tmp_path / "out.jsonl").mkdir()
    with closing(open_store(tmp_path / "store.db")) as store:
        record = jobs.create(store, job, now_s=1.0)
        writer = ResultWriter(store, lambda batch: None)
        writing = asyncio.create_task(writer.run())
        reasons: list[str] = []

        async def pause(job_id: str, reason: str) -> None:
            jobs.pause(store, job_id, reason)
            reasons.append(reason)

        end = JobEnd(store, writer, links, {}, pause, retry_s=0.0)
        for _ in range(OUTPUT_TRIES):
            await end.close(jobs.begin_finalizing(store, record.id, JobState.EXPIRED, now_s=9.0))
        writing.cancel()
        ended = jobs.get(store, record.id)

    assert (ended.state, len(reasons)) == (JobState.EXPIRED, OUTPUT_TRIES - 1)
    assert ended.reason is not None and ended.reason.startswith("output not written: ")
