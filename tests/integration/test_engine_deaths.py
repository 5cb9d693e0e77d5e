"""A row that kills engines ends alone, and online calls are kept away from where it is tried."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import pytest
from deployment_rig import DeploymentRig

from benchmarks.deployment import free_port

GUILTY = 30
NUM_ROWS = 60
RULES = [
    {"match": {"substring": "poison"}, "action": {"die": True}},
    {"match": {}, "action": {"delay_s": 0.05}},
]

pytestmark = pytest.mark.slow


@dataclass
class Caller:
    """Online calls through the gateway, one after the other, with the instants of those that
    failed (Unix time)."""

    port: int
    num_answered: int = 0
    failed_at: list[float] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Call until it is over."""
        body = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        headers = {"Content-Type": "application/json", "X-Request-Id": "online"}
        while not self.is_over.is_set():
            began_at = time.time()
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    self.num_answered += response.status == 200
            except urllib.error.URLError:
                self.failed_at.append(began_at)


def use_fake_engines(rig: DeploymentRig, num_engines: int) -> None:
    """batchrun.yaml for engines that one row kills; all write down what they begin."""
    script = rig.folder / "script.json"
    script.write_text(json.dumps(RULES))
    engines = []
    for number in range(num_engines):
        port = free_port()
        command = [
            *(sys.executable, "-m", "batchrun.engine.fake"),
            *(f"--port={port}", "--model=fake", f"--script={script}"),
            f"--executions={rig.folder / f'executions-{number}.jsonl'}",
        ]
        engines.append({"name": f"engine-{number}", "command": command, "port": port})
    document = {"listen": f"127.0.0.1:{rig.port}", "engines": engines}
    (rig.folder / "batchrun.yaml").write_text(json.dumps(document))


def executions(rig: DeploymentRig, number: int) -> list[tuple[float, str]]:
    """(Unix time, request id) of what an engine began."""
    path = rig.folder / f"executions-{number}.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [(entry["at"], entry["request_id"]) for entry in entries]


def run_job(rig: DeploymentRig) -> str:
    """A job with one row that kills engines, seen to its end: that row alone fails."""
    texts = [f"poison {i}" if i == GUILTY else f"question {i}" for i in range(NUM_ROWS)]
    job = rig.submit_rows(*texts)
    view = rig.wait_until_ended(job, wait_s=180)
    counts = (view["num_completed"], view["num_failed"])
    assert (view["state"], *counts) == ("completed", NUM_ROWS - 1, 1)
    failed = [row for row in rig.output() if row["error"]]
    assert [row["id"] for row in failed] == [f"row-{GUILTY}"]
    assert "engine_died" in failed[0]["error"]
    return job


@pytest.mark.nightly
def test_on_one_engine_the_guilty_row_alone_fails(rig: DeploymentRig) -> None:
    use_fake_engines(rig, 1)
    job = run_job(rig)
    tries = [name for _, name in executions(rig, 0) if f"{job}-{GUILTY}-" in name]
    assert 3 <= len(tries) <= 5


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_with_two_engines_online_calls_suffer_from_the_first_death_alone(
    rig: DeploymentRig,
) -> None:
    use_fake_engines(rig, 2)
    rig.ask("up", "-d")
    caller = Caller(rig.port)
    thread = threading.Thread(target=caller.run)
    thread.start()
    try:
        job = run_job(rig)
    finally:
        caller.is_over.set()
        thread.join()

    begun = [executions(rig, number) for number in (0, 1)]
    deaths = sorted(
        (at, number)
        for number in (0, 1)
        for at, name in begun[number]
        if f"{job}-{GUILTY}-" in name
    )
    assert len(deaths) >= 3
    (apart,) = {number for _, number in deaths[1:]}
    first_trial_at, last_trial_at = deaths[1][0], deaths[-1][0]
    assert caller.num_answered > 100
    assert [at for at in caller.failed_at if at >= first_trial_at] == []
    beside = [
        at
        for at, name in begun[apart]
        if first_trial_at <= at <= last_trial_at and name == "online"
    ]
    assert beside == []
