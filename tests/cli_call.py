"""The command in this process, as a user calls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchrun.cli.main import main

Cli = Callable[..., tuple[int, str, str]]
"""Calls the command: (exit code, stdout, stderr)."""


def cli_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    """Calls the command in `folder`, with a home there and no daemon."""
    monkeypatch.setenv("BATCHRUN_HOME", str(folder / "home"))
    monkeypatch.chdir(folder)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchrun", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def line_of(answer: tuple[int, str, str], exit_code: int) -> str:
    """The one line on stderr of a refused command; nothing else was said."""
    code, out, err = answer
    assert (code, out, err.count("\n")) == (exit_code, "", 1), (out, err)
    assert err.startswith("batchrun: ")
    return err.removeprefix("batchrun: ").strip()


def dry_run_of(cli: Cli, *arguments: str) -> dict[str, Any]:
    """What a dry run of `job.yaml` prints as JSON; it says nothing else."""
    code, out, err = cli("submit", "job.yaml", "--dry-run", *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found
