"""`store check`, `store backup` and `gc` as a user calls them, beside a daemon and without one."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from deployment_rig import DeploymentRig
from store_builders import execute, grow_dump, load_dump, read_tables

from batchrun.store.schema import HEAD

pytestmark = pytest.mark.sqlite_file

NUM_ROWS = 60


@pytest.fixture
def store(rig: DeploymentRig) -> Path:
    """The store of a home in which a daemon has completed one job."""
    rig.use_fake_engine()
    rig.complete_job(NUM_ROWS)
    return rig.home / "store.db"


def found(rig: DeploymentRig, *arguments: str) -> list[dict[str, Any]]:
    """What a check that exits 1 found."""
    done = rig.call("store", "check", *arguments, "--json")
    assert done.returncode == 1, done.stderr
    violations: list[dict[str, Any]] = json.loads(done.stdout)["violations"]
    return violations


def test_a_check_beside_a_running_daemon_finds_nothing_wrong(
    rig: DeploymentRig, store: Path
) -> None:
    done = rig.call("store", "check")

    assert (done.returncode, done.stdout) == (0, f"{store}: nothing is wrong\n")


@pytest.mark.slow
def test_a_check_names_job_and_row_and_repairs_nothing(rig: DeploymentRig, store: Path) -> None:
    rig.call("down")
    execute(store, "DELETE FROM bodies WHERE row = 7")
    before = read_tables(store)

    done = rig.call("store", "check")

    job_id = before["jobs"][0]["id"]
    assert done.returncode == 1
    assert done.stdout == f"{job_id}, row 7: has a result without a reply\n"
    assert read_tables(store) == before


@pytest.mark.slow
def test_a_check_misses_an_output_and_sees_one_that_is_too_short(
    rig: DeploymentRig, store: Path
) -> None:
    output = rig.folder / "out.parquet"
    whole = output.read_bytes()

    output.unlink()
    (missing,) = found(rig)
    output.write_bytes(whole[:500])
    (torn,) = found(rig)

    assert f"its output {output} cannot be read: No such file" in missing["what"]
    assert f"its output {output} cannot be read" in torn["what"]


@pytest.mark.slow
def test_a_check_sees_that_the_input_of_a_waiting_job_changed(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.write_rows(["a", "b"])
    rig.write_job()
    job_id = rig.ask("submit", "job.yaml")["id"]
    assert rig.call("store", "check").returncode == 0
    with (rig.folder / "rows.parquet").open("r+b") as file:
        file.seek(10)
        file.write(b"?")

    (violation,) = found(rig)

    assert violation["job_id"] == job_id
    assert "block 0 of its input" in violation["what"]


@pytest.mark.slow
def test_a_backup_beside_a_daemon_holds_every_job_and_is_sound(
    rig: DeploymentRig, store: Path
) -> None:
    backup = rig.folder / "backup.db"
    answer = rig.ask("store", "backup", "backup.db")
    rig.complete_job(NUM_ROWS)
    again = rig.ask("store", "backup", "backup.db")

    assert answer["num_violations"] == again["num_violations"] == 0
    assert rig.call("store", "check", "backup.db").returncode == 0
    assert len(read_tables(backup)["jobs"]) == 2
    assert len(read_tables(backup)["results"]) == 2 * NUM_ROWS
    assert [path.name for path in rig.folder.glob("*backup.db*")] == ["backup.db"]
    assert backup.stat().st_mode & 0o777 == 0o600


@pytest.mark.nightly
def test_a_deployment_goes_on_from_a_backup(rig: DeploymentRig, store: Path) -> None:
    rig.ask("store", "backup", "backup.db")
    rig.call("down")
    for path in rig.home.glob("store.db*"):
        path.unlink()
    shutil.copy(rig.folder / "backup.db", store)

    rig.complete_job(NUM_ROWS)

    assert len(rig.ask("status")["jobs"]) == 2
    assert rig.call("store", "check").returncode == 0


def test_a_backup_of_a_faulty_store_is_written_and_says_so(rig: DeploymentRig) -> None:
    rig.home.mkdir()
    store = load_dump(rig.home / "store.db", HEAD)
    execute(store, "DELETE FROM bodies WHERE job_seq = 3 AND row = 3")

    done = rig.call("store", "backup", "backup.db")

    assert done.returncode == 1
    assert "row 3: has a result without a reply" in done.stdout
    assert read_tables(rig.folder / "backup.db") == read_tables(store)


def test_a_backup_takes_no_file_of_the_users(rig: DeploymentRig) -> None:
    rig.home.mkdir()
    store = load_dump(rig.home / "store.db", HEAD)
    (rig.folder / "notes.txt").write_text("mine")

    assert rig.refuse("store", "backup", "notes.txt")[0] == 2
    code, line = rig.refuse("store", "backup", str(store))

    assert (code, "is the store itself" in line) == (2, True)
    assert (rig.folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [("store", "check"), ("store", "backup", "b.db"), ("gc", "--older-than", "1d"), ("status",)],
)
def test_a_file_that_is_no_store_is_one_line(
    rig: DeploymentRig, arguments: tuple[str, ...]
) -> None:
    rig.home.mkdir()
    (rig.home / "store.db").write_text("not a store at all\n" * 100)

    code, line = rig.refuse(*arguments)

    assert (code, "not a batchrun store, or damaged" in line) == (4, True)
    assert not (rig.folder / "b.db").exists()


@pytest.mark.parametrize(
    "arguments",
    [("store", "check"), ("store", "backup", "b.db"), ("gc", "--older-than", "1d")],
)
def test_a_home_without_a_store_is_one_line(rig: DeploymentRig, arguments: tuple[str, ...]) -> None:
    code, line = rig.refuse(*arguments)

    assert code in {2, 4}
    assert str(rig.home) in line


@pytest.mark.slow
def test_a_store_that_another_keeps_locked_is_one_line(rig: DeploymentRig) -> None:
    rig.home.mkdir()
    path = load_dump(rig.home / "store.db", HEAD)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("BEGIN IMMEDIATE")

        code, line = rig.refuse("gc", "--older-than", "1d")

    assert (code, "locked by another process" in line) == (4, True)


def test_a_backup_that_finds_no_room_is_one_line_and_leaves_nothing(rig: DeploymentRig) -> None:
    rig.home.mkdir()
    grow_dump(load_dump(rig.home / "store.db", HEAD), num_rows=20_000)
    (rig.folder / "small").mkdir()
    script = (
        "mount -t tmpfs -o size=64k tmpfs small || exit 77; "
        f"{sys.executable} -m batchrun store backup small/b.db; echo $?; ls -A small"
    )

    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=rig.folder,
        env={**os.environ, "BATCHRUN_HOME": str(rig.home)},
        capture_output=True,
        text=True,
        check=False,
    )

    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.stdout == "4\n"
    assert done.stderr == "batchrun: small: no room for a copy of the store\n"
