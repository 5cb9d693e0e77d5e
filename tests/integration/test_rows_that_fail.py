"""What becomes of rows, and of their job, when the engine or the row itself refuses."""

from __future__ import annotations

import socket

import pytest
from deployment_rig import JOB_FILE, DeploymentRig
from image_builders import data_url_of, picture

from benchmarks.deployment import free_port


def test_a_row_with_a_bad_template_value_fails_and_the_job_goes_on(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    job = rig.submit_rows(
        "8", "0", "4", job=JOB_FILE.replace("{{ text }}", "{{ 8 // (text | int) }}")
    )

    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 2, 1)
    assert "zero" in str(rig.output()[1]["error"])
    assert rig.ask("errors", job)["errors"][0]["row"] == 1


def test_a_row_with_a_number_that_json_cannot_say_fails_and_the_job_goes_on(
    rig: DeploymentRig,
) -> None:
    rig.use_fake_engine()
    power = "(10 ** 64) ** (text | int)"
    seed = f'"{{{{ ({power}) * ({power}) }}}}"'
    job_file = JOB_FILE.replace("temperature: 0", f"temperature: 0, seed: {seed}")
    job = rig.submit_rows("0", "64", "0", job=job_file)

    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 2, 1)
    assert "not valid JSON" in str(rig.output()[1]["error"])


@pytest.mark.slow
def test_twenty_identical_errors_pause_the_job(rig: DeploymentRig) -> None:
    rig.use_fake_engine(rules=[{"match": {}, "action": {"status": 400}}])
    job = rig.submit_rows(*map(str, range(300)))

    view = rig.wait_until_ended(job)

    assert view["state"] == "paused"
    assert "20 rows in a row" in view["reason"]
    assert 20 <= view["num_failed"] < 100


@pytest.mark.slow
def test_more_failures_than_max_failed_pause_the_job(rig: DeploymentRig) -> None:
    rule = {"match": {"substring": "bad"}, "action": {"status": 400}}
    rig.use_fake_engine(rules=[rule])
    texts = [f"bad {i}" if i % 2 else f"good {i}" for i in range(200)]
    job = rig.submit_rows(*texts, job=JOB_FILE + "max_failed: 3\n")

    view = rig.wait_until_ended(job)

    assert view["state"] == "paused"
    assert "max_failed" in view["reason"]


def test_errors_that_pass_are_retried_and_counted(rig: DeploymentRig) -> None:
    rule = {"match": {"substring": "twice"}, "action": {"status": 500}, "times": 2}
    rig.use_fake_engine(rules=[rule])
    job = rig.submit_rows("once", "twice")

    rig.wait_until_ended(job)

    assert [(row["attempts"], row["error"]) for row in rig.output()] == [(1, None), (3, None)]


@pytest.mark.nightly
def test_an_engine_that_is_busy_costs_no_row_its_retries(rig: DeploymentRig) -> None:
    rules = [
        {"match": {"substring": f"row {i} "}, "action": {"status": status}, "times": 3}
        for i, status in ((1, 429), (3, 503))
    ]
    rig.use_fake_engine(rules=rules)
    job = rig.submit_rows(*(f"row {i} " for i in range(6)), job=JOB_FILE + "retries: 0\n")

    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"]) == ("completed", 6)
    assert [row["attempts"] for row in rig.output()] == [1] * 6


@pytest.mark.nightly
def test_a_row_that_is_never_answered_ends_after_its_time_and_retries(rig: DeploymentRig) -> None:
    rig.use_fake_engine(rules=[{"match": {"substring": "hang"}, "action": {"hang": True}}])
    job = rig.submit_rows("fine", "hang", job=JOB_FILE + "retries: 1\nrow_timeout: 0.5\n")

    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 1, 1)
    done, hung = rig.output()
    assert (done["attempts"], hung["attempts"]) == (1, 2)
    assert "no answer within 0.5 s" in str(hung["error"])


@pytest.mark.nightly
def test_a_row_that_is_refused_while_others_are_taken_ends_at_last(rig: DeploymentRig) -> None:
    rules = [{"match": {"substring": "never"}, "action": {"status": 503}}]
    rig.use_fake_engine("--latency-s=0.1", rules=rules, window={"requests": 1})
    texts = [f"fine {i}" for i in range(160)]
    job = rig.submit_rows("never", *texts, job=JOB_FILE + "retries: 0\n")

    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 160, 1)


def test_an_error_that_stays_ends_the_row_after_its_retries(rig: DeploymentRig) -> None:
    rule = {"match": {"substring": "never"}, "action": {"status": 500}}
    rig.use_fake_engine(rules=[rule])
    job = rig.submit_rows("fine", "never", job=JOB_FILE + "retries: 1\n")

    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_failed"]) == ("completed", 1)
    assert rig.output()[1]["attempts"] == 2


def test_rows_whose_images_do_not_come_hold_up_no_other_job(rig: DeploymentRig) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        rig.use_fake_engine(image_hosts=[place])
        content = '[{image: {column: text}}, {type: text, text: "what?"}]'
        text = JOB_FILE.replace('"{{ text }}"', content) + "retries: 0\n"
        for name in ("rows", "out"):
            text = text.replace(f"{name}.parquet", f"{name}-of-images.parquet")
        rig.write_rows([f"http://{place}/{i}.png" for i in range(200)], "rows-of-images.parquet")
        rig.write_job(text, "images.yaml")
        rig.ask("up", "-d")
        waiting = rig.ask("submit", "images.yaml")["id"]

        view = rig.wait_until_ended(rig.submit_rows(*(f"question {i}" for i in range(100))))

        assert (view["state"], view["num_completed"]) == ("completed", 100)
        assert rig.job(waiting)["num_failed"] == 0
        rig.ask("cancel", waiting)


def test_an_image_on_the_web_is_tried_again_where_its_host_does_not_answer(
    rig: DeploymentRig,
) -> None:
    port = free_port()
    rig.use_fake_engine(image_hosts=[f"127.0.0.1:{port}"])
    content = '[{image: {column: text}}, {type: text, text: "what?"}]'
    text = JOB_FILE.replace('"{{ text }}"', content) + "retries: 1\n"
    urls = (f"http://127.0.0.1:{port}/a.png", "http://127.0.0.1:1/a.png", data_url_of(picture()))

    view = rig.wait_until_ended(rig.submit_rows(*urls, job=text))

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 1, 2)
    unreachable, unlisted, _ = rig.output()
    assert unreachable["attempts"] == 2 and "cannot be had" in unreachable["error"]
    assert unlisted["attempts"] == 1 and "`image_hosts`" in unlisted["error"]
    assert len(rig.executions()) == 1
