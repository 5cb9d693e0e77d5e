"""Several daemons on one PostgreSQL database: one leads, the others stand by and take over."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deployment_rig import WAIT_S, DeploymentRig
from kill_rig import (
    Outage,
    begun_at,
    check_account,
    committed_at,
    wait_for_rows,
    wait_until,
)
from openai import AuthenticationError, NotFoundError, OpenAIError
from postgres_server import END_LOCK_SESSION, PostgresServer
from store_builders import select

from batchrun.control.client import DaemonClient
from batchrun.errors import DaemonUnavailableError
from batchrun.home import Home
from batchrun.server.web.calls_of_all import REPORT_PREFIX, CallReport
from batchrun.store import jobs
from batchrun.store.database import open_store
from batchrun.store.place import DaemonLock

pytestmark = pytest.mark.slow

NUM_ROWS = 600


class Pair:
    """Two homes on one database and one agent, which the first one's rig started."""

    def __init__(self, folder: Path, postgres: PostgresServer) -> None:
        self.first, self.second = (DeploymentRig(folder / name) for name in ("first", "second"))
        for rig in (self.first, self.second):
            rig.folder.mkdir()
            rig.store_url = None
        self.first.store_url = self.second.store_url = postgres.new_database()

    def start(self, *options: str) -> None:
        """An agent with a fake engine, a leader and a standby."""
        self.first.use_agent(*options)
        secret = self.first.home / "agents" / "0" / "secret"
        agent = {"agent": f"https://127.0.0.1:{self.first.agent_port}", "secret_file": str(secret)}
        self.second.configure(agent)
        assert self.first.ask("up", "-d")["leadership"]["role"] == "leader"
        assert self.second.ask("up", "-d")["leadership"]["role"] == "standby"


@pytest.fixture
def pair(tmp_path: Path, postgres: PostgresServer) -> Iterator[Pair]:
    made = Pair(tmp_path, postgres)
    yield made
    made.second.close()
    made.first.close()


def role(rig: DeploymentRig) -> dict[str, Any]:
    """What a home's daemon says of its role; nothing while it does not answer."""
    with suppress(DaemonUnavailableError):
        return dict(DaemonClient(Home(rig.home), timeout_s=2.0).get("/status")["leadership"])
    return {"role": None}


def test_a_standby_says_who_leads_and_has_it_carry_out_commands(pair: Pair) -> None:
    pair.start()
    name = f":{pair.first.home}"

    told = role(pair.second)
    assert (told["leader"].endswith(name), told["term"]) == (True, role(pair.first)["term"])
    shown = pair.second.call("status").stdout
    assert shown.startswith("standby of ") and name in shown.splitlines()[0]
    assert "daemon: running" in pair.second.call("doctor").stdout
    job = pair.second.submit_rows("a", "b")
    pair.second.call("status", job)
    pair.second.executions_path = pair.first.executions_path
    pair.second.wait_until_ended(job)
    assert pair.second.ask("offline", "off") == {"on": False}
    assert pair.first.ask("status")["offline"] is False
    code, line = pair.second.refuse("pause", job)
    assert (code, "completed" in line) == (4, True)
    code, line = pair.second.refuse("engine", "restart", "--rolling")
    assert (code, "stands by" in line, f"{name} leads" in line) == (4, True, True)
    for rig, leads in ((pair.first, 1.0), (pair.second, 0.0)):
        with urllib.request.urlopen(f"http://127.0.0.1:{rig.port}/metrics") as page:
            lines = page.read().decode().splitlines()
        assert {f"batchrun_daemon_leads {leads}", "batchrun_daemon_term 1.0"} <= set(lines)
    key = pair.second.ask("keys", "create", "k")["key"]
    with pair.second.openai(api_key=key) as client:
        assert client.models.list().data


def test_a_standby_that_could_not_lead_a_fleet_is_refused(pair: Pair) -> None:
    pair.first.use_fake_engine()
    pair.first.ask("up", "-d")
    pair.second.configure({"name": "fleet", "ray": {"address": "127.0.0.1:1"}})

    code, line = pair.second.refuse("up", "-d")
    assert (code, "secret_file" in line) == (4, True)
    assert "no daemon runs" in pair.second.call("status").stdout


