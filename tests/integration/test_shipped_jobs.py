"""The three job files, on the committed samples and on the real data, through the real vLLM."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deployment_rig import DeploymentRig

CHECKOUT = Path(__file__).parents[2]
REAL_DATA = CHECKOUT.parent / "shared" / "datasets"
NAMES = ("loogle", "toolbench", "nextqa")
REAL_ROWS = {"loogle": 70, "toolbench": 400, "nextqa": 1000}
"""The first rows of each: all of them take a quarter of an hour on two cores."""
VLLM_ARGS = ("--max-model-len=65536", "--max-num-batched-tokens=4096")

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    """One deployment with the tiny model, in a folder that looks like the checkout."""
    rig = DeploymentRig(tmp_path_factory.mktemp("shipped"))
    rig.configure({"port": rig.engine_port, "vllm_args": VLLM_ARGS}, model="tiny")
    shutil.copytree(CHECKOUT / "jobs", rig.folder / "jobs")
    (rig.folder / "datasets").mkdir()
    rig.ask("up", "-d")
    yield rig
    rig.close()


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_run_completes_the_job_on_its_sample(deployment: DeploymentRig, name: str) -> None:
    sample = CHECKOUT / "datasets" / f"{name}.parquet"
    shutil.copy(sample, deployment.folder / "datasets")

    run_whole(deployment, name, pq.read_metadata(sample).num_rows)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="the real data sets are not on this machine")
@pytest.mark.parametrize("name", NAMES)
def test_run_completes_the_job_on_the_real_data(deployment: DeploymentRig, name: str) -> None:
    data = deployment.folder / "datasets" / f"{name}.parquet"
    num_rows = REAL_ROWS[name]
    source = str(REAL_DATA / name)
    deployment.ask("datasets", "import", name, source, "-o", str(data), "--limit", str(num_rows))

    run_whole(deployment, name, num_rows)


def run_whole(deployment: DeploymentRig, name: str, num_rows: int) -> None:
    """Run the job to its end; every row must be answered and stand in input order."""
    done = deployment.call("run", f"jobs/{name}.yaml", "--strict")

    assert done.returncode == 0, done.stderr
    assert f"{num_rows:,} rows done, 0 failed" in done.stdout
    ids = pq.read_table(deployment.folder / "datasets" / f"{name}.parquet", columns=["id"])
    output = deployment.output(f"results/{name}.parquet")
    assert [row["id"] for row in output] == ids["id"].to_pylist()
    assert len(output) == num_rows
    assert all(row["response"] and not row["error"] for row in output)
