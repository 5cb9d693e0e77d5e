"""`kill -9` anything at any time: every row ends exactly once, and no finished row runs again."""

from __future__ import annotations

import random
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deployment_rig import DeploymentRig
from kill_rig import (
    answers,
    check_account,
    committed_at,
    job_state,
    kill,
    read_stream,
    wait_for_rows,
    wait_until,
    wait_until_running,
)
from submit_relay import killing_relay

from batchrun.control.client import DaemonClient
from batchrun.home import Home

PARTS = ("daemon", "gateway", "engine")
NUM_ROWS = 800
CHAT = {"model": "fake", "max_tokens": 40, "messages": [{"role": "user", "content": "hello"}]}
LARGE_JOB = """\
name: large
input: {path: rows.parquet, id: id, messages: [{role: user, content: "{{ text }}"}]}
request: {max_tokens: 2}
output: {path: out.jsonl, keep: [document]}
"""


def start(rig: DeploymentRig, num_rows: int = NUM_ROWS) -> str:
    """Bring a deployment up and submit a job of so many rows."""
    rig.write_rows([f"question {i}" for i in range(num_rows)])
    rig.write_job()
    rig.ask("up", "-d")
    return str(rig.ask("submit", "job.yaml")["id"])


def start_large(rig: DeploymentRig, more: str = "", *, is_offline_on: bool = True) -> str:
    """A job whose output takes long to write; returns when writing has begun."""
    rig.use_fake_engine()
    num_rows, document = 150, "Übergrößenträger " * 40_000
    rows = {
        "id": [f"row-{i}" for i in range(num_rows)],
        "text": [f"question {i}" for i in range(num_rows)],
        "document": [document] * num_rows,
    }
    pq.write_table(pa.table(rows), rig.folder / "rows.parquet", row_group_size=10)
    rig.write_job(LARGE_JOB + more)
    rig.ask("up", "-d")
    if not is_offline_on:
        rig.ask("offline", "off")
    job = str(rig.ask("submit", "job.yaml")["id"])
    wait_until(lambda: unfinished_outputs(rig) > 0)
    return job


def unfinished_outputs(rig: DeploymentRig) -> int:
    """How many half-written output files lie in the folder."""
    return len(list(rig.folder.glob(".out.*.part")))


@pytest.mark.parametrize(
    "parts", [("engine",), ("daemon",), PARTS], ids=["engine", "daemon", "all"]
)
def test_a_kill_in_the_middle_of_a_job_loses_and_repeats_nothing(
    rig: DeploymentRig, parts: tuple[str, ...]
) -> None:
    rig.use_fake_engine("--latency-s=0.1")
    job = start(rig)
    wait_for_rows(rig, job, 100)

    outage = kill(rig, job, *parts)

    assert outage.num_committed < NUM_ROWS
    check_account(rig, job, [outage])


@pytest.mark.slow
def test_a_killed_gateway_comes_back_and_the_job_never_notices(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.1")
    job = start(rig)
    wait_for_rows(rig, job, 100)

    outage = kill(rig, job, "gateway")

    assert outage.num_committed < NUM_ROWS
    wait_until_running(rig, "gateway")
    wait_until(lambda: answers(rig))
    assert read_stream(rig, CHAT)
    check_account(rig, job, [])


@pytest.mark.nightly
def test_a_terminated_daemon_stops_cleanly_and_the_next_adopts_the_engine(
    rig: DeploymentRig,
) -> None:
    rig.use_fake_engine("--latency-s=0.1")
    job = start(rig)
    wait_for_rows(rig, job, 100)
    engine, gateway = rig.pid_of("engine"), rig.pid_of("gateway")

    outage = kill(rig, job, "daemon", signal_number=signal.SIGTERM)

    assert outage.num_committed < NUM_ROWS
    assert (rig.pid_of("engine"), rig.pid_of("gateway")) == (engine, gateway)
    check_account(rig, job, [outage])


@pytest.mark.nightly
def test_random_kills_in_one_job_lose_and_repeat_nothing(rig: DeploymentRig) -> None:
    rng = random.Random(2)
    rig.use_fake_engine("--latency-s=0.3")
    job = start(rig, num_rows=1_200)
    outages = []

    for _ in range(5):
        wait_for_rows(rig, job, len(committed_at(rig, job)) + rng.randrange(5, 60))
        part = rng.choice(PARTS)
        wait_until_running(rig, part)
        outages.append(kill(rig, job, part))

    assert outages[-1].num_committed < 1_200
    check_account(rig, job, outages)


@pytest.mark.slow
def test_a_daemon_killed_while_it_writes_the_output_writes_it_anew(rig: DeploymentRig) -> None:
    job = start_large(rig)

    outage = kill(rig, job, "daemon", restarts=False)

    assert job_state(rig, job) == "finalizing"
    assert unfinished_outputs(rig) == 1
    assert not (rig.folder / "out.jsonl").exists()
    rig.ask("up", "-d")
    check_account(rig, job, [outage], "out.jsonl")
    assert unfinished_outputs(rig) == 0


@pytest.mark.nightly
def test_a_job_cancelled_while_it_expires_has_one_whole_output(rig: DeploymentRig) -> None:
    job = start_large(rig, "deadline: 1s\n", is_offline_on=False)

    DaemonClient(Home(rig.home)).post(f"/jobs/{job}/cancel")
    view = rig.wait_until_ended(job)

    assert (view["state"], view["reason"]) == ("cancelled", None)
    wait_until(lambda: unfinished_outputs(rig) == 0)
    rows = rig.output("out.jsonl")
    assert [row["id"] for row in rows] == [f"row-{i}" for i in range(view["num_rows"])]


@pytest.mark.slow
@pytest.mark.parametrize("delivers", [True, False], ids=["answered", "unanswered"])
def test_a_submit_whose_daemon_is_killed_adds_the_job_once(
    rig: DeploymentRig, *, delivers: bool
) -> None:
    rig.use_fake_engine()
    rig.write_rows([f"question {i}" for i in range(50)])
    rig.write_job()
    rig.ask("up", "-d")

    with killing_relay(rig, delivers=delivers):
        job = str(rig.ask("submit", "job.yaml")["id"])
    rig.ask("up", "-d")

    check_account(rig, job, [])
    assert [view["id"] for view in rig.ask("status")["jobs"]] == [job]


def test_a_stream_survives_the_kill_of_the_daemon(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--tokens-per-s=20")
    rig.ask("up", "-d")
    whole = read_stream(rig, CHAT)

    streamed = read_stream(rig, CHAT, on_first=lambda: rig.kill("daemon"))

    assert streamed == whole
    assert len(streamed.split()) >= 4


@pytest.mark.nightly
def test_two_daemons_never_share_a_store(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    daemon = rig.pid_of("daemon")

    in_background, in_foreground = rig.call("up", "-d"), rig.call("up")

    assert (in_background.returncode, in_foreground.returncode) == (4, 4)
    assert in_background.stderr.count("\n") == in_foreground.stderr.count("\n") == 1
    assert f"in use by process {daemon}" in in_foreground.stderr
    assert rig.ask("status")["engines"][0]["state"] == "ready"
