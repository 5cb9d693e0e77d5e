"""Two real vLLMs with agents, each of whose processes is killed beside a job and calls. Part of
`python -m benchmarks.crash`.

Engine "0" is started by its agent. Engine "1" is somebody else's, who starts it again: this module.
Each notes what reaches it, so that it is known where a row ran and where a call was. A call may
fail that was in flight in what was killed, or that came while no gateway was there; else none.
"""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import requests

from batchrun.engine.command import SCHEDULER_CLASS, ManagedSettings, prepare_command
from batchrun.engine.process import read_record
from batchrun.engine.tiny_model import build_tiny_model
from batchrun.types import JobState
from benchmarks.crash_account import (
    ROW,
    Kill,
    check_executions,
    check_home,
    count_explained,
    measure_reach,
    read_commits,
    read_executions,
)
from benchmarks.crash_rig import END_WAIT_S, POLL_S, SHORT_ROWS, Episode, StatusWatcher
from benchmarks.deployment import TINY, Deployment, answers, free_port, wait_until
from benchmarks.noted_calls import FILE_VARIABLE
from benchmarks.records import Bar, Record

OWN, ATTACHED = ENGINES = ("0", "1")
ENDED_ENGINES = {f"{part} {name}": name for part in ("agent", "vllm", "core") for name in ENGINES}
"""Whose rows a kill cuts. The agent of "1" ends no engine, but its rows there."""
FLEET_TARGETS = (*ENDED_ENGINES, "daemon", "gateway")
FLEET_KILLS = 60
KV_BYTES, MAX_ROWS_AT_ONCE = 1 << 28, 16
VLLM_ARGS = (
    f"--kv-cache-memory-bytes={KV_BYTES}",
    "--max-model-len=4096",
    f"--max-num-seqs={MAX_ROWS_AT_ONCE}",
    "--middleware=benchmarks.noted_calls.NotedCalls",
)
WINDOW_ROWS = 8
REQUEST = "max_tokens: 192, temperature: 0, ignore_eos: true"
ROW_S = 1.2
"""A row takes longer than this."""
LONG_ROWS = 400
ROWS_BETWEEN = 12
"""So many results are committed before the next kill."""
PAUSE_S = 1.0
CALLS_PER_S, CALLS_AT_ONCE, CALL_TOKENS, CALL_WAIT_S = 2.0, 32, 16, 120.0
SYSTEM = {"role": "system", "content": "You answer questions about numbers. " * 40}
BOOT_ID = "/proc/sys/kernel/random/boot_id"
APART = ("unshare", "--mount", "sh", "-c", f'mount --bind "$0" {BOOT_ID} && exec "$@"')
"""Runs a command that takes itself for one on another machine, for root."""


