"""Random kills of one deployment whose jobs come and go, with every promise checked after each."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from batchrun.types import JobState
from benchmarks.crash_account import (
    Kill,
    Reach,
    check_command,
    check_executions,
    check_home,
    check_leftovers,
    check_output,
    measure_reach,
    read_commits,
    read_executions,
    read_output,
    select,
)
from benchmarks.crash_rig import (
    AROUND,
    DURING_COMMIT,
    FAILURES,
    INSIDE_COMMIT,
    INSIDE_RENAME,
    BrokenPromiseError,
    CrashRig,
    FailpointServer,
    StatusWatcher,
    wait_until,
)
from benchmarks.ports import free_port

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
PROXY = Path(__file__).parents[1] / "tests" / "counting_proxy.py"
VLLM_ARGS = ("--kv-cache-memory-bytes=268435456", "--max-model-len=4096", "--max-num-seqs=16")
VLLM_REQUEST = "request: {max_tokens: 96, temperature: 0, ignore_eos: true}\n"
ROWS_BETWEEN = 40
VLLM_ROWS = 480
VLLM_ROW_S = 0.2
"""A row takes longer than this: 96 steps of the tiny model."""
START_WAIT_S = 240.0

TARGETS = {
    "daemon": 8,
    "daemon in a commit": 22,
    "daemon in a rename": 12,
    "writer": 10,
    "engine": 17,
    "gateway": 8,
    "gateway worker": 4,
    "submit": 3,
    "results": 8,
    "all": 8,
}
"""What is killed, in so many of a hundred kills."""


@dataclass(frozen=True, slots=True)
class KillRun:
    """What came of a deployment's kills; no problem: every promise was kept."""

    kills: tuple[Kill, ...]
    reaches: tuple[Reach, ...]
    problems: tuple[str, ...]
    num_rows: int
    num_executions: int
    num_jobs: int
    num_looks: int = 0
    passes: dict[str, int] = field(default_factory=dict)


def plan_targets(rng: random.Random, num_kills: int) -> list[str]:
    """What each kill hits: the shares of `TARGETS`, in a random order."""
    names = [name for name, weight in TARGETS.items() for _ in range(weight)]
    step = len(names) / num_kills
    offset = rng.random() * step
    plan = [names[int(offset + index * step) % len(names)] for index in range(num_kills)]
    rng.shuffle(plan)
    return plan


def account(rig: CrashRig, kills: list[Kill], problems: list[str], row_s: float) -> KillRun:
    """What came of the kills of a deployment that is down; rows took `row_s` at least."""
    executions, commits = read_executions(rig.executions_path), read_commits(rig.home.store)
    if not problems:
        problems += check_executions(kills, executions, commits, row_s)
    return KillRun(
        tuple(kills),
        tuple(measure_reach(kills, executions, commits, row_s)),
        tuple(problems),
        num_rows=len(commits),
        num_executions=len(executions),
        num_jobs=len(select(rig.home.store, "SELECT id FROM jobs")),
    )


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
        passes = dict(self._points.num_passes)
        run = account(self._rig, self._kills, self._problems, LATENCY_S)
        return replace(run, num_looks=watcher.num_looks, passes=passes)

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


class VllmEpisode:
    """One deployment of the real engine in `folder`, and one job that lives through every kill."""

    def __init__(self, folder: Path) -> None:
        self._rig = CrashRig(folder)
        self._kills: list[Kill] = []
        self._problems: list[str] = []

    def run(self, targets: Sequence[str]) -> KillRun:
        """Kill these, one after the other, each once more rows are done than before."""
        watcher = None
        try:
            with self._counted():
                self._rig.start_detached()
                job = self._submit()
                watcher = StatusWatcher(self._rig)
                for target in targets:
                    self._wait_for_rows(len(read_commits(self._rig.home.store)) + ROWS_BETWEEN)
                    self._kills.append(self._kill(target))
                    self._problems += [*check_home(self._rig), *watcher.problems]
                self._finish(job, watcher)
        except FAILURES as error:
            self._problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._rig.close()
        self._problems += check_leftovers(self._rig)
        run = account(self._rig, self._kills, self._problems, VLLM_ROW_S)
        return run if watcher is None else replace(run, num_looks=watcher.num_looks)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        port = free_port()
        engine: dict[str, object] = {"port": self._rig.engine_port, "vllm_args": list(VLLM_ARGS)}
        window = {"requests": WINDOW_ROWS}
        engine["url"] = f"http://127.0.0.1:{port}"
        self._rig.configure(engine, model="tiny", window=window)
        command = [
            *(sys.executable, str(PROXY), f"--port={port}"),
            f"--target=http://127.0.0.1:{self._rig.engine_port}",
            f"--executions={self._rig.executions_path}",
        ]
        with subprocess.Popen(command) as proxy:
            try:
                yield
            finally:
                proxy.terminate()

    def _submit(self) -> str:
        file = self._rig.write_job("real", VLLM_ROWS)
        lines = [line for line in file.read_text().splitlines() if "request:" not in line]
        file.write_text("\n".join(lines) + f"\n{VLLM_REQUEST}")
        return self._rig.submit(file)

    def _wait_for_rows(self, num_rows: int) -> None:
        store = self._rig.home.store
        wait_until(lambda: len(read_commits(store)) >= num_rows, "rows to end", START_WAIT_S)

    def _kill(self, target: str) -> Kill:
        at = time.time()
        for part in ("daemon", "gateway", "engine") if target == "all" else (target,):
            self._rig.kill(part)
        if target == "engine":
            # Its children hold its port for a moment, and rows that were on their way still seem to
            # reach it: the outage lasts until the next one answers.
            wait_until(lambda: not self._is_engine_ready(), "the engine to be missed")
            wait_until(self._is_engine_ready, "the engine to come back", START_WAIT_S)
        else:
            self._rig.start_detached()
        return Kill(target, "", is_inside=False, cuts=True, at=at, ended_at=time.time())

    def _is_engine_ready(self) -> bool:
        return str(self._rig.engines()[0]["state"]) == "ready"

    def _finish(self, job: str, watcher: StatusWatcher) -> None:
        def has_ended() -> bool:
            return JobState(self._rig.job(job)["state"]).is_terminal

        wait_until(has_ended, "the job to end", START_WAIT_S)
        watcher.stop()
        view = self._rig.job(job)
        if (view["state"], view["num_failed"]) != ("completed", 0):
            self._problems.append(f"{job}: {view['state']}, {view['num_failed']} failed")
        rows = read_output(self._rig.folder / "real.out.parquet")
        if [row["id"] for row in rows] != [f"real-{row}" for row in range(VLLM_ROWS)]:
            self._problems.append(f"{job}: not every row once and in order")
        if any(row["error"] or not row["response"] for row in rows):
            self._problems.append(f"{job}: rows without an answer")
        self._problems += [*watcher.problems, *check_command(self._rig)]
