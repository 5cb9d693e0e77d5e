"""One fault in one deployment: helpers to make it, to see what a user sees, to check what holds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrun.types import JobState
from benchmarks.crash_account import (
    Kill,
    check_executions,
    check_home,
    check_leftovers,
    check_output,
    measure_reach,
    read_commits,
    read_executions,
    read_jobs,
)
from benchmarks.crash_rig import StatusWatcher
from benchmarks.deployment import Deployment, wait_until

LATENCY_S = 0.1
NUM_ROWS = 400
DISK_BYTES = 16 << 20
REMOUNT_WAIT_S = 20.0


class BrokenPromiseError(Exception):
    """An invariant does not hold."""


class SkippedFaultError(Exception):
    """This machine cannot make the fault; the message says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: how it is made, what a user sees of it, and what holds afterwards.

    `run` makes it in a new folder. It raises BrokenPromiseError when anything is otherwise, and
    SkippedFaultError.
    """

    name: str
    made: str
    seen: str
    run: Callable[[Path], None]


class Trial:
    """A deployment with a job called `job`, and the promises that are checked when it ends."""

    def __init__(self, folder: Path, *, home: Path | None = None) -> None:
        self.rig = Deployment(folder, home=home)
        self.rig.use_fake_engine(LATENCY_S, window={"requests": 24})
        self.kills: list[Kill] = []
        self.watcher: StatusWatcher | None = None
        self.num_rows = NUM_ROWS
        self.job = ""
        self.suffix = "parquet"

    def begin(self, more: str = "", *, num_rows: int = NUM_ROWS, num_done: int = 60) -> None:
        """Start, submit, and let so many rows end."""
        self.num_rows = num_rows
        self.rig.start()
        self.watcher = StatusWatcher(self.rig)
        self.job = self.rig.submit(self.rig.write_job("job", num_rows, more, self.suffix))
        self.wait_for_rows(num_done)

    @property
    def output(self) -> Path:
        """The job's output file."""
        return self.rig.folder / f"job.out.{self.suffix}"

    def num_done(self) -> int:
        """Rows with a result."""
        return len(read_commits(self.rig))

    def wait_for_rows(self, num_rows: int) -> None:
        """Wait until so many rows have a result."""
        wait_until(lambda: self.num_done() >= num_rows, f"{num_rows} rows to be done")

    def wait_for_state(self, *states: JobState, wait_s: float = 120) -> dict[str, Any]:
        """Wait until the job is in one of these states."""
        names = " or ".join(states)
        wait_until(lambda: self.rig.job(self.job)["state"] in states, f"a job {names}", wait_s)
        return self.rig.job(self.job)

    def job_id(self, name: str) -> str:
        """The id of the job with this name."""
        (found,) = (job.id for job in read_jobs(self.rig) if job.name == name)
        return found

    def job_names(self) -> list[str]:
        """The names of all jobs, in the order of submission."""
        return [job.name for job in read_jobs(self.rig)]

    def wait_for_completion(self, job: str) -> None:
        """Wait until this job, beside the one called `job`, is completed."""
        wait_until(lambda: str(self.rig.job(job)["state"]) == "completed", f"{job} to end")

    def kill_daemon(self, number: int = signal.SIGKILL) -> None:
        """Kill it; `resume` starts it again."""
        self.kills.append(Kill("daemon", time.time()))
        self.rig.kill("daemon", number)

    def resume(self) -> None:
        """Start the daemon again."""
        self.kills[-1].ended_at = time.time()
        self.rig.start()

    def finish(self, *, explains_reruns: bool = True) -> None:
        """Wait for the job's end, end the deployment, and check every promise.

        Not `explains_reruns`: rows may have run again for another reason than a kill.
        """
        view = self.wait_for_state(*(state for state in JobState if state.is_terminal))
        expect((view["state"], view["num_failed"]) == ("completed", 0), f"ended as {view}")
        self.check(check_output(self.output, "job", self.num_rows))
        self.close(explains_reruns=explains_reruns)

    def close(self, *, explains_reruns: bool = True, is_clock_true: bool = True) -> None:
        """As `finish`, for a job that has ended in its own way."""
        assert self.watcher is not None
        self.watcher.stop()
        self.check([*self.watcher.problems, *check_home(self.rig), *check_command(self.rig)])
        executions = read_executions(self.rig.executions_path)
        commits = read_commits(self.rig)
        measure_reach(self.kills, executions, commits, LATENCY_S)
        if is_clock_true:
            kills = self.kills if explains_reruns else None
            self.check(check_executions(kills, executions, commits))
        self.rig.close()
        self.check(check_leftovers(self.rig))

    def check(self, problems: Iterator[str] | list[str]) -> None:
        """Raise BrokenPromiseError with the first problem, if there is one."""
        for problem in problems:
            raise BrokenPromiseError(problem)


def check_command(deployment: Deployment) -> Iterator[str]:
    """What the command itself says of the store."""
    done = deployment.call("store", "check")
    if done.returncode != 0:
        yield f"store check: exit {done.returncode}: {done.stdout.strip()} {done.stderr.strip()}"


@contextmanager
def trial(folder: Path, *, home: Path | None = None) -> Iterator[Trial]:
    """A trial that leaves nothing running, whatever happens."""
    made = Trial(folder, home=home)
    try:
        yield made
    except BaseException:
        if made.watcher is not None:
            made.watcher.stop()
        made.rig.close()
        raise


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of `DISK_BYTES` at `place`. Raises SkippedFaultError without the right to."""
    place.mkdir(parents=True)
    if os.geteuid() != 0:
        raise SkippedFaultError("mounting a small file system needs root")
    options = f"size={DISK_BYTES},mode=700"
    if _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)):
        raise SkippedFaultError("no file system can be mounted here")
    try:
        yield place
    finally:
        _run("umount", "-l", str(place))


def remount(place: Path, mode: str) -> None:
    """Make the file system at `place` read-only (`ro`) or writable (`rw`)."""
    command = ("mount", "-o", f"remount,{mode}", str(place))
    # Threads of a process that was killed may have files open for a moment longer.
    wait_until(lambda: not _run(*command), f"{place} to be mounted {mode}", REMOUNT_WAIT_S)


@contextmanager
def full_disk(place: Path) -> Iterator[None]:
    """Within, there is no room left at `place`."""
    ballast = place / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            size_bytes = 1 << 20
            while size_bytes:
                try:
                    file.write(bytes(size_bytes))
                except OSError:
                    size_bytes //= 2
        yield
    finally:
        ballast.unlink()


def expect(condition: object, otherwise: str) -> None:
    """Raise BrokenPromiseError unless the condition holds."""
    if not condition:
        raise BrokenPromiseError(otherwise)


def expect_line(done: subprocess.CompletedProcess[str], exit_code: int, words: str) -> None:
    """The command must have ended so, with one line on stderr that says `words`."""
    lines = done.stderr.strip().splitlines()
    is_so = done.returncode == exit_code and len(lines) == 1 and words in lines[0]
    expect(is_so, f"exit {done.returncode} and {lines}, not {exit_code} and {words!r}")


def _run(*command: str) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode
