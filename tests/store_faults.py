"""Faults of what lies below the store: a full, read-only or lying disk, a lock, a clock."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from fault_trial import (
    Fault,
    Trial,
    expect,
    expect_line,
    full_disk,
    remount,
    small_disk,
    trial,
)

from batchrun.errors import BatchrunError
from batchrun.types import JobState
from benchmarks.crash_account import check_output, read_output
from benchmarks.deployment import wait_until

STALL_WAIT_S = 60.0
"""SQLite itself waits for a lock, for 10 s."""
HOUR_S = 3_600.0
WAL_HEADER_BYTES = 32


def fill_store_disk(folder: Path) -> None:
    """No room for results: the daemon says so and waits; a submission is refused whole."""
    with small_disk(folder / "home") as home, trial(folder, home=home) as here:
        here.begin()
        with full_disk(home):
            wait_until(lambda: _stalled(here) is not None, "the daemon to stall")
            expect("no space left" in str(_stalled(here)), f"stalled: {_stalled(here)}")
            num_done = here.num_done()
            here.rig.write_job("late", 10)
            expect_line(here.rig.call("submit", "late.yaml"), 4, "no space left on the disk")
        wait_until(lambda: _stalled(here) is None, "the daemon to go on")
        expect(num_done < here.num_rows, "the disk filled too late")
        expect(here.job_names() == ["job"], f"a refused submission left {here.job_names()}")
        here.finish()


def fill_output_disk(folder: Path) -> None:
    """No room for the output file: the job pauses and says why; `resume` writes it."""
    with small_disk(folder / "disk") as disk, trial(folder) as here:
        here.rig.folder = folder
        with full_disk(disk):
            here.begin(num_done=0, more="", num_rows=40)
            here.wait_for_state(JobState.COMPLETED)
            copy = here.rig.call("results", here.job, "-o", "disk/copy.parquet")
            expect_line(copy, 4, "no room to write the results")
            expect(len(list(disk.iterdir())) == 1, "half a file was left")
        expect(here.rig.call("results", here.job, "-o", "disk/copy.parquet").returncode == 0, "no")
        here.check(check_output(disk / "copy.parquet", "job", here.num_rows))
        here.finish()


def pause_for_output(folder: Path) -> None:
    """The output's own rename fails for want of room: paused with the reason, then resumed."""
    with trial(folder) as here:
        here.rig.failpoints = "output.rename.before=raise"
        here.begin(num_rows=40, num_done=40)
        view = here.wait_for_state(JobState.PAUSED)
        expect("no room to write the results" in view["reason"], f"paused: {view['reason']}")
        here.rig.failpoints = ""
        here.kill_daemon()
        here.resume()
        expect(here.rig.call("resume", here.job).returncode == 0, "resume was refused")
        here.finish()


def make_home_read_only(folder: Path) -> None:
    """A read-only home: `up` refuses in one line; nothing is lost once it can be written."""
    with small_disk(folder / "home") as home, trial(folder, home=home) as here:
        here.begin()
        here.kill_daemon()
        for part in ("gateway", "engine"):
            here.rig.kill(part)
        remount(home, "ro")
        done = here.rig.call("up")
        remount(home, "rw")
        expect_line(done, done.returncode, str(home))
        expect(done.returncode in {2, 4}, f"up: exit {done.returncode}")
        here.resume()
        here.finish()