class FleetDeployment(Deployment):
    """The two engines, each bound to one core. Where they are `apart`, their agents believe that
    they are on another machine: calls go through them, and not straight to the engines."""

    def __init__(self, folder: Path, *, is_apart: bool) -> None:
        super().__init__(folder)
        self.request = REQUEST
        self.is_apart = is_apart
        self.agents = {name: free_port() for name in ENGINES}
        self.noted = {name: folder / f"noted-{name}.jsonl" for name in ENGINES}
        self._ports = {name: free_port() for name in ENGINES}
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in self._ports.items()}
        self._attached: subprocess.Popen[bytes] | None = None

    def use_fleet(self) -> None:
        """Write what daemon and agents read, and build the model of the attached engine."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {"name": OWN, "port": self._ports[OWN], "vllm_args": VLLM_ARGS}
        own["env"] = self._engine_env(OWN)
        (self.folder / "agents.yaml").write_text(json.dumps({"model": TINY, "engines": [own]}))
        (self.folder / "boot-id").write_text("00000000-0000-0000-0000-000000000000\n")
        build_tiny_model(self.folder / TINY)
        engines = [
            {"name": name, "agent": f"https://127.0.0.1:{port}"}
            for name, port in self.agents.items()
        ]
        self.configure({}, model=TINY, engines=engines, window={"requests": WINDOW_ROWS})

    def start_agent(self, name: str = OWN) -> None:
        """As of every deployment; that of the attached engine stands beside it."""
        attach = ("--attach", self.urls[name]) if name == ATTACHED else ()
        where = ("--listen", f"127.0.0.1:{self.agents[name]}", "--config", "agents.yaml")
        self.user = (*APART, str(self.folder / "boot-id")) if self.is_apart else ()
        self.batchrun("engine", "serve", "-d", "--name", name, *where, *attach)
        self.user = ()

    def start_vllm(self) -> None:
        """Start the attached engine, as its owner does; nothing is left of the one before."""
        self.end_vllm()
        told = shlex.split(self.call("engine", "environment", f"--name={ATTACHED}").stdout)
        variables = dict(word.split("=", 1) for word in told if word != "export")
        settings = ManagedSettings(
            name=ATTACHED,
            model=str(self.folder / TINY),
            served_model_name=TINY,
            port=self._ports[ATTACHED],
            run_dir=self.folder,
            log_dir=self.folder,
            vllm_args=(*VLLM_ARGS, f"--scheduler-cls={SCHEDULER_CLASS}"),
            env=variables | self._engine_env(ATTACHED),
        )
        command = prepare_command(settings)
        with settings.log_path.open("ab") as log:
            self._attached = subprocess.Popen(
                command.argv, env=command.env, stdout=log, stderr=log, start_new_session=True
            )

    def end_vllm(self) -> None:
        """End the attached engine, with what its processes left behind."""
        if self._attached is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._attached.pid, signal.SIGKILL)
            self._attached.wait()

    def close(self) -> None:
        """`batchrun down`; the attached engine is ended by its owner."""
        try:
            super().close()
        finally:
            self.end_vllm()

    def pid_of(self, part: str) -> int:
        """Also of `agent`, `vllm` (the API server) and `core`, each with the engine's name."""
        kind, _, name = part.partition(" ")
        if kind == "core":
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.pid_of(f"vllm {name}") or -1).children():
                    if any("EngineCore" in word for word in child.cmdline()):
                        return child.pid
            return 0
        if part == f"vllm {ATTACHED}":
            return 0 if self._attached is None else self._attached.pid
        paths = {
            "agent": self.home.agent_process(name),
            "vllm": self.home.agent(name).run / f"engine-{name}.json",
        }
        if kind not in paths:
            return super().pid_of(part)
        record = read_record(paths[kind])
        return 0 if record is None else record.pid

    def _engine_env(self, name: str) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[ENGINES.index(name) % len(cores)])
        return {"VLLM_CPU_OMP_THREADS_BIND": core, FILE_VARIABLE: str(self.noted[name])}

    def _env(self) -> dict[str, str]:
        """With the way to `NotedCalls`, for the engines that agents start."""
        paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
        return super()._env() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass(slots=True)
class ChatCall:
    """A call of a caller's, by UTC epoch seconds; `error` says what was wrong with its answer."""

    request_id: str
    began_at: float
    ended_at: float = math.inf
    error: str = "it never ended"


