"""Random kills of one deployment whose jobs come and go, with every promise checked after each."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from batchrun.types import JobState
from benchmarks.crash_account import (
    Kill,
    check_command,
    check_executions,
    check_home,
    check_leftovers,
    check_output,
    measure_reach,
    read_commits,
    read_executions,
    select,
)
from benchmarks.crash_plan import KillRun
from benchmarks.crash_points import (
    AROUND,
    DURING_COMMIT,
    INSIDE_COMMIT,
    INSIDE_RENAME,
    FailpointServer,
)
from benchmarks.crash_rig import FAILURES, BrokenPromiseError, CrashRig, wait_until
from benchmarks.crash_watch import StatusWatcher

LATENCY_S = 0.35
RULES = tuple(
    {"match": {"every": every}, "action": {"delay_s": delay_s}}
    for every, delay_s in ((5, 0.2), (3, 0.1), (2, 0.25))
)
"""So that rows do not end in step: there are always some that run."""
WINDOW_ROWS = 24
LONG_ROWS = 700
SHORT_ROWS = 16
NUM_WARM_ROWS = 4
PAUSE_S = 0.4
TRAP_WAIT_S = 15.0
PARTS = {"gateway worker": "worker"}


class KillEpisode:
    """One deployment in `folder`, from its start until its jobs have ended and it is down."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        self._rig = CrashRig(folder)
        self._points = FailpointServer(folder, rng)
        self._rig.failpoints = self._points.spec
        self._names = count()
        self._jobs: dict[str, tuple[str, int]] = {}
        self._kills: list[Kill] = []
        self._problems: list[str] = []

    def run(self, targets: list[str]) -> KillRun:
        """Kill these, one after the other; ends early when a promise is broken."""
        window = {"requests": WINDOW_ROWS}
        self._rig.use_fake_engine(LATENCY_S, rules=RULES, window=window, gateway_workers=2)
        self._rig.start()
        watcher = StatusWatcher(self._rig)
        try:
            for target in targets:
                self._feed_until_rows_run()
                time.sleep(self._rng.uniform(0, PAUSE_S))
                self._kills.append(self._kill(target))
                self._problems += [*check_home(self._rig), *watcher.problems]
                if self._problems:
                    break
            self._finish(watcher)
        except FAILURES as error:
            self._problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._points.clear()
            self._rig.close()
            self._points.close()
        self._problems += check_leftovers(self._rig)
        return self._account(watcher.num_looks)

    def _feed(self) -> None:
        """There is always a long job that runs, and a short one."""
        live = {name for name, state in self._states() if not JobState(state).is_terminal}
        if not any(self._jobs[name][1] == LONG_ROWS for name in live & set(self._jobs)):
            self._submit(LONG_ROWS)
        if len(live) < 2:
            self._submit(SHORT_ROWS)

    def _submit(self, num_rows: int) -> None:
        name = f"job{next(self._names)}"
        suffix = self._rng.choice(("parquet", "jsonl"))
        job = self._rig.write_job(name, num_rows, suffix=suffix)
        self._jobs[name] = (f"{name}.out.{suffix}", num_rows)
        self._rig.submit(job)

    def _states(self) -> list[tuple[str, str]]:
        return [
            (name, s) for name, s in select(self._rig.home.store, "SELECT name, state FROM jobs")
        ]

    def _feed_until_rows_run(self) -> None:
        killed_at = self._kills[-1].ended_at if self._kills else 0.0

        def are_running() -> bool:
            self._feed()
            since = max(time.time() - LATENCY_S, killed_at)
            recent = _last_lines(self._rig.executions_path, 2 * WINDOW_ROWS)
            return sum(float(json.loads(line)["at"]) > since for line in recent) >= NUM_WARM_ROWS

        wait_until(are_running, "rows to run again: the jobs are stuck")

    def _kill(self, target: str) -> Kill:
        if target == "daemon in a commit":
            return self._trap_daemon(target, self._rng.choice((*INSIDE_COMMIT, DURING_COMMIT)))
        if target == "daemon in a rename":
            self._submit(SHORT_ROWS)
            return self._trap_daemon(target, self._rng.choice(INSIDE_RENAME))
        if target == "writer":
            return self._trap_daemon(target, self._rng.choice(AROUND))
        if target == "submit":
            return self._kill_submit()
        if target == "results":
            return self._kill_results()
        at = time.time()
        parts = ("daemon", "gateway", "engine") if target == "all" else (target,)
        for part in parts:
            self._rig.kill(PARTS.get(part, part))
        if "daemon" in parts:
            self._start_again()
        elif target.startswith("gateway"):
            wait_until(lambda: _answers(self._rig), "the gateway to answer again")
        cuts = target in {"daemon", "engine", "all"}
        return Kill(target, "", is_inside=False, cuts=cuts, at=at, ended_at=time.time())

    def _trap_daemon(self, target: str, place: str) -> Kill:
        pid = self._rig.pid_of("daemon")
        trap = self._points.set_trap(pid, place)
        if not trap.sprung.wait(TRAP_WAIT_S):
            self._points.clear()
            self._rig.kill("daemon")
        at = trap.died_at or time.time()
        wait_until(lambda: not self._rig.lives(pid), "the daemon to end")
        self._start_again()
        place = place if trap.died_at else ""
        return Kill(target, place, trap.is_inside, cuts=True, at=at, ended_at=time.time())

    def _kill_submit(self) -> Kill:
        """`submit` dies at any instant of its life."""
        command = self._begin_submit()
        while command.poll() is not None:
            command = self._begin_submit()
        at = time.time()
        command.kill()
        command.wait()
        return Kill("submit", "", is_inside=False, cuts=False, at=at, ended_at=time.time())

    def _begin_submit(self) -> subprocess.Popen[bytes]:
        name = f"job{next(self._names)}"
        job = self._rig.write_job(name, SHORT_ROWS)
        self._jobs[name] = (f"{name}.out.parquet", SHORT_ROWS)
        command = self._rig.popen("submit", job.name)
        time.sleep(self._rng.uniform(0.2, 2.0))
        return command

    def _kill_results(self) -> Kill:
        """`results -o` dies where it puts a copy in place."""
        done = next((name for name, state in self._states() if state == "completed"), None)
        wanted = ("results", done) if done else ("results", next(iter(self._jobs)), "--partial")
        place = self._rng.choice(("output.sync.before", *INSIDE_RENAME, *INSIDE_RENAME))
        command = self._rig.popen(*wanted, "-o", "copy.parquet")
        trap = self._points.set_trap(command.pid, place)
        if not trap.sprung.wait(TRAP_WAIT_S):
            self._points.clear()
            command.kill()
        at = trap.died_at or time.time()
        if command.wait() != -signal.SIGKILL:
            raise BrokenPromiseError(
                f"results ended with {command.returncode} before it was killed"
            )
        place = place if trap.died_at else ""
        return Kill("results", place, trap.is_inside, cuts=False, at=at, ended_at=time.time())

    def _start_again(self) -> None:
        if self._rng.random() < 0.2:
            self._rig.start_detached()
        else:
            self._rig.start()

    def _finish(self, watcher: StatusWatcher) -> None:
        """Let every job end, and hold all of them against their promises."""
        wait_until(
            lambda: all(JobState(state).is_terminal for _, state in self._states()),
            "every job to end",
        )
        # What a killed `results` left is cleared away by the next that writes there.
        done = self._rig.call("results", self._states()[0][0], "-o", "copy.parquet")
        self._problems += [] if done.returncode == 0 else [f"results: {done.stderr.strip()}"]
        watcher.stop()
        self._problems += watcher.problems
        self._problems += self._check_jobs()
        self._problems += check_command(self._rig)

    def _check_jobs(self) -> Iterator[str]:
        states = self._states()
        for name, (output, num_rows) in self._jobs.items():
            found = [state for job, state in states if job == name]
            if not found:
                continue
            if found != ["completed"]:
                yield f"{name}: {found}"
            yield from check_output(self._rig.folder / output, name, num_rows)

    def _account(self, num_looks: int) -> KillRun:
        executions = read_executions(self._rig.executions_path)
        commits = read_commits(self._rig.home.store)
        if not self._problems:
            self._problems += check_executions(self._kills, executions, commits, LATENCY_S)
        return KillRun(
            tuple(self._kills),
            tuple(measure_reach(self._kills, executions, commits, LATENCY_S)),
            tuple(self._problems),
            num_rows=len(commits),
            num_executions=len(executions),
            num_jobs=len(self._states()),
            num_looks=num_looks,
            passes=dict(self._points.num_passes),
        )


def _answers(rig: CrashRig) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{rig.port}/v1/models", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _last_lines(path: Path, num_lines: int) -> list[str]:
    """The last whole lines of a file that grows."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(file.tell() - num_lines * 160, 0))
        return [line.decode() for line in file.read().split(b"\n")[1:-1]][-num_lines:]