def hold_store(folder: Path) -> None:
    """Another daemon is refused; another writer that keeps the store only delays."""
    with trial(folder) as here:
        here.begin(num_rows=1_200)
        with closing(sqlite3.connect(here.rig.home.store, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            expect_line(here.rig.call("up"), 4, "in use by process")
            told = "locked by another process"
            wait_until(lambda: told in str(_stalled(here)), f"status to say {told}", STALL_WAIT_S)
            other.execute("ROLLBACK")
        here.finish()


def truncate_wal(folder: Path) -> None:
    """The log's end is gone, as after a loss of power on a disk that lied: its rows run again."""
    rng = random.Random(folder.name)
    with trial(folder) as here:
        here.begin(num_rows=600)
        with closing(sqlite3.connect(here.rig.home.store)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        here.wait_for_rows(here.num_done() + 140)
        here.kill_daemon()
        before = here.num_done()
        wal = here.rig.home.store.with_name("store.db-wal")
        size_bytes = rng.randrange(WAL_HEADER_BYTES, wal.stat().st_size // 2)
        with wal.open("r+b") as file:
            file.truncate(size_bytes)
        expect(here.num_done() < before, "nothing was lost by cutting the log")
        assert here.watcher is not None
        here.watcher.forgive()
        here.resume()
        here.finish(explains_reruns=False)


def step_clock(folder: Path) -> None:
    """The wall clock jumps an hour ahead, then two back, in the middle of a job."""
    clock = folder / "clock"
    with trial(folder) as here:
        here.rig.failpoints = f"clock={clock}"
        here.begin()
        for offset_s in (HOUR_S, -HOUR_S):
            clock.write_text(str(offset_s))
            here.wait_for_rows(min(here.num_done() + 100, here.num_rows))
        here.wait_for_state(JobState.COMPLETED)
        here.check(check_output(here.output, "job", here.num_rows))
        num_lines = len(here.rig.executions_path.read_text().splitlines())
        expect(num_lines == here.num_rows, f"{num_lines} executions of {here.num_rows} rows")
        here.close(is_clock_true=False)


def step_over_deadline(folder: Path) -> None:
    """The clock jumps past a deadline: the job expires, and every row stands in its output."""
    clock = folder / "clock"
    with trial(folder) as here:
        here.rig.failpoints = f"clock={clock}"
        here.begin("deadline: 30m\n", num_rows=2_000)
        clock.write_text(str(HOUR_S))
        here.wait_for_state(JobState.EXPIRED)
        rows = read_output(here.output)
        expect([row["id"] for row in rows] == [f"job-{i}" for i in range(2_000)], "rows miss")
        late = [row["error"] for row in rows if row["error"]]
        expect(0 < len(late) < 2_000, f"{len(late)} rows expired")
        expect(all("job_expired" in error for error in late), f"{set(late)}")
        here.close(is_clock_true=False)


def _stalled(here: Trial) -> str | None:
    with suppress(BatchrunError):
        stalled: str | None = here.rig.job(here.job)["stalled"]
        return stalled
    time.sleep(0.05)
    return None


STORE_FAULTS = (
    Fault(
        "disk full (store)",
        "the file system of the home is filled while a job runs",
        "`status` shows `stalled`; `submit` ends with one line and exit code 4, and adds nothing; "
        "with room again the job goes on by itself",
        fill_store_disk,
    ),
    Fault(
        "disk full (copy of the output)",
        "`results -o` writes to a full file system",
        "one line, exit code 4, no half file; with room again it works",
        fill_output_disk,
    ),
    Fault(
        "disk full (output)",
        "the output file cannot be put in place for want of room",
        "the job pauses with that reason; `resume` writes the file",
        pause_for_output,
    ),
    Fault(
        "read-only home",
        "the home's file system is mounted read-only between two starts",
        "`up` ends with one line that names the place; once writable, the job goes on",
        make_home_read_only,
    ),
    Fault(
        "store locked",
        "a second daemon starts; another process keeps the store's write lock for over 10 s",
        "the second ends with one line and exit code 4; `status` shows `stalled`, then it goes on",
        hold_store,
    ),
    Fault(
        "truncated log",
        "the daemon is killed and its write-ahead log cut at a random byte",
        "nothing; the rows whose results were cut off run again",
        truncate_wal,
    ),
    Fault(
        "clock stepped",
        "the wall clock jumps an hour ahead and two back while a job runs",
        "nothing; no row runs twice",
        step_clock,
    ),
    Fault(
        "clock past a deadline",
        "the wall clock jumps past a job's deadline",
        "the job expires; every row is in its output, those that never ran as `job_expired`",
        step_over_deadline,
    ),
)
