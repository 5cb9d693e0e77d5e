"""A row that kills the real engine ends alone; rows that only waited beside it are no suspects."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import poison_processor
import pytest
from deployment_rig import DeploymentRig

from batchrun.store import jobs, results
from batchrun.store.database import open_store

NUM_ROWS = 48
GUILTY = 20
NUM_SEQS = 8
JOB = """\
name: sample
input:
  path: rows.parquet
  id: id
  messages:
    - {role: user, content: "question {{ id }}"}
request:
  max_tokens: 16
  ignore_eos: true
  vllm_xargs: {poison: "{{ text }}"}
output: {path: out.parquet}
"""
ARGS = ("--kv-cache-memory-bytes=268435456", "--max-model-len=8192", f"--max-num-seqs={NUM_SEQS}")

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.mark.timeout(600)
def test_a_row_that_kills_vllm_is_found_among_those_that_ran(
    rig: DeploymentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(poison_processor.__file__).parent))
    processor = f"{poison_processor.__name__}:{poison_processor.Poison.__name__}"
    args = [*ARGS, f"--logits-processors={processor}"]
    rig.configure({"port": rig.engine_port, "vllm_args": args}, model="tiny")
    rig.write_rows(["poison" if row == GUILTY else "" for row in range(NUM_ROWS)])
    rig.write_job(JOB)
    rig.ask("up", "-d")
    job = str(rig.ask("submit", "job.yaml")["id"])

    view = rig.wait_until_ended(job, wait_s=500)

    counts = (view["num_completed"], view["num_failed"])
    assert (view["state"], *counts) == ("completed", NUM_ROWS - 1, 1)
    failed = [row for row in rig.output() if row["error"]]
    assert [row["id"] for row in failed] == [f"row-{GUILTY}"]
    assert "engine_died" in failed[0]["error"]
    rig.close()
    with closing(open_store(rig.store)) as store:
        suspects = results.engine_deaths(store, jobs.get(store, job).seq)
    assert GUILTY in suspects
    # Rows may have ended within the last three steps, and others have taken their places.
    assert len(suspects) <= 2 * NUM_SEQS < NUM_ROWS - 1