class Chat:
    """Callers who chat all the time, in threads. Half are streamed, a third share a prompt."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.calls: list[ChatCall] = []
        self._url = f"{url}/v1/chat/completions"
        self._rng = rng
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make no more calls; returns when the last has ended."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            while not self._is_over.wait(self._rng.expovariate(CALLS_PER_S)):
                is_stream = self._rng.random() < 0.5
                pool.submit(self._call, len(self.calls), is_stream=is_stream)

    def _call(self, number: int, *, is_stream: bool) -> None:
        text = f"Call {number}: what comes after {number * 7919 % 104729}?"
        messages = [*([SYSTEM] if number % 3 == 0 else []), {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": TINY, "stream": is_stream, "messages": messages}
        body |= {"max_tokens": CALL_TOKENS, "ignore_eos": True}
        call = ChatCall(f"call-{number}", time.time())
        self.calls.append(call)
        headers = {"X-Request-Id": call.request_id}
        try:
            reply = requests.post(self._url, json=body, headers=headers, timeout=CALL_WAIT_S)
            is_whole = '"finish_reason":"length"' in reply.text
            is_ended = not is_stream or reply.text.endswith("data: [DONE]\n\n")
            is_well = reply.ok and is_whole and is_ended
            call.error = "" if is_well else f"HTTP {reply.status_code} {reply.text[-200:]!r}"
        except requests.RequestException as error:
            call.error = f"{type(error).__name__}: {error}"
        call.ended_at = time.time()


class FleetEpisode(Episode):
    """Kills of `targets`, one after the other; ends early when a promise is broken.

    After `run` also: its kills, what ran where and was committed, and what became of calls.
    """

    has_known_answers = False

    def __init__(
        self, folder: Path, rng: random.Random, targets: Sequence[str], *, is_apart: bool
    ) -> None:
        super().__init__(folder, rng)
        self.fleet = self.deployment = FleetDeployment(folder, is_apart=is_apart)
        self.kills: list[Kill] = []
        self.executions = self.commits = pl.DataFrame()
        self.failed: list[tuple[ChatCall, bool]] = []
        self.num_left = 0
        self._targets = targets
        self._chat: Chat | None = None

    @property
    def figures(self) -> Record:
        """What the record of the deployment has besides."""
        cuts = [kill for kill in self.kills if kill.target in ENDED_ENGINES]
        return {
            "is_apart": self.fleet.is_apart,
            "num_planned": len(self._targets),
            "num_explained": count_explained(cuts),
            "num_calls": 0 if self._chat is None else len(self._chat.calls),
            "num_calls_failed": len(self.failed),
            "num_calls_unexplained": sum(not is_explained for _, is_explained in self.failed),
            "num_left": self.num_left,
        }

    def run(self) -> None:
        """As every episode; and what ran must be what the kills explain, at its engine."""
        super().run()
        self.num_left = len(self.fleet.find_orphans())
        runs = [
            read_executions(path).with_columns(engine=pl.lit(name))
            for name, path in self.fleet.noted.items()
        ]
        self.executions, self.commits = pl.concat(runs), read_commits(self.fleet)
        for name in (*ENGINES, None):
            kills = [kill for kill in self.kills if ENDED_ENGINES.get(kill.target) == name]
            its = self.executions if name is None else self.executions.filter(engine=name)
            measure_reach(kills, its, self.commits, ROW_S)
        self.problems += check_executions(None, self.executions, self.commits)
        self.problems += check_runs(self.kills, self.executions, self.commits)
        self._judge_calls()

    def _start(self, exits: ExitStack) -> None:
        self.fleet.use_fleet()
        self.fleet.start_vllm()
        for name in ENGINES:
            self.fleet.start_agent(name)
        self.fleet.start()
        wait_until(self._are_ready, "both engines", END_WAIT_S, POLL_S)
        self._chat = Chat(self.fleet.url, self._rng)
        exits.callback(self._chat.stop)

    def _work(self, watcher: StatusWatcher) -> None:
        for name in self._targets:
            self._wait_for_rows()
            kill = Kill(name)
            self.kills.append(kill)
            self._kill(kill)
            self._bring_back(name)
            kill.down_s = time.time() - kill.at
            self.problems += check_home(self.fleet)
            print(f"{self.fleet.folder.name}: {name} {kill.down_s:.1f} s", flush=True)
            if self.problems or watcher.problems:
                break

    def _are_ready(self) -> bool:
        """Both answer, and the daemon knows it."""
        engines = self.fleet.client.get("/status")["engines"]
        are_known = all(engine["state"] == "ready" for engine in engines)
        return are_known and all(answers(f"{url}/health") for url in self.fleet.urls.values())

    def _wait_for_rows(self) -> None:
        """There are always two long jobs and a short one, with rows on both engines."""
        num_rows = len(read_commits(self.fleet)) + ROWS_BETWEEN

        def are_running() -> bool:
            live = [job.num_rows for job in self._live()]
            if live.count(LONG_ROWS) < 2:
                self.fleet.submit(self._write(LONG_ROWS))
            if SHORT_ROWS not in live:
                self.fleet.submit(self._write(SHORT_ROWS))
            engines = self.fleet.client.get("/status")["engines"]
            are_busy = all(engine["in_flight"] for engine in engines)
            return are_busy and len(read_commits(self.fleet)) >= num_rows

        wait_until(are_running, "rows to run again: the jobs are stuck", END_WAIT_S, POLL_S)
        time.sleep(self._rng.uniform(0, PAUSE_S))

    def _kill(self, kill: Kill) -> None:
        """The kill lasts until what it ends has ended: with its core or agent also the engine."""
        api_server = self.fleet.pid_of(f"vllm {ENDED_ENGINES.get(kill.target)}")
        kill.at = time.time()
        self.fleet.kill(kill.target)
        if kill.target in ENDED_ENGINES and kill.target != f"agent {ATTACHED}":
            wait_until(lambda: not self.fleet.lives(api_server), "the engine to end")
        kill.ended_at = time.time()

    def _bring_back(self, target: str) -> None:
        """What nobody else brings back; returns when all is ready again."""
        kind, _, name = target.partition(" ")
        if kind == "agent":
            self.fleet.start_agent(name)
        elif kind == "daemon":
            self.fleet.start()
        elif name == ATTACHED:
            self.fleet.start_vllm()
        wait_until(lambda: answers(f"{self.fleet.url}/v1/models"), "the gateway to answer again")
        wait_until(self._are_ready, "both engines to be ready again", END_WAIT_S, POLL_S)

    def _finish(self) -> None:
        assert self._chat is not None
        self._chat.stop()
        super()._finish()
        states = [(job.name, job.state) for job in self.jobs]
        self.problems += [f"{name}: {s}" for name, s in states if s != JobState.COMPLETED]

    def _judge_calls(self) -> None:
        """Each call that failed, and whether a kill explains that."""
        reached = {name: set(_request_ids(path)) for name, path in self.fleet.noted.items()}
        for call in [] if self._chat is None else self._chat.calls:
            if call.error:
                engines = {name for name, ids in reached.items() if call.request_id in ids}
                is_explained = any(self._explains(kill, call, engines) for kill in self.kills)
                self.failed.append((call, is_explained))
                if not is_explained:
                    self.problems.append(f"{call} failed, which was at {engines or 'no engine'}")

    def _explains(self, kill: Kill, call: ChatCall, engines: set[str]) -> bool:
        if kill.target == "gateway":
            return call.began_at <= kill.at + kill.down_s and kill.at <= call.ended_at
        has_passed = self.fleet.is_apart or kill.target != f"agent {ATTACHED}"
        is_its = has_passed and ENDED_ENGINES.get(kill.target) in engines
        return is_its and call.began_at <= kill.at <= call.ended_at


def check_runs(
    kills: Sequence[Kill], executions: pl.DataFrame, commits: pl.DataFrame
) -> Iterator[str]:
    """Rows that ran again although no kill had cut their run at its engine."""
    runs = (
        executions.sort("at").group_by(ROW).agg("at", "engine").filter(pl.col("at").list.len() > 1)
    )
    for job, row, instants, engines, committed_at in runs.join(commits, on=ROW).iter_rows():
        for at, engine, again_at in zip(instants, engines, instants[1:], strict=False):
            is_cut = any(
                ENDED_ENGINES.get(kill.target) == engine
                and at <= kill.ended_at
                and kill.at <= min(again_at, committed_at)
                for kill in kills
            )
            if not is_cut:
                after_s = again_at - at
                yield f"{job}, row {row}: ran at engine {engine} and {after_s:.1f} s later again"


def fleet_bars(fleets: Sequence[Record]) -> Iterator[Bar]:
    """What the kills in fleets must keep besides."""

    def total(name: str) -> int:
        return int(sum(fleet[name] for fleet in fleets))

    yield Bar("kills in a fleet of real engines", total("num_kills"), total("num_planned"))
    yield Bar("online calls meanwhile", total("num_calls"))
    yield Bar("of them failed", total("num_calls_failed"))
    yield Bar(
        "of them failed, and no kill explains it", total("num_calls_unexplained"), 0, is_most=True
    )
    yield Bar("processes left after `down`", total("num_left"), 0, is_most=True)


def _request_ids(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines() if path.exists() else ():
        yield json.loads(line)["request_id"]
