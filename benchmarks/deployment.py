"""A whole deployment in a folder: driven through the `batchrun` command, and killed in parts."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import requests

from batchrun.control.client import DaemonClient
from batchrun.engine.process import NONCE_VARIABLE
from batchrun.errors import BatchrunError
from batchrun.failpoints import VARIABLE
from batchrun.home import Home
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job

MODEL, TINY = "fake", "tiny"
MAX_TOKENS = 8
GUARD = "batchrun.engine.agent.guard"
PROXY = Path(__file__).parents[1] / "tests" / "counting_proxy.py"
WAIT_S = 120.0
COMMAND_WAIT_S = 1_800.0
ROW_GROUP_ROWS = 100_000


MOST_WORKERS = 8
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS
NEXT_PORT = itertools.count(secrets.randbelow(20_000))


def free_port() -> int:
    """A port that nothing listens on now, that no outgoing connection will be given, and that no
    other call, here or in another of pytest's workers, was told lately."""
    while True:
        port = 10_000 + (next(NEXT_PORT) * MOST_WORKERS + WORKER) % 20_000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def answers(url: str) -> bool:
    """Whether a GET of it succeeds."""
    with suppress(requests.RequestException):
        return requests.get(url, timeout=5).ok
    return False


def prompt(name: str, row: int) -> str:
    """The text of one row; no two are alike."""
    return f"Job {name} asks question {row}: what comes after {row * 7919 % 104729}?"


