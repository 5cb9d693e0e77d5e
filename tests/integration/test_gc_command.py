"""`gc` as a user calls it: what is removed, what stays, and a kill in the middle."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from deployment_rig import DeploymentRig
from kill_rig import wait_until
from store_builders import execute, grow_dump, load_dump, read_tables, select

NUM_ROWS = 60


@pytest.fixture
def store(rig: DeploymentRig) -> str | Path:
    """The store of a home in which a daemon has completed one job."""
    rig.use_fake_engine()
    rig.complete_job(NUM_ROWS)
    return rig.store


def test_gc_removes_what_is_old_and_keeps_output_and_counts(
    rig: DeploymentRig, store: str | Path
) -> None:
    execute(store, "UPDATE jobs SET finished_at = finished_at - 40 * 86400")
    new_id = rig.complete_job(NUM_ROWS)

    shown = rig.ask("gc", "--older-than", "30d", "--dry-run")
    assert len(read_tables(store)["results"]) == 2 * NUM_ROWS
    removed = rig.ask("gc", "--older-than", "30d")

    (entry,) = removed["jobs"]
    assert shown["jobs"] == removed["jobs"]
    assert entry["id"] != new_id
    assert len(read_tables(store)["results"]) == NUM_ROWS
    assert rig.job(entry["id"])["num_completed"] == NUM_ROWS
    assert len(rig.output()) == NUM_ROWS
    assert rig.call("store", "check").returncode == 0
    assert rig.ask("gc", "--older-than", "30d")["jobs"] == []
    for path in (rig.folder / "rows.parquet", *(rig.home / "inputs").iterdir()):
        path.unlink()
    code, line = rig.refuse("results", entry["id"], "-o", "again.parquet")
    assert (code, "were removed on" in line) == (4, True)


@pytest.mark.slow
def test_gc_keeps_what_the_deployment_file_says(rig: DeploymentRig, store: str | Path) -> None:
    code, line = rig.refuse("gc")
    assert (code, "say --older-than 30d, or set `retention`" in line) == (2, True)

    rig.use_fake_engine(retention="7d")
    assert rig.ask("gc")["jobs"] == []
    execute(store, "UPDATE jobs SET finished_at = finished_at - 8 * 86400")

    assert len(rig.ask("gc")["jobs"]) == 1


@pytest.mark.nightly
def test_a_daemon_removes_what_is_older_than_the_deployment_file_says(
    rig: DeploymentRig, store: str | Path
) -> None:
    execute(store, "UPDATE jobs SET finished_at = finished_at - 8 * 86400")
    new_id = rig.complete_job(NUM_ROWS)
    rig.use_fake_engine(retention="7d")
    rig.ask("down")
    rig.ask("up", "-d")

    wait_until(lambda: len(read_tables(store)["results"]) == NUM_ROWS)

    assert rig.ask("results", new_id, "-o", "again.parquet")["rows"] == NUM_ROWS
    assert rig.call("store", "check").returncode == 0


@pytest.mark.slow
def test_gc_keeps_the_input_of_a_job_that_waits_and_drops_it_after(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.write_rows(["a"])
    rig.write_job()
    job_id = str(rig.ask("submit", "job.yaml")["id"])
    (link,) = (rig.home / "inputs").iterdir()

    assert rig.ask("gc", "--older-than", "0d")["inputs"] == []
    rig.ask("up", "-d")
    rig.wait_until_ended(job_id)
    removed = rig.ask("gc", "--older-than", "0d")

    assert removed["inputs"] == [str(link)]
    assert list((rig.home / "inputs").iterdir()) == []
    assert (rig.folder / "rows.parquet").exists()


@pytest.mark.nightly
@pytest.mark.sqlite_file
@pytest.mark.parametrize("delay_s", [0.5, 0.8, 1.1, 1.5])
def test_gc_that_is_killed_ends_when_it_is_called_again(rig: DeploymentRig, delay_s: float) -> None:
    rig.use_fake_engine()
    rig.home.mkdir()
    path = load_dump(rig.home / "store.db", "0002")
    grow_dump(path, num_rows=40_000)
    live = rows_of(path, "job_seq NOT IN (1, 2, 5, 6)")

    running = rig.start("gc", "--older-than", "1d")
    try:
        running.communicate(timeout=delay_s)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGKILL)
        running.communicate()
    rig.ask("gc", "--older-than", "1d")

    assert rows_of(path, "job_seq IN (1, 2, 5, 6)") == []
    assert rows_of(path, "job_seq NOT IN (1, 2, 5, 6)") == live
    again = rig.ask("gc", "--older-than", "1d")
    assert (again["jobs"], again["inputs"], again["freed_bytes"]) == ([], [], 0)


def rows_of(path: Path, condition: str) -> list[tuple[int, int]]:
    """(job, row) of the results and the replies."""
    tables = ("results", "bodies")
    parts = (f"SELECT job_seq, row FROM {table} WHERE {condition}" for table in tables)
    return select(path, " UNION ALL ".join(parts))
