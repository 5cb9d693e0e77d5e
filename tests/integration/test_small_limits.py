"""`batchrun up -d` where the system allows too little, or where the daemon cannot start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deployment_rig import WAIT_S, DeploymentRig

from batchrun.engine import process

NOT_ROOT = (
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *("--inh-caps=+dac_override", "--ambient-caps=+dac_override"),
)
"""Root is held by no limit of threads: as another user, who may read and write all the same."""


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (
            "--as=100000000",
            "a command needs 400 MB of address space, and 100 are allowed: raise the limit",
        ),
        ("--as=500000000", "a daemon needs 1,000 MB of address space, and 500 are allowed: raise"),
        ("--nofile=40", "a daemon needs 64 open files, and 40 are allowed: raise the limit"),
        ("--nproc=3", "a daemon needs .* more threads, and . are allowed: raise the limit"),
        ("--nproc=12", "a daemon needs .* more threads, and 10 are allowed: raise the limit"),
    ],
)
def test_a_start_with_too_little_ends_at_once_in_one_line(
    rig: DeploymentRig, limit: str, said: str
) -> None:
    rig.use_fake_engine()
    needs_user = "nproc" in limit and os.getuid() == 0
    done = subprocess.run(
        [
            *(NOT_ROOT if needs_user else ()),
            *("prlimit", limit, sys.executable, "-m", "batchrun", "up", "-d"),
        ],
        cwd=rig.folder,
        env={**os.environ, "BATCHRUN_HOME": str(rig.home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert re.search(said, done.stderr)
    assert not rig.home.exists()


def test_a_start_that_fails_leaves_nothing_that_did_not_run_before(rig: DeploymentRig) -> None:
    rig.configure({"attach": "http://127.0.0.1:1"})
    code, line = rig.refuse("up", "-d")

    assert code == 4 and "nothing answers at" in line
    assert [name for name in ("gateway", "daemon") if _lives(rig, name)] == []
    assert rig.ask("down")["stopped"] == []


def test_a_start_that_fails_ends_no_engine_that_answers_calls(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    rig.kill("daemon")
    for place in rig.home.glob("store.db*"):
        place.unlink()
    rig.home.joinpath("store.db").write_bytes(b"no store at all" * 1_000)
    code, _ = rig.refuse("up", "-d")

    assert code == 4
    assert sorted(rig.ask("down")["stopped"]) == ["engine 0", "gateway"]


def _lives(rig: DeploymentRig, name: str) -> bool:
    record = process.read_record(Path(rig.home / "run" / f"{name}-process.json"))
    return record is not None and process.is_alive(record)
