"""Jobs from the command line to the output file, on the fake engine."""

from __future__ import annotations

import time

from deployment_rig import JOB_FILE, DeploymentRig


def start(rig: DeploymentRig, *texts: str, job: str = JOB_FILE) -> str:
    """Bring the deployment up and submit a job of these rows."""
    rig.write_rows(texts)
    rig.write_job(job)
    rig.ask("up", "-d")
    return str(rig.ask("submit", "job.yaml")["id"])


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
    start(rig, *(documents[i % 4] + f"question {i}" for i in range(24)))

    view = rig.wait_until_ended(rig.ask("status")["jobs"][0]["id"])

    assert view["state"] == "completed"
    rows = [int(entry["request_id"].split("-")[-2]) for entry in rig.executions()]
    assert [row % 4 for row in rows] == sorted(row % 4 for row in rows)


def test_a_row_with_a_bad_template_value_fails_and_the_job_goes_on(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    job = start(rig, "8", "0", "4", job=JOB_FILE.replace("{{ text }}", "{{ 8 // (text | int) }}"))

    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 2, 1)
    assert "zero" in str(rig.output()[1]["error"])
    assert rig.ask("errors", job)["errors"][0]["row"] == 1


def test_a_wrong_model_name_pauses_the_job_after_few_calls(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    job = start(rig, *map(str, range(500)), job=JOB_FILE + "model: no-such-model\n")

    view = rig.wait_until_ended(job)

    assert view["state"] == "paused"
    assert "no-such-model" in view["reason"]
    assert len(rig.executions()) < 100
    assert view["num_failed"] == 0


def test_twenty_identical_errors_pause_the_job(rig: DeploymentRig) -> None:
    rig.use_fake_engine(rules=[{"match": {}, "action": {"status": 400}}])
    job = start(rig, *map(str, range(300)))

    view = rig.wait_until_ended(job)

    assert view["state"] == "paused"
    assert "20 rows in a row" in view["reason"]
    assert 20 <= view["num_failed"] < 100


def test_more_failures_than_max_failed_pause_the_job(rig: DeploymentRig) -> None:
    rule = {"match": {"substring": "bad"}, "action": {"status": 400}}
    rig.use_fake_engine(rules=[rule])
    texts = [f"bad {i}" if i % 2 else f"good {i}" for i in range(200)]
    job = start(rig, *texts, job=JOB_FILE + "max_failed: 3\n")

    view = rig.wait_until_ended(job)

    assert view["state"] == "paused"
    assert "max_failed" in view["reason"]


def test_errors_that_pass_are_retried_and_counted(rig: DeploymentRig) -> None:
    rule = {"match": {"substring": "twice"}, "action": {"status": 503}, "times": 2}
    rig.use_fake_engine(rules=[rule])
    job = start(rig, "once", "twice")

    rig.wait_until_ended(job)

    assert [(row["attempts"], row["error"]) for row in rig.output()] == [(1, None), (3, None)]


def test_an_error_that_stays_ends_the_row_after_its_retries(rig: DeploymentRig) -> None:
    rule = {"match": {"substring": "never"}, "action": {"status": 500}}
    rig.use_fake_engine(rules=[rule])
    job = start(rig, "fine", "never", job=JOB_FILE + "retries: 1\n")

    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_failed"]) == ("completed", 1)
    assert rig.output()[1]["attempts"] == 2


def test_pause_stops_the_rows_and_resume_goes_on(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = start(rig, *map(str, range(250)))
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
    job = start(rig, *map(str, range(600)))
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
    job = start(rig, *map(str, range(2000)), job=JOB_FILE + "deadline: 5s\n")

    view = rig.wait_until_ended(job)

    assert view["state"] == "expired"
    assert len(rig.output()) == 2000
    assert view["num_completed"] > 0


def test_offline_off_aborts_the_work_in_flight_and_lasts_over_a_restart(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = start(rig, *map(str, range(250)))
    rig.wait_for(job, lambda view: view["num_completed"] > 5)

    rig.ask("offline", "off")
    assert rig.job(job)["num_in_flight"] == 0
    rig.ask("down")
    rig.ask("up", "-d")
    begun = len(rig.executions())
    time.sleep(1.0)
    assert len(rig.executions()) == begun

    rig.ask("offline", "on")
    assert rig.wait_until_ended(job)["num_completed"] == 250


def test_a_job_submitted_without_a_daemon_runs_when_one_starts(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.write_rows(["a", "b"])
    rig.write_job()

    answer = rig.ask("submit", "job.yaml")
    assert answer["waits_for_daemon"] is True
    assert rig.job(answer["id"])["state"] == "validating"
    rig.ask("up", "-d")

    assert rig.wait_until_ended(answer["id"])["state"] == "completed"


def test_two_jobs_share_the_engine(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.3")
    first = start(rig, *map(str, range(1500)))
    rig.write_job(JOB_FILE.replace("out.parquet", "second.parquet"), "second.yaml")
    second = str(rig.ask("submit", "second.yaml")["id"])

    rig.wait_for(second, lambda view: view["num_completed"] > 20)

    assert rig.job(first)["state"] == "running"


def test_partial_results_can_be_read_while_the_job_runs(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = start(rig, *map(str, range(250)))
    rig.wait_for(job, lambda view: view["num_completed"] > 10)

    refused = rig.call("results", job)
    taken = rig.ask("results", job, "--partial", "-o", "part.jsonl")

    assert refused.returncode == 4
    assert "--partial" in refused.stderr
    assert taken["rows"] > 10


def test_a_clean_stop_hands_rows_back_and_loses_nothing(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.5")
    job = start(rig, *map(str, range(250)))
    rig.wait_for(job, lambda view: view["num_completed"] > 20)

    rig.ask("down")
    stored = rig.job(job)
    rig.ask("up", "-d")
    view = rig.wait_until_ended(job)

    assert stored["state"] == "running"
    assert view["num_completed"] == 250
    assert len({row["id"] for row in rig.output()}) == 250
