"""What `status` says while processes die: counts that add up, and jobs that stay ended."""

from __future__ import annotations

import threading
import time
from typing import Any

from batchrun.cli.client import DaemonClient
from batchrun.errors import BatchrunError
from batchrun.types import JobState
from benchmarks.crash_rig import CrashRig

POLL_INTERVAL_S = 0.2
FINAL_KEYS = (
    "state",
    "reason",
    "num_rows",
    "num_completed",
    "num_failed",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "finished_at",
)


class StatusWatcher:
    """Asks the daemon again and again, in a thread; `problems` holds what must not be.

    A job's done rows never become fewer, and with those in flight they are at most all its rows.
    A job that has ended never changes, nor does its output file.
    """

    def __init__(self, rig: CrashRig) -> None:
        self.problems: list[str] = []
        self.num_looks = 0
        self._rig = rig
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
        while True:
            is_last = self._stopped.is_set()
            try:
                for view in DaemonClient(self._rig.home).get("/status")["jobs"]:
                    self._look(view)
                self.num_looks += 1
            except BatchrunError:
                time.sleep(POLL_INTERVAL_S)
            if is_last:
                return
            self._stopped.wait(POLL_INTERVAL_S)

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
        try:
            status = (self._rig.folder / path).stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns
