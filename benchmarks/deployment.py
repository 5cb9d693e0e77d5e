"""A whole deployment in a folder, driven through the `batchrun` command as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchrun.cli.client import DaemonClient
from batchrun.home import Home
from benchmarks.ports import free_port


class Deployment:
    """A folder with batchrun.yaml and a home, on free ports. Nothing runs before `running`."""

    def __init__(self, folder: Path, *, home: Path | None = None) -> None:
        self.folder = folder
        self.home = Home((home or folder / "home").absolute())
        self.port, self.engine_port = free_port(), free_port()

    @property
    def url(self) -> str:
        """The gateway's, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def daemon_pid(self) -> int:
        """The daemon's process; it has to run."""
        return int(self.home.store_lock.read_text())

    def configure(self, engine: Mapping[str, object], **more: object) -> None:
        """Write batchrun.yaml with one engine; `more` are its other keys."""
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"listen": f"127.0.0.1:{self.port}", "engines": [engine], **more}
        (self.folder / "batchrun.yaml").write_text(json.dumps(document))

    def fake_engine(self, latency_s: float, *arguments: str) -> dict[str, object]:
        """A managed fake engine, for `configure`."""
        command = [sys.executable, "-m", "batchrun.engine.fake", f"--port={self.engine_port}"]
        command += [f"--latency-s={latency_s}", *arguments]
        return {"command": command, "port": self.engine_port}

    def batchrun(self, *arguments: str) -> dict[str, Any]:
        """The command's answer; its progress and errors go to this terminal.

        Raises SystemExit with one line when it fails.
        """
        with self.start_command(*arguments) as process:
            return answer_of(process)

    def start_command(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command; `answer_of` waits for what it says."""
        command = [sys.executable, "-m", "batchrun", *arguments, "--json"]
        environment = {**os.environ, "BATCHRUN_HOME": str(self.home.path)}
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE)

    @contextmanager
    def running(self) -> Iterator[str]:
        """`up -d`, and `down` at the end; the gateway's URL."""
        gateway = str(self.batchrun("up", "-d")["gateway"])
        try:
            yield gateway
        finally:
            self.batchrun("down")

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as `batchrun status` shows it, from the daemon itself."""
        return DaemonClient(self.home).get(f"/jobs/{job_id}")


def answer_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a started command says. Raises SystemExit when it fails."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}")
    document: dict[str, Any] = json.loads(output) if output else {}
    return document


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float, poll_s: float = 0.02) -> None:
    """Wait for something that gives no notice. Raises TimeoutError."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {limit_s:g} s in vain for {what}")
        time.sleep(poll_s)
