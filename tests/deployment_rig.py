"""A whole deployment for tests, driven through the `batchrun` command as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from openai import OpenAI

from batchrun.control.client import DaemonClient
from batchrun.control.starting import stop_everything
from batchrun.errors import DaemonUnavailableError
from batchrun.home import Home
from benchmarks.deployment import free_port

WAIT_S = 300.0

JOB_FILE = """\
name: sample
input:
  path: rows.parquet
  id: id
  messages:
    - {role: user, content: "{{ text }}"}
request: {max_tokens: 8, temperature: 0}
output: {path: out.parquet, keep: [text]}
"""


class DeploymentRig:
    """A folder with batchrun.yaml and a home of its own; `close` ends all that runs for it.
    Commands run within `wrapper`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.port = free_port()
        self.engine_port = free_port()
        self.agent_port = 0
        self.store_url: str | None = None
        self.wrapper: tuple[str, ...] = ()
        self.executions_path = folder / "executions.jsonl"

    def use_fake_engine(
        self, *options: str, rules: Sequence[Mapping[str, object]] = (), **more: object
    ) -> None:
        """Write batchrun.yaml for one managed fake engine that counts executions."""
        script = self.folder / "script.json"
        script.write_text(json.dumps(list(rules)))
        command = [
            sys.executable,
            "-m",
            "batchrun.engine.fake",
            f"--port={self.engine_port}",
            "--model=fake",
            f"--executions={self.executions_path}",
            f"--script={script}",
            *options,
        ]
        self.configure({"command": command, "port": self.engine_port}, **more)

    def use_agent(self, *options: str, **more: object) -> None:
        """The same fake engine behind an agent, which is started."""
        self.use_fake_engine(*options)
        (self.folder / "batchrun.yaml").rename(self.folder / "agent.yaml")
        self.agent_port = free_port()
        self.configure({"agent": f"https://127.0.0.1:{self.agent_port}"}, **more)
        self.start_agent()

    def start_agent(self, *flags: str) -> None:
        """Start the agent in the background."""
        listen = f"127.0.0.1:{self.agent_port}"
        self.ask("engine", "serve", "-d", "--listen", listen, "--config", "agent.yaml", *flags)

    def configure(self, engine: Mapping[str, object], **more: object) -> None:
        """Write batchrun.yaml with one engine."""
        store = {} if self.store_url is None else {"store": self.store_url}
        document = {"listen": f"127.0.0.1:{self.port}", "engines": [engine], **store, **more}
        (self.folder / "batchrun.yaml").write_text(json.dumps(document))

    def write_rows(self, texts: Sequence[str], name: str = "rows.parquet") -> None:
        """An input file with columns id and text."""
        ids = [f"row-{i}" for i in range(len(texts))]
        pq.write_table(pa.table({"id": ids, "text": list(texts)}), self.folder / name)

    def write_job(self, text: str = JOB_FILE, name: str = "job.yaml") -> str:
        """A job file in the folder; returns its name."""
        (self.folder / name).write_text(text)
        return name

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command in the folder."""
        return subprocess.run(
            [*self.wrapper, sys.executable, "-m", "batchrun", *arguments],
            cwd=self.folder,
            env={**os.environ, "BATCHRUN_HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=1500,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command without waiting. It hears Ctrl-C, even where the tests do not."""
        return subprocess.Popen(
            [*self.wrapper, sys.executable, "-m", "batchrun", *arguments],
            cwd=self.folder,
            env={**os.environ, "BATCHRUN_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
        )

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run the command with --json; it must succeed."""
        done = self.call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def refuse(self, *arguments: str) -> tuple[int, str]:
        """Run the command, which must be refused with one line; its exit code and the line."""
        done = self.call(*arguments)
        assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
        return done.returncode, done.stderr

    def submit_rows(self, *texts: str, job: str = JOB_FILE) -> str:
        """Submit a job of these rows, with the deployment brought up where it is not; its id."""
        self.write_rows(texts)
        self.write_job(job)
        if not (self.home / "run" / "daemon.json").exists():
            self.ask("up", "-d")
        return str(self.ask("submit", "job.yaml")["id"])

    def complete_job(self, num_rows: int) -> str:
        """See a job of so many rows through; its id."""
        job_id = self.submit_rows(*(f"question {i}" for i in range(num_rows)))
        assert self.wait_until_ended(job_id)["state"] == "completed"
        return job_id

    def job(self, job_id: str) -> dict[str, Any]:
        """The status of one job, asked of the daemon where one runs: `status` takes a second."""
        try:
            jobs = DaemonClient(Home(self.home)).get("/status")["jobs"]
        except DaemonUnavailableError:
            jobs = self.ask("status", job_id)["jobs"]
        (view,) = (view for view in jobs if view["id"] == job_id)
        return dict(view)

    def wait_for(
        self, job_id: str, wanted: Callable[[dict[str, Any]], bool], *, wait_s: float = WAIT_S
    ) -> dict[str, Any]:
        """Poll a job until `wanted(view)`."""
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            view = self.job(job_id)
            if wanted(view):
                return view
            time.sleep(0.05)
        raise AssertionError(f"waited in vain; last: {view}")

    def wait_until_ended(self, job_id: str, *, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Poll a job until it ends or pauses."""
        ended = {"completed", "failed", "cancelled", "expired", "paused"}
        return self.wait_for(job_id, lambda view: view["state"] in ended, wait_s=wait_s)

    def output(self, name: str = "out.parquet") -> list[dict[str, Any]]:
        """The rows of an output file, Parquet or JSONL."""
        path = self.folder / name
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows

    def openai(self, **options: Any) -> OpenAI:
        """The ordinary client of this deployment. Close it."""
        options = {"api_key": "unused", **options}
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **options)

    def executions(self) -> list[dict[str, Any]]:
        """Every execution that the fake engine (or the counting proxy) began."""
        if not self.executions_path.exists():
            return []
        return [json.loads(line) for line in self.executions_path.read_text().splitlines()]

    def wait_for_executions(self, num_executions: int) -> None:
        """Wait until the engine has begun so many in all."""
        deadline_s = time.monotonic() + WAIT_S
        while len(self.executions()) < num_executions:
            assert time.monotonic() < deadline_s, f"the engine began {len(self.executions())}"
            time.sleep(0.05)

    def pid_of(self, what: str) -> int:
        """The process id of `daemon`, `gateway`, `engine` or `agent`."""
        if what == "daemon":
            return int((self.home / "store.lock").read_text())
        names = {"gateway": "run/gateway-process.json", "agent": "run/agent-0.json"}
        engine = "agents/0/run/engine-0.json" if self.agent_port else "run/engine-0.json"
        return int(json.loads((self.home / names.get(what, engine)).read_text())["pid"])

    def kill(self, what: str, signal_number: int = signal.SIGKILL) -> None:
        """`kill -9` the daemon, the gateway or the engine, and see it gone."""
        process = psutil.Process(self.pid_of(what))
        process.send_signal(signal_number)
        deadline_s = time.monotonic() + 15
        while _runs(process):
            assert time.monotonic() < deadline_s, f"{what} survived the signal"
            time.sleep(0.02)

    @property
    def store(self) -> str | Path:
        """Where the jobs are: the SQLite file, or the URL of the database."""
        return Home(self.home).store_location

    def close(self) -> None:
        """End everything that runs for this folder, as `batchrun down` does."""
        stop_everything(Home(self.home))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
