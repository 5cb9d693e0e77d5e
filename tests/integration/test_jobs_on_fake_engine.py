"""Jobs from the command line to the output file, on the fake engine."""

from __future__ import annotations

import json
import re
import time

import polars as pl
import pytest
from deployment_rig import JOB_FILE, DeploymentRig

from batchrun.home import Home
from batchrun.python.handle import Job


def test_run_goes_from_nothing_to_the_output_and_stops_what_it_started(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.write_rows([f"question {i}" for i in range(40)])
    rig.write_job()

    done = rig.call("run", "job.yaml")

    assert done.returncode == 0, done.stderr
    assert "40 rows done, 0 failed" in done.stdout
    assert [row["id"] for row in rig.output()] == [f"row-{i}" for i in range(40)]
    assert all(row["response"] and row["error"] is None for row in rig.output())
    assert rig.call("down").stdout.strip() == "nothing was running"


def test_rows_that_share_a_prefix_run_together(rig: DeploymentRig) -> None:
    documents = [f"document {d} " * 100 for d in range(4)]
    rig.use_fake_engine(window={"requests": 1})
    rig.submit_rows(*(documents[i % 4] + f"question {i}" for i in range(24)))

    view = rig.wait_until_ended(rig.ask("status")["jobs"][0]["id"])

    assert view["state"] == "completed"
    rows = [int(entry["request_id"].split("-")[-2]) for entry in rig.executions()]
    assert [row % 4 for row in rows] == sorted(row % 4 for row in rows)


@pytest.mark.nightly
def test_status_compares_cached_tokens_with_those_predicted(rig: DeploymentRig) -> None:
    documents = [f"the {d}. document goes on and on " * 200 for d in "abcdefgh"]
    rig.use_fake_engine("--latency-s=0.05", window={"requests": 1})
    job = rig.submit_rows(*(documents[i % 8] + f" question {i}" for i in range(160)))

    view = rig.wait_for(job, lambda view: view["num_completed"] > 80)
    rig.ask("cancel", job)

    assert view["cache_agreement"] > 0.9
    assert not view["is_cached_less_than_planned"]
    log = (rig.home / "log" / "daemon.log").read_text()
    assert re.search(r"cached tokens predicted and returned agree to (9\d|100)%", log)


def test_pause_stops_the_rows_and_resume_goes_on(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = rig.submit_rows(*map(str, range(250)))
    rig.wait_for(job, lambda view: view["num_completed"] > 10)

    rig.ask("pause", job)
    time.sleep(0.5)
    begun = len(rig.executions())
    time.sleep(0.5)
    assert len(rig.executions()) == begun
    rig.ask("resume", job)
    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"]) == ("completed", 250)


def test_cancel_keeps_what_is_done_and_names_what_never_ran(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = rig.submit_rows(*map(str, range(600)))
    rig.wait_for(job, lambda view: view["num_completed"] > 10)

    rig.ask("cancel", job)
    view = rig.wait_until_ended(job)

    assert view["state"] == "cancelled"
    rows = rig.output()
    assert len(rows) == 600
    done = [row for row in rows if row["error"] is None]
    assert len(done) == view["num_completed"] < 600
    assert all("job_cancelled" in row["error"] for row in rows if row["error"])


def test_a_deadline_keeps_what_is_done(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = rig.submit_rows(*map(str, range(2000)), job=JOB_FILE + "deadline: 5s\n")

    view = rig.wait_until_ended(job)

    assert view["state"] == "expired"
    assert len(rig.output()) == 2000
    assert view["num_completed"] > 0


@pytest.mark.nightly
def test_offline_off_aborts_the_work_in_flight_and_lasts_over_a_restart(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = rig.submit_rows(*map(str, range(250)))
    rig.wait_for(job, lambda view: view["num_completed"] > 5)

    rig.ask("offline", "off")
    rig.wait_for(job, lambda view: view["num_in_flight"] == 0)
    rig.ask("down")
    rig.ask("up", "-d")
    begun = len(rig.executions())
    time.sleep(1.0)
    assert len(rig.executions()) == begun

    rig.ask("offline", "on")
    assert rig.wait_until_ended(job)["num_completed"] == 250


@pytest.mark.nightly
def test_a_job_submitted_without_a_daemon_runs_when_one_starts(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.write_rows(["a", "b"])
    rig.write_job()

    answer = rig.ask("submit", "job.yaml")
    assert answer["waits_for_daemon"] is True
    assert rig.job(answer["id"])["state"] == "validating"
    rig.ask("up", "-d")

    assert rig.wait_until_ended(answer["id"])["state"] == "completed"


@pytest.mark.nightly
def test_two_jobs_share_the_engine(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.3")
    first = rig.submit_rows(*map(str, range(1500)))
    rig.write_job(JOB_FILE.replace("out.parquet", "second.parquet"), "second.yaml")
    second = str(rig.ask("submit", "second.yaml")["id"])

    rig.wait_for(second, lambda view: view["num_completed"] > 20)

    assert rig.job(first)["state"] == "running"


def test_an_output_of_many_files_and_as_a_stream(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    texts = [f"question {i}" for i in range(40)]
    many = JOB_FILE.replace("out.parquet", "out.parquet, rows_per_file: 16")
    job = rig.submit_rows(*texts, job=many)
    rig.wait_until_ended(job)

    folder = rig.folder / "out.parquet"
    assert [pl.read_parquet(path).height for path in sorted(folder.iterdir())] == [16, 16, 8]
    assert Job(job, Home(rig.home)).results().collect()["text"].to_list() == texts
    streamed = rig.call("results", job, "-o", "-").stdout.splitlines()
    assert [json.loads(line)["text"] for line in streamed] == texts
    with rig.start("results", job, "-o", "-") as reading:
        assert reading.stdout is not None and reading.stderr is not None
        reading.stdout.close()
        assert (reading.wait(60), reading.stderr.read()) == (1, "")
    assert rig.ask("results", job)["path"] == str(folder)
    assert rig.call("store", "check").returncode == 0

    rig.write_job(many.replace("rows.parquet", "out.parquet/*.parquet"))
    assert "would overwrite the input" in rig.refuse("submit", "job.yaml")[1]
    (folder / "notes.txt").write_text("mine")
    rig.write_job(many)
    code, line = rig.refuse("submit", "job.yaml")
    assert (code, line.count("notes.txt there is no output of a job")) == (2, 1)


@pytest.mark.nightly
def test_partial_results_can_be_read_while_the_job_runs(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = rig.submit_rows(*map(str, range(250)))
    rig.wait_for(job, lambda view: view["num_completed"] > 10)

    refused = rig.call("results", job)
    taken = rig.ask("results", job, "--partial", "-o", "part.jsonl")

    assert refused.returncode == 4
    assert "--partial" in refused.stderr
    assert taken["rows"] > 10
    streamed = rig.call("results", job, "--partial", "-o", "-").stdout.splitlines()
    assert len(streamed) >= taken["rows"]


def test_a_clean_stop_hands_rows_back_and_loses_nothing(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = rig.submit_rows(*map(str, range(250)))
    rig.wait_for(job, lambda view: view["num_completed"] > 20)

    rig.ask("down")
    stored = rig.job(job)
    rig.ask("up", "-d")
    view = rig.wait_until_ended(job)

    assert stored["state"] == "running"
    assert view["num_completed"] == 250
    assert len({row["id"] for row in rig.output()}) == 250