def wait_until(
    condition: Callable[[], object], what: str, wait_s: float = WAIT_S, poll_s: float = 0.01
) -> None:
    """Wait for something that gives no notice. Raises TimeoutError after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {wait_s:g} s in vain for {what}")
        time.sleep(poll_s)


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder that is gone at the end. SIGTERM is as Ctrl-C: what a benchmark started is ended. A
    BatchrunError ends the program with one line and its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix=f"batchrun-{name}-"))
    try:
        yield folder
    except BatchrunError as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(error.exit_code) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Deployment:
    """A folder with batchrun.yaml and a home, on free ports. Nothing runs before it is started."""

    def __init__(self, folder: Path, *, home: Path | None = None) -> None:
        self.folder = folder
        self.home = Home(home or folder / "home")
        self.client = DaemonClient(self.home)
        self.port, self.engine_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.executions_path = folder / "executions.jsonl"
        self.request = f"max_tokens: {MAX_TOKENS}, temperature: 0"
        self.failpoints = ""
        self.user: tuple[str, ...] = ()
        self.agents: dict[str, int] = {}

    def configure(self, engine: Mapping[str, object], **more: object) -> None:
        """Write batchrun.yaml with one engine; `more` are its other keys."""
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"listen": f"127.0.0.1:{self.port}", "engines": [engine], **more}
        (self.folder / "batchrun.yaml").write_text(json.dumps(document))

    def use_fake_engine(
        self, latency_s: float, *, rules: Sequence[object] = (), **more: object
    ) -> None:
        """As `configure`, for a managed fake engine that notes every execution."""
        script = self.folder / "script.json"
        command = [sys.executable, "-m", "batchrun.engine.fake", f"--port={self.engine_port}"]
        command += [f"--latency-s={latency_s}", f"--script={script}"]
        command += [f"--executions={self.executions_path}"]
        self.configure({"command": command, "port": self.engine_port}, **more)
        script.write_text(json.dumps(list(rules)))

    @contextmanager
    def counted_vllm(self, *vllm_args: str, **more: object) -> Iterator[None]:
        """As `configure`, for the real vLLM with the tiny model. Calls and rows go through a proxy
        that notes every execution, as the fake engine does, and lives as long as the context."""
        port = free_port()
        engine = {"port": self.engine_port, "vllm_args": list(vllm_args)}
        engine["url"] = f"http://127.0.0.1:{port}"
        self.configure(engine, model=TINY, **more)
        target = f"--target=http://127.0.0.1:{self.engine_port}"
        command = [sys.executable, str(PROXY), f"--port={port}", target]
        proxy = subprocess.Popen([*command, f"--executions={self.executions_path}"])
        try:
            yield
        finally:
            proxy.terminate()
            proxy.wait()

    def use_vllm_engines(self, num_engines: int, *vllm_args: str, **more: object) -> None:
        """As `configure`, for so many real vLLMs with the tiny model, each bound to one core."""
        cores = sorted(os.sched_getaffinity(0))
        engines: list[dict[str, object]] = []
        for number in range(num_engines):
            env = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])}
            engine = {"name": str(number), "port": free_port(), "vllm_args": list(vllm_args)}
            engines.append({**engine, "env": env})
        self.configure(engines[0], model=TINY, engines=engines, **more)

    def engine_metrics(self) -> dict[str, str]:
        """The page of metrics of each engine that answers, by its name."""
        pages: dict[str, str] = {}
        for each in json.loads(self.home.upstreams.read_text())["engines"]:
            headers = {"Authorization": f"Bearer {each['api_key']}"}
            with suppress(requests.RequestException):
                reply = requests.get(f"{each['url']}/metrics", headers=headers, timeout=60)
                pages |= {each["name"]: reply.text} if reply.ok else {}
        return pages

    def use_agents(
        self, num_agents: int, latency_s: float, *, rules: Sequence[object] = (), **more: object
    ) -> None:
        """As `use_fake_engine`, for so many engines with agents, which `start_agent` starts."""
        self.use_fake_engine(latency_s, rules=rules)
        config = self.folder / "batchrun.yaml"
        (engine,) = json.loads(config.read_text())["engines"]
        engines, self.agents = [], {}
        for name in map(str, range(num_agents)):
            port, self.agents[name] = free_port(), free_port()
            command = [*engine["command"], f"--port={port}"]
            engines.append({"name": name, "command": command, "port": port})
        (self.folder / "agents.yaml").write_text(json.dumps({"engines": engines}))
        urls = {name: f"https://127.0.0.1:{port}" for name, port in self.agents.items()}
        document = {"listen": f"127.0.0.1:{self.port}", **more}
        document["engines"] = [{"name": name, "agent": url} for name, url in urls.items()]
        config.write_text(json.dumps(document))

    def start_agent(self, name: str = "0") -> None:
        """Start an agent, with its engine, in the background."""
        where = f"--listen=127.0.0.1:{self.agents[name]}"
        self.batchrun("engine", "serve", "-d", f"--name={name}", where, "--config=agents.yaml")

    def write_job(
        self,
        name: str,
        num_rows: int,
        more: str = "",
        suffix: str = "parquet",
        text: Callable[[str, int], str] = prompt,
        group_rows: int = ROW_GROUP_ROWS,
    ) -> Path:
        """An input of so many prompts, and the job file for it; the output is NAME.out.SUFFIX."""
        schema = pa.schema({"id": pa.string(), "text": pa.string()})
        with pq.ParquetWriter(self.folder / f"{name}.in.parquet", schema) as file:
            for start in range(0, num_rows, group_rows):
                rows = range(start, min(start + group_rows, num_rows))
                columns = {"id": [f"{name}-{row}" for row in rows]}
                columns["text"] = [text(name, row) for row in rows]
                file.write_table(pa.table(columns, schema=schema))
        job = self.folder / f"{name}.yaml"
        job.write_text(
            f"name: {name}\n"
            f"input: {{path: {name}.in.parquet, id: id, "
            'messages: [{role: user, content: "{{ text }}"}]}\n'
            f"request: {{{self.request}}}\n"
            f"output: {{path: {name}.out.{suffix}, keep: [text]}}\n{more}"
        )
        return job

    def submit(self, job: Path) -> str:
        """Hand a job to the daemon as `batchrun submit` does; its id."""
        new = prepare_job(load_job_file(job, cwd=self.folder), links=self.home.inputs)
        return str(self.client.post("/jobs", asdict(new))["id"])

    def call(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command in the folder."""
        return subprocess.run(
            [*self.user, sys.executable, "-m", "batchrun", *arguments],
            cwd=self.folder,
            env=self._env() | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_WAIT_S,
        )

    def batchrun(self, *arguments: str) -> dict[str, Any]:
        """The command's answer. Raises BatchrunError with its errors when it fails."""
        done = self.call(*arguments, "--json")
        if done.returncode:
            raise BatchrunError(f"batchrun {' '.join(arguments)}: {done.stderr.strip()}")
        document: dict[str, Any] = json.loads(done.stdout or "{}")
        return document

    def popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command in the folder without waiting; what it says goes to `commands.log`."""
        command = [sys.executable, "-m", "batchrun", *arguments]
        with (self.folder / "commands.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=self._env(), stdout=log, stderr=log
            )

    @contextmanager
    def running(self) -> Iterator[str]:
        """`start`, and `close` at the end; the gateway's URL."""
        gateway = str(self.start()["gateway"])
        try:
            yield gateway
        finally:
            self.close()

    def start(self) -> dict[str, Any]:
        """`batchrun up -d`: returns when an engine is ready."""
        return self.batchrun("up", "-d")

    def close(self) -> None:
        """`batchrun down`, whatever runs."""
        self.failpoints = ""
        self.batchrun("down")

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as `batchrun status` shows it."""
        return self.client.get(f"/jobs/{job_id}")

    def pid_of(self, part: str) -> int:
        """The process of `daemon`, `gateway`, `worker` (one of the gateway's), `engine`, `agent` or
        `guard`; or 0."""
        engine_home = self.home.agent("0") if self.agents else self.home
        records = {"daemon": self.home.daemon_record, "agent": self.home.agent_process("0")}
        records["engine"] = engine_home.run / "engine-0.json"
        with suppress(OSError, ValueError, psutil.NoSuchProcess, IndexError, StopIteration):
            if part == "worker":
                return psutil.Process(self.pid_of("gateway")).children()[0].pid
            if part == "guard":
                children = psutil.Process(self.pid_of("agent")).children()
                return next(each.pid for each in children if GUARD in each.cmdline())
            record = records.get(part, self.home.gateway_process)
            return int(json.loads(record.read_text())["pid"])
        return 0

    def kill(self, part: str, number: int = signal.SIGKILL) -> None:
        """Signal a part of the deployment once it runs, and see it gone."""
        wait_until(lambda: psutil.pid_exists(self.pid_of(part) or -1), f"the {part} to run")
        pid = self.pid_of(part)
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        wait_until(lambda: not self.lives(pid), f"the {part} to end")

    def lives(self, pid: int) -> bool:
        """Whether a process runs; a zombie does not, once all of its threads have ended: until
        then it keeps its files and locks."""
        try:
            is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            return not is_zombie or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
        except (psutil.NoSuchProcess, OSError):
            return False

    def book_bytes(self) -> dict[str, int]:
        """What the gateway's book of engines may take of memory, and takes. Raises OSError."""
        for link in Path(f"/proc/{self.pid_of('gateway')}/fd").iterdir():
            if "engine-book" in str(link.readlink()):
                status = link.stat()
                return {"map_bytes": status.st_size, "map_resident_bytes": status.st_blocks * 512}
        raise FileNotFoundError("the gateway has no book of engines open")

    def find_orphans(self) -> list[int]:
        """Processes that batchrun started for this home and that still run; engines know nothing of
        it, but were started in the folder."""
        found = []
        for process in psutil.process_iter(["environ", "cwd"]):
            environ = process.info["environ"] or {}
            is_of_home = environ.get("BATCHRUN_HOME") == str(self.home.path)
            is_ours = is_of_home or process.info["cwd"] == str(self.folder)
            if is_ours and NONCE_VARIABLE in environ and self.lives(process.pid):
                found.append(process.pid)
        return found

    def _env(self) -> dict[str, str]:
        env = {**os.environ, "BATCHRUN_HOME": str(self.home.path)}
        return env | {VARIABLE: self.failpoints} if self.failpoints else env


@contextmanager
def brought_down(deployment: Deployment) -> Iterator[Deployment]:
    """Ends what runs there at the end, whether it was started or not."""
    try:
        yield deployment
    finally:
        deployment.call("down")
