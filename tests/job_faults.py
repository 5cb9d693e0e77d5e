"""Faults around a job: its input changes, its daemon ends at the worst places."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

from fault_trial import Fault, check_command, expect, trial

from batchrun.failpoints import NAMES, VARIABLE
from batchrun.types import JobState
from benchmarks.crash_account import Kill, check_output
from benchmarks.crash_rig import FailpointServer
from benchmarks.deployment import Deployment, wait_until

NUM_SMALL_ROWS = 40
DEATH_WAIT_S = 60.0
MIGRATION = "store.migrate.before"


def change_input(folder: Path) -> None:
    """The input's bytes change and the daemon is killed: paused with its name, then put back."""
    with trial(folder) as here:
        here.begin()
        here.kill_daemon()
        file = folder / "job.in.parquet"
        good = file.read_bytes()
        with file.open("r+b") as stream:
            stream.write(bytes(100))
        here.resume()
        view = here.wait_for_state(JobState.PAUSED)
        expect(f"{file}: changed since the job was submitted" in view["reason"], view["reason"])
        expect(view["num_completed"] >= 60, "finished rows were lost")
        file.write_bytes(good)
        expect(here.rig.call("resume", here.job).returncode == 0, "resume was refused")
        here.finish()


def delete_input(folder: Path) -> None:
    """The input is deleted and the daemon is killed: the link in the home stands in."""
    with trial(folder) as here:
        here.begin()
        (folder / "job.in.parquet").unlink()
        here.kill_daemon()
        here.resume()
        here.finish()


def terminate_daemon(folder: Path) -> None:
    """SIGTERM in the middle of a job: a clean end, and the next start goes on."""
    with trial(folder) as here:
        here.begin()
        here.kill_daemon(signal.SIGTERM)
        expect(not here.rig.home.daemon_record.exists(), "the daemon left its address behind")
        here.resume()
        here.finish()


def terminate_finalizing(folder: Path) -> None:
    """SIGTERM while the output file is written: it is written again."""
    _end_while_writing(folder, signal.SIGTERM)


def halve_output(folder: Path) -> None:
    """A kill while the output file is written leaves half of it: it is cleared away."""
    _end_while_writing(folder, signal.SIGKILL)


def kill_after_submit(folder: Path) -> None:
    """The daemon dies between the commit of a new job and its answer: the job is there once."""
    with trial(folder) as here:
        points = FailpointServer(folder, random.Random(0))
        here.rig.failpoints = points.spec
        here.begin()
        pid, kill = here.rig.pid_of("daemon"), Kill("daemon", place="store.commit.after")
        sprung = points.set_trap(pid, kill)
        job = here.rig.write_job("late", NUM_SMALL_ROWS)
        done = here.rig.call("submit", job.name)
        points.close()
        expect(done.returncode == 0 and done.stdout.startswith("job_"), done.stderr)
        expect(sprung.is_set(), "the daemon was not killed")
        wait_until(lambda: not here.rig.lives(pid), "the daemon to end")
        here.kills.append(kill)
        here.resume()
        expect(here.job_names() == ["job", "late"], f"{here.job_names()}")
        late = here.job_id("late")
        here.wait_for_completion(late)
        here.check(check_output(folder / "late.out.parquet", "late", NUM_SMALL_ROWS))
        here.finish()


def walk_failpoints(folder: Path) -> None:
    """The daemon kills itself at every failpoint, one after the other; then all jobs end."""
    with trial(folder) as here:
        # A store is migrated once, before there is a job in it.
        for number, name in enumerate(sorted(NAMES, key=lambda name: name != MIGRATION)):
            if name != MIGRATION:
                done = here.rig.call("submit", here.rig.write_job(f"j{number}", 20).name)
                expect(done.returncode == 0, done.stderr)
            here.rig.failpoints = f"{name}=kill"
            _see_it_die(here.rig, name)
            here.rig.failpoints = ""
        here.begin(num_done=0)
        for number in range(1, len(NAMES)):
            job = here.job_id(f"j{number}")
            here.wait_for_completion(job)
            here.check(check_output(folder / f"j{number}.out.parquet", f"j{number}", 20))
        here.finish(explains_reruns=False)


