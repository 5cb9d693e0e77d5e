"""Recorded results have one form, name commits that are there, and stand on the manual's page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.records import RESULTS, read_runs, write_records
from benchmarks.results_page import PAGE, SECTIONS, page

FILES = sorted(RESULTS.iterdir())
META = {"command", "date", "commit", "commit_in_repository", "versions", "machine"}
SERIES = {"ablation-series"}
"""Drawn, not tabled."""


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(RESULTS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_a_meta_line_for_each_run_and_a_flat_line_for_each_record(path: Path) -> None:
    runs = read_runs(path)

    assert path.suffix == ".jsonl"
    assert all(set(run.meta) == META and run.records for run in runs)
    assert all(run.meta["command"].startswith("python -m benchmarks.") for run in runs)
    assert [run.meta["date"] for run in runs] == sorted(run.meta["date"] for run in runs)
    values = [value for run in runs for record in run.records for value in record.values()]
    assert not any(isinstance(value, dict) for value in values)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_commit_that_is_said_to_be_in_the_repository_is_there(path: Path) -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history of the repository is not here")
    for run in read_runs(path):
        commit = str(run.meta["commit"])
        is_there = git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0
        is_there &= git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
        assert is_there or not run.meta["commit_in_repository"], commit


def test_every_file_stands_on_the_page() -> None:
    assert {path.stem for path in FILES} <= SECTIONS.keys() | SERIES


def test_the_page_of_results_is_what_the_command_makes() -> None:
    assert PAGE.read_text() == page(RESULTS)


def test_what_is_written_reads_back_as_one_run(tmp_path: Path) -> None:
    write_records(tmp_path / "new.jsonl", [{"rows": 1, "rate_per_s": None}, {"rows": 2}])

    (run,) = read_runs(tmp_path / "new.jsonl")

    assert set(run.meta) == META
    assert run.records == [{"rows": 1, "rate_per_s": None}, {"rows": 2}]


def test_a_run_replaces_one_by_the_same_command_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool.jsonl"
    for rows in ("10", "20", "10"):
        monkeypatch.setattr("sys.argv", ["pool.py", "--rows", rows, "--json", str(path)])
        write_records(path, [{"rows": int(rows)}])

    runs = read_runs(path)

    assert [run.meta["command"] for run in runs] == [
        "python -m benchmarks.pool --rows 20",
        "python -m benchmarks.pool --rows 10",
    ]
    assert [run.records for run in runs] == [[{"rows": 20}], [{"rows": 10}]]


def test_a_file_of_another_form_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"records": []}\n')

    with pytest.raises(ValueError, match=r"old\.json:1: is not a line"):
        read_runs(tmp_path / "old.json")
