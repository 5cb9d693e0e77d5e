"""The same promise on the real engine, with a proxy before it that counts executions."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import counting_proxy
import pytest
from deployment_rig import JOB_FILE, DeploymentRig
from engine_builders import REAL_ARGS
from kill_rig import Outage, answers, check_account, kill, wait_for_rows, wait_until

from batchrun.control.client import DaemonClient
from batchrun.engine.process import find_family, read_record
from batchrun.home import Home
from benchmarks.deployment import free_port

NUM_ROWS = 600
JOB = JOB_FILE.replace("max_tokens: 8", "max_tokens: 128, ignore_eos: true")

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@contextmanager
def counted_vllm(rig: DeploymentRig) -> Iterator[None]:
    """batchrun.yaml for the real engine behind a counting proxy, and the proxy."""
    proxy_port = free_port()
    url = f"http://127.0.0.1:{proxy_port}"
    rig.configure({"port": rig.engine_port, "url": url, "vllm_args": list(REAL_ARGS)}, model="tiny")
    command = [
        *(sys.executable, str(Path(counting_proxy.__file__))),
        f"--port={proxy_port}",
        f"--target=http://127.0.0.1:{rig.engine_port}",
        f"--executions={rig.executions_path}",
    ]
    with subprocess.Popen(command) as proxy:
        try:
            yield
        finally:
            proxy.terminate()


def kill_after(rig: DeploymentRig, job: str, num_rows: int, *parts: str) -> Outage:
    """Kill once so many results are committed; the job must still be running then."""
    wait_for_rows(rig, job, num_rows)
    outage = kill(rig, job, *parts)
    assert outage.num_committed < NUM_ROWS
    return outage


def until_it_answers(rig: DeploymentRig, outage: Outage) -> Outage:
    """The outage of an engine lasts until the next one answers.

    The children of a killed API server hold its listening socket for some seconds more, so that a
    row still reaches a port at which nothing is left to run it.
    """
    wait_until(lambda: engine_answers(rig))
    return replace(outage, ended_at=time.time())


def engine_answers(rig: DeploymentRig) -> bool:
    """Whether the engine itself, behind the proxy, is healthy."""
    try:
        url = f"http://127.0.0.1:{rig.engine_port}/health"
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.mark.timeout(900)
def test_kills_of_each_part_and_of_all_lose_and_repeat_nothing(rig: DeploymentRig) -> None:
    with counted_vllm(rig):
        rig.write_rows([f"question {i}" for i in range(NUM_ROWS)])
        rig.write_job(JOB)
        rig.ask("up", "-d")
        job = str(rig.ask("submit", "job.yaml")["id"])

        engine_killed = until_it_answers(rig, kill_after(rig, job, 60, "engine"))
        wait_for_rows(rig, job, 150)
        engine = rig.pid_of("engine")
        daemon_killed = kill_after(rig, job, 150, "daemon")
        assert rig.pid_of("engine") == engine
        kill_after(rig, job, 250, "gateway")
        wait_until(lambda: answers(rig))
        all_killed = kill_after(rig, job, 350, "daemon", "gateway", "engine")

        check_account(rig, job, [engine_killed, daemon_killed, all_killed])
    log.info("up again in %.1f s", daemon_killed.ended_at - daemon_killed.began_at)


NOTICED_S = 40.0
REFUSED_S = 5.0
NUM_LONG_ROWS = 300
LONG_JOB = JOB


def engine_view(rig: DeploymentRig) -> dict[str, Any]:
    """What `status` shows of the engine."""
    view: dict[str, Any] = DaemonClient(Home(rig.home)).get("/status")["engines"][0]
    return view


def answer_to_call(rig: DeploymentRig) -> tuple[int, float]:
    """(status, seconds) of an online call; it is not waited for longer than 60 s."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    url = f"http://127.0.0.1:{rig.port}/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    began_s = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, time.monotonic() - began_s
    except urllib.error.HTTPError as error:
        return error.code, time.monotonic() - began_s


@pytest.mark.timeout(900)
def test_a_stopped_core_is_noticed_replaced_and_its_rows_run(rig: DeploymentRig) -> None:
    rig.configure({"port": rig.engine_port, "vllm_args": list(REAL_ARGS)}, model="tiny")
    job = rig.submit_rows(*(f"question {i}" for i in range(NUM_LONG_ROWS)), job=LONG_JOB)
    rig.wait_for(job, lambda view: view["num_in_flight"] > 50 and view["num_completed"] > 0)
    record = read_record(rig.home / "run" / "engine-0.json")
    assert record is not None
    (core,) = [each for each in find_family(record) if "EngineCore" in " ".join(each.cmdline())]

    core.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    wait_until(lambda: engine_view(rig)["num_hangs"] == 1)
    noticed_s = time.monotonic() - stopped_s
    status, refused_s = answer_to_call(rig)
    view = rig.wait_until_ended(job, wait_s=600)

    log.info("noticed in %.1f s; a call: %d in %.2f s", noticed_s, status, refused_s)
    assert noticed_s <= NOTICED_S
    assert status == 503 and refused_s <= REFUSED_S
    assert (view["state"], view["num_completed"]) == ("completed", NUM_LONG_ROWS)
    assert not core.is_running()
