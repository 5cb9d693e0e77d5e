"""A deployment whose engine streams at a fixed pace, with callers on it, for `gateway_cost`."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from batchrun.cli.client import DaemonClient
from batchrun.home import Home
from benchmarks.ports import free_port

START_S = 30.0
WAIT_S = 600.0
POLL_S = 0.02


@dataclass(slots=True)
class Window:
    """A phase that was measured: its spans of CLOCK_MONOTONIC seconds, and what the machine did.

    `cores` are processor seconds a second: of each process by its name, of the commands that the
    benchmark ran, and of all else on the machine.
    """

    name: str
    spans: list[tuple[float, float]] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    load_1min: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the phase ran."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def cores(self) -> dict[str, float]:
        """Processor seconds a second."""
        return {name: busy_s / self.seconds for name, busy_s in self.busy_s.items()}


class GatewayRig:
    """`batchrun up` on an attached engine, with callers beside it. Leaving ends all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home")
        self.port, self.engine_port = free_port(), free_port()
        self.calls_path = folder / "calls.npz"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        engine = {"name": "paced", "attach": f"http://127.0.0.1:{self.engine_port}"}
        document = {"listen": f"127.0.0.1:{self.port}", "engines": [engine]}
        (self.folder / "batchrun.yaml").write_text(json.dumps(document))
        self._start("upstream", "paced_upstream", f"--port={self.engine_port}")
        _wait_for(f"http://127.0.0.1:{self.engine_port}/health")
        self.batchrun("up", "-d")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.batchrun("down")

    def call_all_the_time(self) -> None:
        """Start the callers, on the gateway and on the engine itself."""
        ports = (f"--gateway={self.port}", f"--direct={self.engine_port}")
        self._start("client", "paced_client", *ports, f"--out={self.calls_path}")

    def stop_calling(self) -> None:
        """Let calls end; what became of all is in `calls_path` then."""
        client = self._processes["client"]
        client.send_signal(signal.SIGTERM)
        client.wait(timeout=WAIT_S)

    def batchrun(self, *arguments: str) -> dict[str, Any]:
        """Run the command; its answer."""
        with self.start_batchrun(*arguments) as process:
            return self.answer_of(process)

    def start_batchrun(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command."""
        command = [sys.executable, "-m", "batchrun", *arguments, "--json"]
        environment = {**os.environ, "BATCHRUN_HOME": str(self.home.path)}
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE)

    def answer_of(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """What a started command says; it must succeed."""
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        document: dict[str, Any] = json.loads(output) if output else {}
        return document

    def wait_for_job(self, job_id: str, *states: str) -> None:
        """Until the job is in one of these states and nothing of it is being opened or written."""
        daemon = DaemonClient(self.home)
        for _ in _polls(f"{job_id} to be {' or '.join(states)}"):
            (view,) = (job for job in daemon.get("/status")["jobs"] if job["id"] == job_id)
            if view["state"] in states:
                return

    def daemon_pid(self) -> int:
        """Of the daemon."""
        return int(self.home.store_lock.read_text())

    @contextmanager
    def watched(self, window: Window) -> Iterator[None]:
        """Add the time of the block to `window`."""
        before, began_s = self._busy_s(), time.monotonic()
        yield
        window.spans.append((began_s, time.monotonic()))
        window.load_1min = os.getloadavg()[0]
        for name, busy_s in self._busy_s().items():
            window.busy_s[name] = window.busy_s.get(name, 0.0) + busy_s - before.get(name, 0.0)

    def _busy_s(self) -> dict[str, float]:
        """Processor seconds so far; `others` is all that is not ours."""
        pids = {name: process.pid for name, process in self._processes.items()}
        pids["daemon"] = self.daemon_pid()
        record = json.loads(self.home.gateway_process.read_text())
        pids["gateway"] = int(record["pid"])
        found = {name: _cpu_s(pid) for name, pid in pids.items()}
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["commands"] = ended.ru_utime + ended.ru_stime
        own = psutil.cpu_times()
        mine = time.process_time() + sum(found.values())
        found["others"] = (
            own.user + own.nice + own.system + own.irq + own.softirq + own.steal - mine
        )
        return found

    def _start(self, name: str, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        # As engines and callers are: a session is what Linux shares processor time out among.
        self._processes[name] = subprocess.Popen(command, start_new_session=True)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _wait_for(url: str) -> None:
    for _ in _polls(url, limit_s=START_S):
        with suppress(URLError, ConnectionError), urlopen(url):
            return


def _polls(what: str, limit_s: float = WAIT_S) -> Iterator[None]:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        yield
        time.sleep(POLL_S)
    raise RuntimeError(f"waited in vain for {what}")
