"""Deployments on PostgreSQL: killed daemons, a server that crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployment_rig import DeploymentRig
from kill_rig import check_account, kill, wait_for_rows, wait_until
from postgres_server import PASSWORD, QUOTED_PASSWORD, PostgresServer

from batchrun.home import Home

pytestmark = pytest.mark.slow

NUM_ROWS = 800
NAME = "127.0.0.1:"


@pytest.fixture
def rig(rig: DeploymentRig, postgres: PostgresServer) -> DeploymentRig:
    """A deployment with a database of its own."""
    rig.store_url = postgres.new_database()
    return rig


def leaks(rig: DeploymentRig) -> list[Path]:
    """The files of the home that hold the password and should not."""
    words = (PASSWORD.encode(), QUOTED_PASSWORD.encode())
    files = [path for path in rig.home.rglob("*") if path.is_file() and path.name != "store-url"]
    assert rig.home / "log" / "daemon.log" in files
    return [path for path in files if any(word in path.read_bytes() for word in words)]


def test_a_job_survives_the_kill_of_the_daemon(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.1")
    job = rig.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))
    wait_for_rows(rig, job, 100)

    outage = kill(rig, job, "daemon")

    assert outage.num_committed < NUM_ROWS
    check_account(rig, job, [outage])
    assert rig.call("store", "check").returncode == 0
    assert leaks(rig) == []


def test_a_daemon_waits_for_a_server_that_crashed_and_goes_on(
    rig: DeploymentRig, postgres: PostgresServer
) -> None:
    rig.use_fake_engine("--latency-s=0.1")
    job = rig.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))
    wait_for_rows(rig, job, 100)
    daemon = rig.pid_of("daemon")

    postgres.stop("immediate")
    try:
        wait_until(lambda: rig.ask("status")["stalled"] is not None)
        picture = rig.ask("status", job)
        refused = rig.refuse("pause", job)
    finally:
        postgres.start()

    assert picture["stalled"].startswith(NAME)
    assert "cannot be reached" in picture["stalled"]
    assert (refused[0], "cannot be reached" in refused[1]) == (4, True)
    assert picture["jobs"][0]["num_completed"] < NUM_ROWS
    check_account(rig, job, [])
    assert rig.pid_of("daemon") == daemon
    assert rig.ask("status")["stalled"] is None
    assert leaks(rig) == []


def test_rows_whose_results_a_promoted_replica_lacks_run_again(
    rig: DeploymentRig, postgres: PostgresServer
) -> None:
    rig.use_fake_engine("--latency-s=0.1")
    job = rig.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))
    wait_for_rows(rig, job, 50)
    copy = postgres.copy()
    wait_for_rows(rig, job, 300)

    postgres.fail_over(copy)

    assert rig.wait_until_ended(job)["num_completed"] == NUM_ROWS
    output = rig.output()
    assert [row["error"] for row in output] == [None] * NUM_ROWS
    assert rig.call("store", "check").returncode == 0
    log_text = (rig.home / "log" / "daemon.log").read_text("utf-8")
    assert "a replica has taken its place, which may lack commits" in log_text


def test_keys_that_a_home_without_a_daemon_changes_count_at_the_leaders_gateways(
    rig: DeploymentRig, tmp_path: Path
) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    published = Home(rig.home).api_keys
    elsewhere = ("--home", str(tmp_path / "elsewhere"))
    key = rig.ask("keys", "create", "late", *elsewhere)["id"]
    wait_until(lambda: key in published.read_text())
    rig.ask("keys", "revoke", key, *elsewhere)
    wait_until(lambda: key not in published.read_text())


@pytest.mark.nightly
def test_commands_without_a_daemon_find_the_database(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    job = rig.complete_job(60)
    rig.call("down")

    assert rig.job(job)["num_completed"] == 60
    assert rig.ask("results", job, "-o", "again.jsonl")["rows"] == 60
    code, line = rig.refuse("store", "backup", "backup.db")
    assert (code, "copy it with `pg_dump`" in line) == (4, True)
    assert not (rig.folder / "backup.db").exists()
    assert rig.call("store", "check").stdout.startswith(NAME)
    assert rig.ask("gc", "--older-than", "0d")["freed_bytes"] > 0
    assert not (rig.home / "store.db").exists()


def test_a_deployment_file_that_names_another_store_is_refused(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.write_rows(["a"])
    rig.write_job()
    rig.ask("submit", "job.yaml")
    rig.store_url = None
    rig.use_fake_engine()

    code, line = rig.refuse("up")

    assert (code, f"are in {NAME}" in line) == (2, True)
    assert len(rig.ask("status")["jobs"]) == 1
