"""Deployments whose jobs come and go, watched all the time, with every promise checked."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from batchrun.errors import BatchrunError
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState
from benchmarks.crash_account import check_home, check_leftovers, check_output, read_jobs
from benchmarks.deployment import Deployment, wait_until

END_WAIT_S = 300.0
POLL_S = 0.05
POLL_INTERVAL_S = 0.2
FINAL_KEYS = (
    *("state", "reason", "num_rows", "num_completed", "num_failed"),
    *("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "finished_at"),
)


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
