"""Kills of a real vLLM in the middle of a job, with a proxy before it that counts executions."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchrun.types import JobState
from benchmarks.crash_account import (
    Kill,
    check_command,
    check_executions,
    check_home,
    check_leftovers,
    measure_reach,
    read_commits,
    read_executions,
    read_output,
)
from benchmarks.crash_plan import KillRun
from benchmarks.crash_rig import FAILURES, CrashRig, wait_until
from benchmarks.crash_watch import StatusWatcher
from benchmarks.ports import free_port

PROXY = Path(__file__).parents[1] / "tests" / "counting_proxy.py"
VLLM_ARGS = ("--kv-cache-memory-bytes=268435456", "--max-model-len=4096", "--max-num-seqs=16")
TARGETS = ("engine", "daemon", "engine", "all", "engine", "engine")
NUM_VLLM_KILLS = sum(target != "daemon" for target in TARGETS)
REQUEST = "request: {max_tokens: 96, temperature: 0, ignore_eos: true}\n"
ROWS_BETWEEN = 40
WINDOW_ROWS = 24
NUM_ROWS = 480
ROW_S = 0.2
"""A row takes longer than this: 96 steps of the tiny model."""
START_WAIT_S = 240.0


class VllmEpisode:
    """One deployment of the real engine in `folder`, and one job that lives through every kill."""

    def __init__(self, folder: Path) -> None:
        self._rig = CrashRig(folder)
        self._kills: list[Kill] = []
        self._problems: list[str] = []

    def run(self, targets: tuple[str, ...] = TARGETS) -> KillRun:
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
        return self._account(0 if watcher is None else watcher.num_looks)

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
        file = self._rig.write_job("real", NUM_ROWS)
        lines = [line for line in file.read_text().splitlines() if "request:" not in line]
        file.write_text("\n".join(lines) + f"\n{REQUEST}")
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
            return JobState(self._rig.view(job)["state"]).is_terminal

        wait_until(has_ended, "the job to end", START_WAIT_S)
        watcher.stop()
        view = self._rig.view(job)
        if (view["state"], view["num_failed"]) != ("completed", 0):
            self._problems.append(f"{job}: {view['state']}, {view['num_failed']} failed")
        rows = read_output(self._rig.folder / "real.out.parquet")
        if [row["id"] for row in rows] != [f"real-{row}" for row in range(NUM_ROWS)]:
            self._problems.append(f"{job}: not every row once and in order")
        if any(row["error"] or not row["response"] for row in rows):
            self._problems.append(f"{job}: rows without an answer")
        self._problems += [*watcher.problems, *check_command(self._rig)]

    def _account(self, num_looks: int) -> KillRun:
        executions = read_executions(self._rig.executions_path)
        commits = read_commits(self._rig.home.store)
        if not self._problems:
            self._problems += check_executions(self._kills, executions, commits, ROW_S)
        return KillRun(
            tuple(self._kills),
            tuple(measure_reach(self._kills, executions, commits, ROW_S)),
            tuple(self._problems),
            num_rows=len(commits),
            num_executions=len(executions),
            num_jobs=1,
            num_looks=num_looks,
            passes={},
        )
