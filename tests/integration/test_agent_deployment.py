"""Deployments whose engine has an agent: kills of any of their processes, and systemd."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from deployment_rig import JOB_FILE, DeploymentRig
from kill_rig import (
    answers,
    begun_at,
    check_account,
    kill,
    wait_for_rows,
    wait_until,
    wait_until_running,
)

from batchrun.daemon.plugin import channel_path
from batchrun.engine.process import find_family, read_record
from batchrun.home import Home

ROOT = Path(__file__).parents[2]
PARTS = ("daemon", "gateway", "engine", "agent")
NUM_ROWS = 600
UNIT = ROOT / "deploy" / "systemd" / "batchrun-engine@.service"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DeploymentRig]:
    made = DeploymentRig(tmp_path)
    yield made
    made.close()


def start(rig: DeploymentRig, num_rows: int = NUM_ROWS) -> str:
    """Bring a deployment with an agent up and submit a job of so many rows."""
    rig.use_agent("--latency-s=0.5")
    return rig.submit_rows(*(f"question {i}" for i in range(num_rows)))


def processes_of(rig: DeploymentRig) -> list[psutil.Process]:
    """What runs for the deployment."""
    folder = str(rig.folder)
    return [each for each in psutil.process_iter() if _names(each, folder)]


def _names(process: psutil.Process, folder: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and folder in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_no_row_runs_again_when_the_daemon_is_killed(rig: DeploymentRig) -> None:
    job_id = start(rig)
    wait_for_rows(rig, job_id, 100)

    outage = kill(rig, job_id, "daemon")

    check_account(rig, job_id, [outage])
    assert {len(instants) for instants in begun_at(rig, job_id).values()} == {1}


def test_answers_that_an_agent_kept_are_checked_like_others(rig: DeploymentRig) -> None:
    rig.use_agent("--latency-s=4")
    wants_json = "response_format: {type: json_object}, max_tokens: 8,"
    job = rig.submit_rows(
        *(f"question {i}" for i in range(4)), job=JOB_FILE.replace("max_tokens: 8,", wants_json)
    )
    rig.wait_for_executions(4)
    rig.kill("daemon")
    rig.ask("up", "-d")

    view = rig.wait_until_ended(job)

    assert (view["num_completed"], view["num_failed"]) == (0, 4)
    assert len(rig.executions()) == 4


def test_status_shows_the_agent_and_down_ends_all_of_it(rig: DeploymentRig) -> None:
    start(rig, 10)
    (engine,) = rig.ask("status")["engines"]
    assert (engine["state"], engine["stage"]) == (
        "ready",
        f"ready, by its agent at 127.0.0.1:{rig.agent_port}",
    )
    assert answers(rig)

    rig.kill("agent")
    while (engine := rig.ask("status")["engines"][0])["state"] == "ready":
        time.sleep(0.1)
    assert engine["stage"].startswith("the agent does not answer: ")
    rig.start_agent()

    stopped = rig.ask("down")["stopped"]
    assert stopped == ["daemon", "gateway", "agent of engine 0"]
    assert processes_of(rig) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "num_kills"),
    [
        pytest.param(seed, num_kills, marks=pytest.mark.nightly)
        for seed, num_kills in ((0, 4), (1, 20), (2, 20), (3, 20))
    ],
)
def test_nothing_is_lost_whatever_is_killed(rig: DeploymentRig, seed: int, num_kills: int) -> None:
    rng = random.Random(seed)
    job_id = start(rig, 200 * num_kills)
    order = list(PARTS) + rng.choices(PARTS, k=num_kills - len(PARTS))
    rng.shuffle(order)
    outages = []
    for number, part in enumerate(order, start=1):
        wait_for_rows(rig, job_id, 150 * number)
        wait_until_running(rig, part)
        outages.append(kill(rig, job_id, part))

    check_account(rig, job_id, outages)
    rig.ask("down")
    assert processes_of(rig) == []


def test_an_agent_that_is_terminated_breaks_off_no_call(rig: DeploymentRig) -> None:
    rig.use_agent("--latency-s=6")
    rig.ask("down")
    rig.start_agent("--drain-s", "300")
    rig.ask("up", "-d")
    agent = rig.pid_of("agent")
    with ThreadPoolExecutor() as threads, rig.openai() as client:
        call = threads.submit(client.completions.create, model="fake", prompt="x", max_tokens=4)
        rig.wait_for_executions(1)
        os.kill(agent, signal.SIGTERM)
        assert call.result().choices[0].text
    wait_until(lambda: not psutil.pid_exists(agent))


def test_down_waits_for_no_agent_to_drain_and_leaves_nothing(rig: DeploymentRig) -> None:
    rig.use_agent("--latency-s=600")
    rig.ask("down")
    rig.start_agent("--drain-s", "300")
    rig.submit_rows("question")
    rig.wait_for_executions(1)
    os.kill(rig.pid_of("agent"), signal.SIGTERM)
    rig.ask("down")
    assert processes_of(rig) == []


def test_an_agent_for_all_to_reach_wants_a_secret_of_its_own(rig: DeploymentRig) -> None:
    code, line = rig.refuse("engine", "serve", "--listen", "0.0.0.0:1")
    assert (code, "give --secret-file" in line) == (2, True)
    (rig.folder / "weak").write_text("weak")
    (rig.folder / "weak").chmod(0o600)
    code, line = rig.refuse("engine", "serve", "--secret-file", "weak")
    assert (code, "32 to 4096 characters" in line) == (2, True)


def test_an_agent_whose_engine_cannot_start_says_why(rig: DeploymentRig) -> None:
    rig.configure({"command": ["false"], "port": rig.engine_port})
    listen = f"127.0.0.1:{rig.port}"
    done = rig.call("engine", "serve", "--listen", listen)
    assert done.returncode == 4
    assert "batchrun: engine 0 ended while starting the process" in done.stderr.splitlines()[-1]


def test_a_key_that_would_not_be_shown_is_refused(rig: DeploymentRig) -> None:
    code, line = rig.refuse("engine", "serve", "--attach", "http://127.0.0.1:1", "--key", "a")
    assert (code, line) == (2, "batchrun: --key is that of --certificate: give both\n")


def test_a_vllm_of_ones_own_gets_what_it_needs(rig: DeploymentRig) -> None:
    lines = rig.call("engine", "environment", "--name", "b").stdout.splitlines()
    names = [line.removeprefix("export ").partition("=")[0] for line in lines]
    assert names == ["BATCHRUN_HINT_NONCE", "BATCHRUN_CHANNEL", "PYTHONPATH"]
    assert (rig.home / "agents" / "b" / "secret").exists()
    again = rig.call("engine", "environment", "--name", "b").stdout.splitlines()
    assert again == lines

    odd = rig.folder / 'it\'s "$(false)"'
    said = rig.call("engine", "environment", "--name", "b", "--home", str(odd)).stdout
    argv = ["sh", "-c", 'eval "$1" && printf %s "$BATCHRUN_CHANNEL"', "sh", said]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert shown.stdout == str(channel_path(Home(odd).agent("b"), "b"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "batchrun-engine@gpu7.service"
    shutil.copy(UNIT, unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.dumps(done.stderr)) == (0, json.dumps(""))


STANDS_STILL = """
import asyncio, os, sys, time
from pathlib import Path
from batchrun.engine.agent.guard import Guard
from batchrun.engine.process import spawn

async def main():
    guard, record_path = Guard(Path(sys.argv[1]), hung_s=3.0), Path(sys.argv[1])
    await guard.start()
    watching = asyncio.create_task(guard.watch())
    spawn(["sleep", "600"], env=dict(os.environ), log_path=record_path.with_suffix(".log"),
          record_path=record_path)
    await asyncio.sleep(6)
    print("lives", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def test_an_agent_that_stands_still_is_ended_and_its_engine_with_it(tmp_path: Path) -> None:
    record_path = tmp_path / "engine.json"
    argv = [sys.executable, "-c", STANDS_STILL, str(record_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None and agent.stdout.readline() == b"lives\n"
        record = read_record(record_path)
        assert record is not None and find_family(record)
        assert agent.wait() == -signal.SIGKILL
    wait_until(lambda: not find_family(record))
