"""Deployments whose jobs come and go, watched all the time, with every promise checked."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from typing import Any

from batchrun.errors import BatchrunError
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState
from benchmarks.crash_account import Kill, check_home, check_leftovers, check_output, read_jobs
from benchmarks.deployment import Deployment, wait_until

END_WAIT_S = 300.0
LATENCY_S = 0.35
RULES = tuple(
    {"match": {"every": every}, "action": {"delay_s": delay_s}}
    for every, delay_s in ((5, 0.2), (3, 0.1), (2, 0.25))
)
"""So that rows do not end in step: there are always some that run."""
WINDOW_ROWS = 24
SHORT_ROWS = 16
INSIDE_COMMIT = ("store.results.between", "store.commit.before")
INSIDE_RENAME = ("output.rename.before", "output.rename.after")
DURING_COMMIT = "store.commit"
"""Not a failpoint: some instant between `store.commit.before` and `store.commit.after`."""
MAX_COMMIT_S = 0.004
POLL_S = 0.05
POLL_INTERVAL_S = 0.2
FINAL_KEYS = (
    *("state", "reason", "num_rows", "num_completed", "num_failed"),
    *("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "finished_at"),
)


class FailpointServer:
    """Answers every failpoint of the processes whose `BATCHRUN_FAILPOINTS` is `spec`. While
    `is_disk_full`, no transaction finds room for its commit."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.num_passes: Counter[str] = Counter()
        self._rng = rng
        self.is_disk_full = False
        self._trap: tuple[int, Kill, threading.Event] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.spec = f"*=ask:{folder / 'failpoints'}"
        answer = self._answer

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    answer(self.request)

        self._server = ThreadingUnixStreamServer(str(folder / "failpoints"), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def set_trap(self, pid: int, kill: Kill) -> threading.Event:
        """From now on this process dies at the kill's place (a failpoint, or `DURING_COMMIT`).

        Once the event is set, the kill has its instant and knows whether it was inside.
        """
        sprung = threading.Event()
        self._trap = (pid, kill, sprung)
        return sprung

    def clear(self) -> None:
        """No trap any more."""
        self._trap = None

    def close(self) -> None:
        """Answer no more; whoever asks goes on."""
        self.clear()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, connection: socket.socket) -> None:
        """Who is told nothing goes on as soon as the connection is closed."""
        name, asker = connection.recv(256).decode().split()
        self.num_passes[name] += 1
        if self.is_disk_full and name == "store.commit.before":
            connection.sendall(b"raise")
            return
        pid, kill, sprung = self._trap or (0, None, None)
        if kill is None or sprung is None or pid != int(asker):
            return
        if name == "store.commit.after":
            kill.is_inside = False
        is_during = kill.place == DURING_COMMIT and name == "store.commit.before"
        if name != kill.place and not is_during:
            return
        kill.is_inside = name in {*INSIDE_COMMIT, *INSIDE_RENAME}
        if is_during:
            connection.close()
            time.sleep(self._rng.uniform(0, MAX_COMMIT_S))
        kill.at = time.time()
        os.kill(pid, signal.SIGKILL)
        if is_during:
            time.sleep(0.05)  # It may have said, just before, that the commit was over.
        self._trap = None
        sprung.set()


class StatusWatcher:
    """Asks the daemon again and again, in a thread; `problems` holds what must not be.

    A job's done rows never become fewer, and with those in flight they are at most all its rows.
    A job that has ended never changes, nor does its output file.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.problems: list[str] = []
        self.num_looks = 0
        self._deployment = deployment
        self._num_done: dict[str, int] = {}
        self._final: dict[str, tuple[object, ...]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look a last time, and no more."""
        self._stopped.set()
        self._thread.join()

    def forgive(self) -> None:
        """Results may have been lost on purpose; ended jobs still may not change."""
        self._num_done.clear()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(POLL_INTERVAL_S)
            with suppress(BatchrunError):
                for view in self._deployment.client.get("/status")["jobs"]:
                    self._look(view)
                self.num_looks += 1

    def _look(self, view: dict[str, Any]) -> None:
        job = str(view["id"])
        num_done = int(view["num_completed"]) + int(view["num_failed"])
        if num_done + int(view["num_in_flight"]) > int(view["num_rows"]):
            self.problems.append(f"{job}: {num_done} done and {view['num_in_flight']} in flight")
        if num_done < self._num_done.get(job, 0):
            self.problems.append(f"{job}: {self._num_done[job]} rows were done, now {num_done}")
        self._num_done[job] = num_done
        if JobState(view["state"]).is_terminal:
            final = (*(view[key] for key in FINAL_KEYS), self._output(str(view["output_path"])))
            if self._final.setdefault(job, final) != final:
                self.problems.append(f"{job}: ended as {self._final[job]}, now {final}")

    def _output(self, path: str) -> tuple[int, int] | None:
        with suppress(OSError):
            status = (self._deployment.folder / path).stat()
            return status.st_size, status.st_mtime_ns
        return None


class Episode(ABC):
    """One deployment in `folder`, from its start until its jobs have ended and it is down.

    After `run`: the promises that were broken, and the jobs as the store has them.
    """

    has_known_answers = True

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.deployment = Deployment(folder)
        self.problems: list[str] = []
        self.jobs: list[JobRecord] = []
        self.num_looks = 0
        self._rng = rng
        self._asked: dict[str, tuple[Path, str, int]] = {}

    def run(self) -> None:
        """Start, work, let every job end, and check every promise."""
        with ExitStack() as exits:
            exits.callback(self.deployment.close)
            try:
                self._start(exits)
                watcher = StatusWatcher(self.deployment)
                exits.callback(watcher.stop)
                self._work(watcher)
                wait_until(self._have_ended, "every job to end", END_WAIT_S, POLL_S)
                self._finish()
                watcher.stop()
                self.num_looks = watcher.num_looks
                self.problems += [*watcher.problems, *check_home(self.deployment)]
            except (BatchrunError, OSError, KeyError) as error:
                self.problems.append(f"{type(error).__name__}: {error}")
        self.problems += check_leftovers(self.deployment)

    @abstractmethod
    def _start(self, exits: ExitStack) -> None:
        """Configure and start the deployment; `exits` ends what runs beside it."""

    @abstractmethod
    def _work(self, watcher: StatusWatcher) -> None:
        """Submit jobs, and do to them and the deployment what is to be done."""

    def _have_ended(self) -> bool:
        return not self._live()

    def _finish(self) -> None:
        """Every job must be there once, and its output be what its rows ask for."""
        self.jobs = read_jobs(self.deployment)
        times = Counter(job.name for job in self.jobs)
        self.problems += [f"{name}: submitted twice" for name in times if times[name] > 1]
        for job in self.jobs:
            is_done, known = job.state == JobState.COMPLETED, self.has_known_answers
            asked = self._asked[job.name]
            self.problems += check_output(*asked, is_completed=is_done, has_known_answers=known)

    def _write(self, num_rows: int, more: str = "") -> Path:
        """The file of a new job, which is to be submitted."""
        name = f"job{len(self._asked)}"
        suffix = self._rng.choice(("parquet", "jsonl"))
        output = self.deployment.folder / f"{name}.out.{suffix}"
        self._asked[name] = (output, name, num_rows)
        return self.deployment.write_job(name, num_rows, more, suffix)

    def _live(self) -> list[JobRecord]:
        """The jobs that have not ended."""
        return [job for job in read_jobs(self.deployment) if not job.state.is_terminal]
