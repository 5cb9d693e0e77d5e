"""What a program does not load before it needs it, and what a start tells of the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from batchrun.control.starting import _remember_start, _usual_start, stop_everything
from batchrun.engine import process
from batchrun.home import Home


@pytest.mark.parametrize(
    "module",
    [
        "batchrun.cli.main",
        "batchrun.cli.jobs",
        "batchrun.server.gateway.app",
        "batchrun.daemon.daemon",
    ],
)
def test_programs_start_without_polars(module: str) -> None:
    program = f"import sys, {module}; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_good_as_dev_null(closed: str) -> None:
    said = subprocess.run(
        ["sh", "-c", f'exec "$0" -m batchrun version {closed}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert bool(said.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_a_start_says_how_long_the_last_one_took(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    said = [_usual_start(home)]
    for took_s in (31.2, 0.4):
        _remember_start(home, took_s)
        said.append(_usual_start(home))

    assert said == ["", *[" (the last start took 31 s)"] * 2]


def test_down_leaves_replicas_on_this_node_to_whoever_leads(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    records = [
        process.spawn(["sleep", "60"], env={}, log_path=home.log / "a", record_path=path)
        for path in (home.agent_process("a"), home.replica_process("fleet-0"))
    ]
    try:
        assert stop_everything(home) == ["agent of engine a"]
        assert [process.is_alive(record) for record in records] == [False, True]
    finally:
        process.terminate(records[1], 1.0)
