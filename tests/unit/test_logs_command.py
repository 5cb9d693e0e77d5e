"""`batchrun logs`: the end of a log, and what is added to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_call import Cli, cli_in, line_of

from batchrun.cli.operate.logs import BLOCK_BYTES, LogFile


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command over logs of a daemon and two engines."""
    folder = tmp_path / "home" / "log"
    folder.mkdir(parents=True)
    for name in ("daemon", "engine-a", "engine-b"):
        (folder / f"{name}.log").write_text("".join(f"{name} says {i}\n" for i in range(5)))
    return cli_in(tmp_path, monkeypatch, capsys)


def test_the_end_of_a_log_is_shown(cli: Cli) -> None:
    assert cli("logs", "-n", "2") == (0, "daemon says 3\ndaemon says 4\n", "")
    assert cli("logs", "a", "-n", "1") == (0, "engine-a says 4\n", "")
    assert cli("logs", "engine", "-n", "1")[1] == (
        "engine-a: engine-a says 4\nengine-b: engine-b says 4\n"
    )


def test_what_has_no_log_is_said(cli: Cli) -> None:
    assert "gateway: nothing was logged yet in " in line_of(cli("logs", "gateway"), 2)
    assert "demon: no such log (did you mean 'daemon'?); there are daemon, engine-a" in line_of(
        cli("logs", "demon"), 2
    )


@pytest.mark.parametrize("num_lines", [0, 1, 7, 20_000, 30_000])
def test_the_last_lines_are_the_last_lines(tmp_path: Path, num_lines: int) -> None:
    path = tmp_path / "long.log"
    text = [f"line {i} ä" for i in range(20_000)]
    path.write_text("\n".join(text) + "\n")
    assert path.stat().st_size > 3 * BLOCK_BYTES

    assert list(LogFile(path).last_lines(num_lines)) == (text[-num_lines:] if num_lines else [])


def test_following_shows_what_is_added_in_whole_lines(cli: Cli, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "batchrun", "logs", "-f", "-n", "1", "--home", "home"]
    path = tmp_path / "home" / "log" / "daemon.log"
    shown = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert shown.stdout is not None
        assert shown.stdout.readline() == "daemon says 4\n"
        with path.open("a") as file:
            file.write("half ")
            file.flush()
            file.write("a line\nand more\n")
        assert shown.stdout.readline() == "half a line\n"
        assert shown.stdout.readline() == "and more\n"
        path.write_text("begun anew\n")
        assert shown.stdout.readline() == "begun anew\n"
    finally:
        shown.kill()
        shown.communicate()
