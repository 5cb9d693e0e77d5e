"""`batchrun engine restart --rolling` under calls and a job: nothing is refused or lost."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from deployment_rig import DeploymentRig
from kill_rig import Outage, begun_at, check_account, committed_at, wait_for_rows
from postgres_server import PostgresServer

from benchmarks.deployment import free_port

NUM_ROWS = 400
WINDOW = 8
"""Rows in an engine at a time, of a second each: the job outlasts the restarts."""
NAMES = ("a", "b")


class TwoEngines:
    """Two fake engines that write down what they begin, here or behind agents."""

    def __init__(self, rig: DeploymentRig, *, has_agents: bool) -> None:
        self.rig = rig
        self.ports = {name: free_port() for name in NAMES}
        self.agents = {name: free_port() for name in NAMES} if has_agents else {}
        self.describe(*self.latency(1.0))
        for name, port in self.agents.items():
            listen = f"127.0.0.1:{port}"
            rig.ask("engine", "serve", "-d", "--name", name, "--listen", listen,
                    "--config", "agents.yaml")  # fmt: skip

    def latency(self, seconds: float) -> tuple[str, ...]:
        return (f"--latency-s={seconds}",)

    def describe(self, *options: str, broken: str = "") -> None:
        """Write batchrun.yaml, and that of the agents; the engine `broken` cannot start."""
        engines = [
            {"name": name, "port": port, "command": self.command(port, options, name == broken)}
            for name, port in self.ports.items()
        ]
        behind = [
            {"name": name, "agent": f"https://127.0.0.1:{port}"}
            for name, port in self.agents.items()
        ]
        listen = f"127.0.0.1:{self.rig.port}"
        for file, listed in (("agents.yaml", engines), ("batchrun.yaml", behind or engines)):
            document = {"listen": listen, "engines": listed, "window": {"requests": WINDOW}}
            document |= {"store": self.rig.store_url} if self.rig.store_url else {}
            (self.rig.folder / file).write_text(json.dumps(document))

    def describe_for(self, other: DeploymentRig) -> None:
        """Write the batchrun.yaml of another machine that has the same agents and store."""
        secrets = {name: str(self.rig.home / "agents" / name / "secret") for name in NAMES}
        engines = [
            {"name": name, "agent": f"https://127.0.0.1:{port}", "secret_file": secrets[name]}
            for name, port in self.agents.items()
        ]
        listen, store = f"127.0.0.1:{other.port}", self.rig.store_url
        document = {"listen": listen, "engines": engines, "store": store}
        (other.folder / "batchrun.yaml").write_text(json.dumps(document))

    def command(self, port: int, options: tuple[str, ...], is_broken: bool) -> list[str]:  # noqa: FBT001
        if is_broken:
            return ["false"]
        executions = f"--executions={self.rig.executions_path}"
        module = [sys.executable, "-m", "batchrun.engine.fake"]
        return [*module, f"--port={port}", "--model=fake", executions, *options]

    def pid(self, name: str) -> int:
        """The process of an engine."""
        home = self.rig.home / "agents" / name if self.agents else self.rig.home
        return int(json.loads((home / "run" / f"engine-{name}.json").read_text())["pid"])

    def pids(self) -> list[int]:
        """The processes of both."""
        return [self.pid(name) for name in NAMES]


BEHIND_AGENTS = pytest.param(True, marks=pytest.mark.nightly)


@pytest.fixture(params=[False, BEHIND_AGENTS], ids=["here", "agents"])
def engines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoEngines]:
    rig = DeploymentRig(tmp_path)
    yield TwoEngines(rig, has_agents=request.param)
    rig.close()


@contextmanager
def calls(rig: DeploymentRig) -> Iterator[list[str]]:
    """Calls one after the other, four at a time, while the block runs; what they answered."""
    texts: list[str] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def call(number: int) -> None:
        with rig.openai(max_retries=0) as client:
            while not over.is_set():
                try:
                    made = client.completions.create(
                        model="fake", prompt=f"call {number}", max_tokens=4
                    )
                    texts.append(made.choices[0].text)
                except openai.OpenAIError as error:
                    errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield texts
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.nightly
def test_engines_restart_one_at_a_time_and_nothing_is_refused_or_lost(engines: TwoEngines) -> None:
    rig = engines.rig
    job = rig.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))
    wait_for_rows(rig, job, 50)
    before = engines.pids()
    engines.describe(*engines.latency(0.9))

    began_at, num_committed = time.time(), len(committed_at(rig, job))
    with calls(rig) as texts:
        told = rig.ask("engine", "restart", "--rolling")["told"]

    after = engines.pids()
    assert [line.partition(":")[0] for line in told] == ["engine a"] * 3 + ["engine b"] * 3
    assert [line for line in told if "broken off" in line] == []
    assert texts
    assert set(before).isdisjoint(after)
    check_account(rig, job, [Outage(began_at, time.time(), num_committed)])
    assert max(map(len, begun_at(rig, job).values())) == 2, "no row was taken back"


@pytest.mark.nightly
def test_calls_that_come_through_another_machine_go_to_the_other_engine_too(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    first, second = (DeploymentRig(tmp_path / name) for name in ("first", "second"))
    for rig in (first, second):
        rig.folder.mkdir()
    first.store_url = postgres.new_database()
    engines = TwoEngines(first, has_agents=True)
    engines.describe_for(second)
    try:
        roles = [rig.ask("up", "-d")["leadership"]["role"] for rig in (first, second)]
        with calls(second) as texts:
            told = first.ask("engine", "restart", "--rolling")["told"]
    finally:
        second.close()
        first.close()

    assert roles == ["leader", "standby"]
    assert [line for line in told if "broken off" in line] == []
    assert len(told) == 6 and texts


def test_it_stops_at_the_first_that_does_not_come_back(engines: TwoEngines) -> None:
    rig = engines.rig
    rig.ask("up", "-d")
    before = engines.pid("b")
    engines.describe(broken="a")

    with calls(rig):
        done = rig.call("engine", "restart", "--rolling")

    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "engine a does not come back" in last) == (4, True)
    assert engines.pid("b") == before
    rig.write_rows(["a"])
    rig.write_job()
    assert rig.wait_until_ended(str(rig.ask("submit", "job.yaml")["id"]))["state"] == "completed"


def test_an_engine_that_alone_has_its_model_is_not_taken_away(tmp_path: Path) -> None:
    rig = DeploymentRig(tmp_path)
    rig.use_fake_engine()
    try:
        rig.ask("up", "-d")
        before = rig.pid_of("engine")
        done = rig.call("engine", "restart", "--rolling")
        assert (done.returncode, rig.pid_of("engine")) == (4, before)
        assert "runs on: no other engine has fake" in done.stdout
        assert "alone has a model: 0;" in done.stderr
    finally:
        rig.close()