def kill_gc(folder: Path) -> None:
    """`gc` dies after its first commit: the next one ends its work; the output stays."""
    with trial(folder) as here:
        here.begin()
        here.wait_for_state(JobState.COMPLETED)
        clock = folder / "clock"
        clock.write_text("7200")
        later = f"clock={clock}"
        collect = ("gc", "--older-than", "1h", "--json")
        first = here.rig.call(*collect, **{VARIABLE: f"{later},store.commit.after=kill"})
        expect(first.returncode == -signal.SIGKILL, f"gc ended with {first.returncode}")
        here.check(check_command(here.rig))
        second = here.rig.call(*collect, **{VARIABLE: later})
        expect(second.returncode == 0 and here.num_done() == 0, f"gc left rows: {second.stderr}")
        expect(here.rig.job(here.job)["num_completed"] == here.num_rows, "the counts are gone")
        here.check(check_output(here.output, "job", here.num_rows))
        here.close(is_clock_true=False)


def kill_backup(folder: Path) -> None:
    """`store backup` dies before its rename: no backup, and the next one is whole."""
    with trial(folder) as here:
        here.begin()
        copy = folder / "copy.db"
        first = here.rig.call(
            "store", "backup", copy.name, **{VARIABLE: "output.rename.before=kill"}
        )
        expect(first.returncode == -signal.SIGKILL, f"backup ended with {first.returncode}")
        expect(not copy.exists(), "a backup that was not finished has its name")
        expect(here.rig.call("store", "backup", copy.name).returncode == 0, "no second backup")
        expect(here.rig.call("store", "check", copy.name).returncode == 0, "the backup is damaged")
        here.finish()


def _see_it_die(rig: Deployment, name: str) -> None:
    daemon = rig.popen("up")
    try:
        code = daemon.wait(DEATH_WAIT_S)
    except subprocess.TimeoutExpired:
        code = 0
        daemon.kill()
        daemon.wait()
    expect(code == -signal.SIGKILL, f"{name} was not reached, `up` ended with {code}")


def _end_while_writing(folder: Path, number: int) -> None:
    with trial(folder) as here:
        here.rig.failpoints = "output.sync.before=sleep:20"
        here.begin(num_rows=NUM_SMALL_ROWS, num_done=NUM_SMALL_ROWS)
        wait_until(lambda: bool(_parts(folder)), "the output to be begun")
        here.wait_for_state(JobState.FINALIZING)
        here.kill_daemon(number)
        expect(not here.output.exists(), "an output that was not finished has its name")
        for part in _parts(folder):
            with part.open("r+b") as file:
                file.truncate(part.stat().st_size // 2)
        here.rig.failpoints = ""
        here.resume()
        here.finish()


def _parts(folder: Path) -> list[Path]:
    return list(folder.glob(".job.out.*.part"))


JOB_FAULTS = (
    Fault(
        "input changed",
        "the input file is overwritten in the middle of a job, and the daemon killed",
        "the job pauses with a line that names the file; finished rows stay; with the old file "
        "back, `resume` goes on",
        change_input,
    ),
    Fault(
        "input deleted",
        "the input file is deleted in the middle of a job, and the daemon killed",
        "nothing; the link in the home stands in",
        delete_input,
    ),
    Fault(
        "SIGTERM",
        "SIGTERM to the daemon in the middle of a job",
        "it ends within 10 s; the next start goes on",
        terminate_daemon,
    ),
    Fault(
        "SIGTERM while finalizing",
        "SIGTERM to the daemon while it writes the output file",
        "no output, then the whole one; no temporary file is left",
        terminate_finalizing,
    ),
    Fault(
        "half-written output",
        "the daemon is killed while it writes the output file, which is then cut in half",
        "no output, then the whole one; no temporary file is left",
        halve_output,
    ),
    Fault(
        "killed after a submission",
        "the daemon is killed between the commit of a new job and its answer",
        "`submit` prints the job's id; the job is there once, and ends",
        kill_after_submit,
    ),
    Fault(
        "gc killed",
        "`gc` is killed between its first commit and the next",
        "the job's counts and its output stay; the next `gc` ends the work",
        kill_gc,
    ),
    Fault(
        "backup killed",
        "`store backup` is killed before its file gets its name",
        "no backup; the next one is whole, and clears away what was left",
        kill_backup,
    ),
    Fault(
        "killed at every failpoint",
        "the daemon ends itself at each failpoint, one start after the other",
        "nothing; every job ends",
        walk_failpoints,
    ),
)