def test_a_home_without_a_daemon_gives_its_job_to_the_leader(pair: Pair) -> None:
    pair.start()
    pair.second.ask("down")
    pair.second.write_rows(["a"])
    pair.second.write_job()

    told = pair.second.ask("submit", "job.yaml")

    assert told["waits_for_daemon"] is False
    assert pair.first.wait_until_ended(told["id"])["state"] == "completed"


def test_any_gateway_answers_everything(pair: Pair) -> None:
    pair.start()
    first, second = pair.first, pair.second
    key = first.ask("keys", "create", "k")["key"]
    line: dict[str, object] = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line |= {"body": {"model": "fake", "prompt": "x", "max_tokens": 2}}

    def works() -> bool:
        try:
            with second.openai(api_key=key) as client:
                client.files.list()
                return True
        except OpenAIError:
            return False

    wait_until(works)
    with second.openai(api_key=key) as client, first.openai(api_key=key) as there:
        file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        output = there.batches.retrieve(batch.id).output_file_id
        assert output is not None
        assert json.loads(client.files.content(output).content)["custom_id"] == "a"
        with pytest.raises(NotFoundError):
            client.batches.retrieve("batch_none")
    with second.openai(api_key="wrong") as client, pytest.raises(AuthenticationError):
        client.files.list()


@pytest.mark.nightly
def test_calls_at_any_gateway_are_counted_for_the_leader(pair: Pair) -> None:
    pair.start()
    assert pair.first.store_url is not None
    store = open_store(pair.first.store_url)

    def told() -> list[CallReport]:
        found = jobs.list_settings(store, REPORT_PREFIX).values()
        return [msgspec.convert(each, CallReport) for each in found]

    with closing(store):
        with pair.second.openai() as client:
            for number in range(7):
                client.completions.create(model="fake", prompt=f"call {number}", max_tokens=3)
        wait_until(lambda: any(each.calls for each in told()))
        wait_until(lambda: [each.calls["0"].num_calls for each in told()] == [7])
        (report,) = told()
        assert [answer for _, answer in report.lengths] == [3] * 7
        assert report.calls["0"].num_output_tokens == 21


def test_a_standby_takes_over_a_job_when_the_leader_is_killed(pair: Pair) -> None:
    pair.start("--latency-s=0.5")
    first, second = pair.first, pair.second
    job = first.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))
    wait_for_rows(first, job, 100)

    began_at, num_committed = time.time(), len(committed_at(first, job))
    first.kill("daemon")
    wait_until(lambda: role(second)["role"] == "leader")
    outage = Outage(began_at, time.time(), num_committed)

    assert num_committed < NUM_ROWS
    second.executions_path = first.executions_path
    second.wait_until_ended(job)
    check_account(first, job, [outage])
    assert {len(instants) for instants in begun_at(first, job).values()} == {1}
    assert first.ask("up", "-d")["leadership"]["leader"].endswith(f":{second.home}")


@pytest.mark.nightly
def test_a_command_that_comes_while_nobody_leads_is_for_the_next_leader(pair: Pair) -> None:
    pair.start()
    first, second = pair.first, pair.second
    second.executions_path = first.executions_path
    second.write_rows(["a"])
    second.write_job()

    first.kill("daemon")
    done = second.call("submit", "job.yaml", "--wait")

    assert (done.returncode, role(second)["role"]) == (0, "leader"), done.stderr
    assert [each["state"] for each in second.ask("status")["jobs"]] == ["completed"]


@pytest.mark.nightly
def test_who_waits_at_a_standby_waits_through_the_end_of_the_leader(pair: Pair) -> None:
    pair.start("--latency-s=0.5")
    first, second = pair.first, pair.second
    second.executions_path = first.executions_path
    num_rows = 5 * NUM_ROWS
    second.write_rows([f"question {i}" for i in range(num_rows)])
    second.write_job()
    waiting = second.start("submit", "job.yaml", "--wait", "--json")
    wait_until(lambda: bool(first.ask("status")["jobs"]))
    job = str(first.ask("status")["jobs"][0]["id"])
    wait_for_rows(first, job, 100)

    first.kill("daemon")
    assert len(committed_at(first, job)) < num_rows
    told, trouble = waiting.communicate(timeout=WAIT_S)

    assert waiting.returncode == 0, trouble
    assert json.loads(told)["num_completed"] == num_rows
    assert role(second)["role"] == "leader"


