"""`batchrun logs`: the end of a log, and what is added to it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from cli_call import Cli, cli_in, line_of

from batchrun.cli.operate.logs import BLOCK_BYTES, LogFile
from batchrun.errors import UNSAFE
from batchrun.files import StoreLock
from batchrun.home import Home
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.store import jobs, results
from batchrun.store.database import open_store
from batchrun.types import Outcome, OutcomeKind, RowError

JOB = """\
name: odd
input:
  path: rows.jsonl
  id: id
  messages: [{role: user, content: "{{ text }}"}]
output: {path: out.jsonl}
"""


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


def test_of_a_daemon_in_the_foreground_it_is_said_where_its_log_is(
    cli: Cli, tmp_path: Path
) -> None:
    with StoreLock(Home(tmp_path / "home").store_lock):
        assert "was not started by `up -d`" in line_of(cli("logs"), 2)
        assert cli("logs", "engine", "-n", "1")[0] == 0


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


ODD = "\x1b]0;owned\x07\x1b[2J \x9b31m \u202egnp"


@pytest.mark.parametrize("part", ["daemon", "engine"])
def test_a_log_gives_a_terminal_nothing_to_obey(cli: Cli, tmp_path: Path, part: str) -> None:
    for path in (tmp_path / "home" / "log").iterdir():
        path.write_bytes(f"loads {ODD}\r50 %\r\nbytes ".encode() + b"\x9b\xff\n")

    code, shown, _ = cli("logs", part)

    assert code == 0 and UNSAFE.findall(shown) == []
    assert "loads \ufffd]0;owned\ufffd" in shown and "50 %\n" in shown


def test_what_is_added_to_a_log_gives_a_terminal_nothing_to_obey(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.touch()
    log = LogFile(path)
    path.write_text(f"says {ODD}\r\nhalf \x1b")

    (line,) = log.new_lines()
    assert line.startswith("says \ufffd]0;owned") and UNSAFE.findall(line) == []


def test_errors_give_a_terminal_nothing_to_obey(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an engine said of a row, and whatever the row is called."""
    home = Home(tmp_path / "home")
    for folder in (home.path, home.inputs):
        folder.mkdir(exist_ok=True)
    rows = [json.dumps({"id": f"row {row} {ODD}", "text": "x"}) for row in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "job.yaml").write_text(JOB)
    spec = load_job_file(tmp_path / "job.yaml", cwd=tmp_path)
    with closing(open_store(home.store_location)) as store:
        record = jobs.create(store, prepare_job(spec, links=home.inputs), now_s=1.0)
        error = RowError(f"code {ODD}", f"engine says {ODD}", 400)
        for row in range(2):
            outcome = Outcome(record.id, row, 1, OutcomeKind.ROW_ERROR, error=error)
            results.commit(store, [(record.seq, outcome)], now_s=2.0)

    for options in ([], ["--json"]):
        code, shown, err = cli("errors", record.id, *options)
        assert (code, err) == (0, "") and UNSAFE.findall(shown) == []
        assert all(said in shown for said in ("engine says", "code", "row", "owned"))
    monkeypatch.setattr("batchrun.cli.results.MOST_GROUPED", 1)
    assert cli("errors", record.id)[2] == "of the first 1 of 2 failed rows\n"


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
