"""A whole deployment for the fault harness: real processes that can be killed, and what they left.

The engine is the fake one, which notes every execution in a file that outlives it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.cli.client import DaemonClient
from batchrun.engine.process import NONCE_VARIABLE, read_record
from batchrun.errors import BatchrunError
from batchrun.failpoints import VARIABLE
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.types import JobState
from benchmarks.deployment import Deployment

INSIDE_COMMIT = ("store.results.between", "store.commit.before")
INSIDE_RENAME = ("output.rename.before", "output.rename.after")
AROUND = ("store.commit.after", "writer.commit.before", "writer.commit.after", "output.sync.before")
DURING_COMMIT = "store.commit"
"""Not a failpoint: some instant between `store.commit.before` and `store.commit.after`."""
MAX_COMMIT_S = 0.004


@dataclass(slots=True)
class Trap:
    """Kill process `pid` where it passes `place`; `died_at` (UTC epoch seconds) once it is sprung.

    `is_inside` says whether it died with a transaction open, or while a rename was not yet durable.
    """

    pid: int
    place: str
    died_at: float | None = None
    is_inside: bool = False
    sprung: threading.Event = field(default_factory=threading.Event)


class FailpointServer:
    """Answers every failpoint of the processes whose `BATCHRUN_FAILPOINTS` is `spec`."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.num_passes: Counter[str] = Counter()
        self._rng = rng
        self._trap: Trap | None = None
        self._left: set[int] = set()
        path = folder / "failpoints"
        self.spec = f"*=ask:{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def set_trap(self, pid: int, place: str) -> Trap:
        """From now on this process dies at `place` (a failpoint, or `DURING_COMMIT`)."""
        self._left.clear()
        self._trap = Trap(pid, place)
        return self._trap

    def clear(self) -> None:
        """No trap any more."""
        self._trap = None

    def close(self) -> None:
        """Answer no more; whoever asks goes on."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection:
            name, pid = connection.recv(256).decode().split()
            self.num_passes[name] += 1
            if name == "store.commit.after":
                self._left.add(int(pid))
            trap = self._trap
            if trap is None or trap.pid != int(pid) or trap.sprung.is_set():
                connection.sendall(b"go\n")
            elif trap.place == name:
                self._spring(trap, is_inside=name in {*INSIDE_COMMIT, *INSIDE_RENAME})
            elif trap.place == DURING_COMMIT and name == "store.commit.before":
                self._left.clear()
                connection.sendall(b"go\n")
                time.sleep(self._rng.uniform(0, MAX_COMMIT_S))
                self._spring(trap, is_inside=True)
            else:
                connection.sendall(b"go\n")

    def _spring(self, trap: Trap, *, is_inside: bool) -> None:
        self._trap = None
        trap.died_at = time.time()
        os.kill(trap.pid, signal.SIGKILL)
        if trap.place == DURING_COMMIT:
            time.sleep(0.05)
            is_inside = trap.pid not in self._left
        trap.is_inside = is_inside
        trap.sprung.set()


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


WAIT_S = 120.0
MAX_TOKENS = 8
MODEL = "fake"


class BrokenPromiseError(Exception):
    """An invariant does not hold, or a process did not do what it must."""


FAILURES = (BrokenPromiseError, BatchrunError, OSError, sqlite3.Error, KeyError)
"""What comes of a broken promise, at one place or another."""


class CrashRig(Deployment):
    """A deployment whose processes can be killed; `close` ends all that runs for it."""

    def __init__(self, folder: Path, *, home: Path | None = None) -> None:
        super().__init__(folder, home=home)
        folder.mkdir(parents=True, exist_ok=True)
        self.executions_path = folder / "executions.jsonl"
        self.failpoints = ""
        self._daemon: subprocess.Popen[bytes] | None = None

    def use_fake_engine(
        self, latency_s: float, *, rules: Sequence[object] = (), **more: object
    ) -> None:
        """Write batchrun.yaml for one managed fake engine; `more` are its other keys."""
        script = self.folder / "script.json"
        script.write_text(json.dumps(list(rules)))
        files = (f"--executions={self.executions_path}", f"--script={script}")
        self.configure(self.fake_engine(latency_s, f"--model={MODEL}", *files), **more)

    def start_detached(self) -> None:
        """`batchrun up -d`."""
        done = self.call("up", "-d")
        if done.returncode != 0:
            raise BrokenPromiseError(f"up -d: exit {done.returncode}: {done.stderr.strip()}")

    def start(self) -> None:
        """Start a daemon in the foreground of a child process; returns when it answers.

        One that this rig started before has been killed.
        """
        if self._daemon is not None:
            self._daemon.wait(WAIT_S)
        self._daemon = self.popen("up")
        wait_until(self._is_up, "the daemon to answer")

    def call(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command in the folder."""
        return subprocess.run(
            self._argv(*arguments),
            cwd=self.folder,
            env=self._env() | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command in the folder without waiting; what it says goes to `daemon.out`."""
        with (self.folder / "daemon.out").open("ab") as log:
            return subprocess.Popen(
                self._argv(*arguments), cwd=self.folder, env=self._env(), stdout=log, stderr=log
            )

    def write_job(self, name: str, num_rows: int, more: str = "", suffix: str = "parquet") -> Path:
        """An input of so many prompts, and the job file for it; the output is NAME.out.SUFFIX."""
        ids = [f"{name}-{row}" for row in range(num_rows)]
        table = pa.table({"id": ids, "text": [prompt(name, row) for row in range(num_rows)]})
        pq.write_table(table, self.folder / f"{name}.in.parquet")
        job = self.folder / f"{name}.yaml"
        job.write_text(
            f"name: {name}\n"
            f"input: {{path: {name}.in.parquet, id: id, "
            'messages: [{role: user, content: "{{ text }}"}]}\n'
            f"request: {{max_tokens: {MAX_TOKENS}, temperature: 0}}\n"
            f"output: {{path: {name}.out.{suffix}, keep: [text]}}\n{more}"
        )
        return job

    def submit(self, job: Path) -> str:
        """Hand a job to the daemon as `batchrun submit` does; tries again while none answers."""
        new = prepare_job(load_job_file(job, cwd=self.folder), links=self.home.inputs)
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                return str(DaemonClient(self.home).post("/jobs", asdict(new))["id"])
            except BatchrunError as error:
                if time.monotonic() > deadline_s:
                    raise BrokenPromiseError(f"{job} was not taken: {error}") from error
                time.sleep(0.1)

    def engines(self) -> list[dict[str, Any]]:
        """The engines as `batchrun status` shows them."""
        return list(DaemonClient(self.home).get("/status")["engines"])

    def pid_of(self, part: str) -> int:
        """The process of `daemon`, `gateway`, `worker` (one of the gateway's) or `engine`; or 0."""
        with suppress(OSError, ValueError, psutil.NoSuchProcess, IndexError):
            if part == "daemon":
                address = self.home.read_daemon_address()
                return 0 if address is None else address.pid
            if part == "worker":
                return psutil.Process(self.pid_of("gateway")).children()[0].pid
            name = "gateway-process.json" if part == "gateway" else "engine-0.json"
            record = read_record(self.home.run / name)
            return 0 if record is None else record.pid
        return 0

    def kill(self, part: str, number: int = signal.SIGKILL) -> None:
        """Signal a part of the deployment, and see it gone."""
        try:
            wait_until(lambda: psutil.pid_exists(self.pid_of(part) or -1), f"the {part} to run")
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"{error}; engines: {self.engines()}") from error
        self.kill_pid(self.pid_of(part), number)

    def kill_pid(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signal a process and see it gone."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        wait_until(lambda: not self.lives(pid), f"process {pid} to end")

    def lives(self, pid: int) -> bool:
        """Whether a process runs; a zombie does not, once all of its threads have ended: until
        then it keeps its files and locks."""
        if self._daemon is not None:
            self._daemon.poll()
        try:
            is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            return not is_zombie or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
        except (psutil.NoSuchProcess, OSError):
            return False

    def close(self) -> None:
        """`batchrun down`, whatever runs."""
        self.failpoints = ""
        done = self.call("down")
        if self._daemon is not None:
            self._daemon.wait(30)
        if done.returncode != 0:
            raise BrokenPromiseError(f"down: {done.stderr}")

    def find_orphans(self) -> list[int]:
        """Processes that batchrun started for this home and that still run."""
        mark = f"BATCHRUN_HOME={self.home.path}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                environ = path.read_bytes()
                if mark in environ and NONCE_VARIABLE.encode() in environ:
                    found.append(int(path.parent.name))
        return [pid for pid in found if self.lives(pid)]

    def _is_up(self) -> bool:
        assert self._daemon is not None
        if self._daemon.poll() is not None:
            words = (self.folder / "daemon.out").read_text().splitlines()[-1:]
            raise BrokenPromiseError(f"the daemon did not start: {words}")
        return self.pid_of("daemon") == self._daemon.pid and DaemonClient(self.home).is_running()

    def _argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "batchrun", *arguments]

    def _env(self) -> dict[str, str]:
        env = {**os.environ, "BATCHRUN_HOME": str(self.home.path)}
        return env | {VARIABLE: self.failpoints} if self.failpoints else env


def prompt(name: str, row: int) -> str:
    """The text of one row; no two are alike."""
    return f"Job {name} asks question {row}: what comes after {row * 7919 % 104729}?"


def wait_until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    """Wait for something that gives no notice. Raises BrokenPromiseError after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise BrokenPromiseError(f"waited {wait_s:g} s in vain for {what}")
        time.sleep(0.01)