@pytest.mark.nightly
def test_a_leader_that_was_stopped_too_long_stands_by_and_disturbs_nobody(pair: Pair) -> None:
    pair.start("--latency-s=0.5")
    first, second = pair.first, pair.second
    job = first.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))
    wait_for_rows(first, job, 100)
    pid, began_at = first.pid_of("daemon"), time.time()

    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: role(second)["role"] == "leader")
        num_committed = len(committed_at(second, job))
        wait_for_rows(second, job, min(num_committed + 50, NUM_ROWS))
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: role(first)["role"] == "standby")
    outage = Outage(began_at, time.time(), num_committed)

    assert first.pid_of("daemon") == pid
    assert role(first)["leader"] == role(second)["leader"]
    second.wait_until_ended(job)
    check_account(first, job, [outage])
    assert {len(instants) for instants in begun_at(first, job).values()} == {1}


@pytest.mark.nightly
def test_of_two_that_start_at_once_one_leads(pair: Pair) -> None:
    pair.first.use_agent()
    secret = pair.first.home / "agents" / "0" / "secret"
    agent = {"agent": f"https://127.0.0.1:{pair.first.agent_port}", "secret_file": str(secret)}
    pair.second.configure(agent)

    started = [rig.start("up", "-d", "--json") for rig in (pair.first, pair.second)]
    told = [json.loads(each.communicate(timeout=WAIT_S)[0])["leadership"] for each in started]

    assert sorted(each["role"] for each in told) == ["leader", "standby"]
    assert told[0]["term"] == told[1]["term"] == 1


@pytest.mark.nightly
def test_a_leader_whose_connections_are_cut_leads_again_or_stands_by(pair: Pair) -> None:
    pair.start("--latency-s=0.5")
    first, second = pair.first, pair.second
    job = first.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))
    wait_for_rows(first, job, 50)
    began_at, num_committed = time.time(), len(committed_at(first, job))

    for _ in range(3):
        select(first.store, END_LOCK_SESSION)
        roles: list[dict[str, Any]] = [{}, {}]
        while sorted(str(each.get("role")) for each in roles) != ["leader", "standby"]:
            roles = [role(first), role(second)]
            # One that has just lost its session may not know yet: it writes nothing any more, for
            # the term of the other is a later one.
            terms = [each["term"] for each in roles if each.get("role") == "leader"]
            assert len(set(terms)) == len(terms), roles
            time.sleep(0.1)

    outage = Outage(began_at, time.time(), num_committed)
    assert len({each["term"] for each in roles}) == 1
    second.wait_until_ended(job)
    check_account(first, job, [outage])


@pytest.mark.nightly
def test_a_database_that_comes_and_goes_ends_neither_daemon(
    pair: Pair, postgres: PostgresServer
) -> None:
    pair.start()
    rigs = (pair.first, pair.second)
    pids = [rig.pid_of("daemon") for rig in rigs]

    for up_s in (0.2, 1.0, 1.5, 2.0):
        postgres.stop("immediate")
        time.sleep(1.5)
        postgres.start()
        time.sleep(up_s)

    wait_until(lambda: sorted(str(role(rig)["role"]) for rig in rigs) == ["leader", "standby"])
    assert [rig.pid_of("daemon") for rig in rigs] == pids


def test_a_standby_records_where_files_are(rig: DeploymentRig, postgres: PostgresServer) -> None:
    rig.store_url = postgres.new_store()
    rig.use_fake_engine(files="s3://bucket/files")
    with closing(open_store(rig.store_url)) as store, DaemonLock(store) as lock, rig.start("up"):

        def is_recorded() -> bool:
            lock.check()
            return Home(rig.home).files_url == "s3://bucket/files"

        wait_until(is_recorded)
        rig.close()
