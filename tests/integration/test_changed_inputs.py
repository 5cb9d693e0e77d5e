"""Inputs that change under a job, and jobs that take over what another one has done."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deployment_rig import DeploymentRig

NUM_ROWS = 400  # more than are done before a command arrives


def pause_half_way(rig: DeploymentRig) -> str:
    """A job of 400 rows of which some are done."""
    rig.use_fake_engine("--latency-s=0.1", window={"requests": 2})
    job = rig.submit_rows(*(f"old {i}" for i in range(NUM_ROWS)))
    rig.wait_for(job, lambda view: view["num_completed"] > 4)
    rig.ask("pause", job)
    return job


def overwrite(rig: DeploymentRig, num_rows: int) -> None:
    """Change the input in place, so that its pinned link changes too."""
    ids, texts = [f"row-{i}" for i in range(num_rows)], [f"new {i}" for i in range(num_rows)]
    with (rig.folder / "rows.parquet").open("wb") as same_file:
        pq.write_table(pa.table({"id": ids, "text": texts}), same_file)


@pytest.mark.nightly
def test_a_changed_input_pauses_the_job_until_it_is_accepted(rig: DeploymentRig) -> None:
    job = pause_half_way(rig)
    num_done = len(rig.executions())
    overwrite(rig, NUM_ROWS)

    rig.ask("resume", job)
    view = rig.wait_until_ended(job)
    assert view["state"] == "paused"
    hashes = r"rows\.parquet: changed .* had xxh3 \w{32}, now \w{32} .*--accept-input"
    assert re.search(hashes, view["reason"])
    assert len(rig.executions()) == num_done

    rig.ask("resume", job, "--accept-input")
    assert rig.wait_until_ended(job)["num_completed"] == NUM_ROWS
    assert NUM_ROWS <= len(rig.executions()) <= NUM_ROWS + 2


@pytest.mark.nightly
def test_an_input_with_other_rows_is_not_accepted(rig: DeploymentRig) -> None:
    job = pause_half_way(rig)
    overwrite(rig, NUM_ROWS + 1)

    answer = rig.call("resume", job, "--accept-input")

    assert "has 401 rows now and had 400" in answer.stderr and answer.returncode == 2
    assert rig.job(job)["state"] == "paused"


@pytest.mark.slow
def test_a_job_takes_over_the_finished_rows_of_another(rig: DeploymentRig) -> None:
    rig.use_fake_engine(rules=[{"match": {"substring": "later 3"}, "action": {"status": 400}}])
    texts = [f"same {i}" for i in range(20)] + [f"later {i}" for i in range(5)]
    old = rig.submit_rows(*texts)
    rig.wait_until_ended(old)
    before = {row["text"]: row["response"] for row in rig.output()}
    num_before = len(rig.executions())
    (rig.folder / "rows.parquet").unlink()
    rig.write_rows(["changed 0", *texts[1:], "new"])
    new = rig.ask("submit", "job.yaml", "--continue-from", old)["id"]

    view = rig.wait_until_ended(new)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 25, 1)
    assert len(rig.executions()) == num_before + 2, "the changed row and the new one"
    rows = {row["text"]: row["response"] for row in rig.output()}
    assert all(rows[text] == before[text] for text in texts[1:])
    assert rows["changed 0"] and rows["new"]


def test_a_job_continues_only_one_that_is_there_with_its_input(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    job = rig.submit_rows("a row")
    rig.wait_until_ended(job)

    unknown = rig.call("submit", "job.yaml", "--continue-from", "nothing")
    overwrite(rig, 3)
    changed = rig.call("submit", "job.yaml", "--continue-from", job)

    assert unknown.stderr.startswith("batchrun: nothing: no such job")
    assert "rows.parquet: changed since the job was submitted" in changed.stderr
    assert len(rig.ask("status")["jobs"]) == 1


@pytest.mark.nightly
def test_an_agent_answers_no_row_with_what_it_made_of_another_input(rig: DeploymentRig) -> None:
    rig.use_agent("--latency-s=4")
    job = rig.submit_rows(*(f"old {i}" for i in range(8)))
    rig.wait_for_executions(8)
    rig.kill("daemon")
    overwrite(rig, 8)
    rig.ask("up", "-d")
    assert rig.wait_until_ended(job)["state"] == "paused"

    rig.ask("resume", job, "--accept-input")

    assert rig.wait_until_ended(job)["num_completed"] == 8
    assert len(rig.executions()) == 16
