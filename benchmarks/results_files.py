"""Reading back what `benchmarks.ablation` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.ablation_bars import Means, means_of


class ResultsMissingError(Exception):
    """No file, or no such record in it; the text says what to run."""


class Results:
    """The results in a folder, one pair of files for each scenario."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def means(self, scenario: str, blocks: int) -> Means:
        """Means over the seeds, by configuration. Raises ResultsMissingError."""
        path = self._folder / f"ablation-{scenario}.json"
        records = [record for record in _read(path, scenario) if record["blocks"] == blocks]
        if not records:
            raise _missing(path, scenario, f"nothing at {blocks} blocks")
        return means_of(records)

    def series(self, scenario: str, blocks: int, config: str) -> dict[str, Any]:
        """The columns of the watched run of a configuration. Raises ResultsMissingError."""
        path = self._folder / f"ablation-{scenario}-series.json"
        for record in _read(path, scenario):
            if record["blocks"] == blocks and record["config"] == config:
                return record
        raise _missing(path, scenario, f"nothing of {config} at {blocks} blocks")


def _read(path: Path, scenario: str) -> list[dict[str, Any]]:
    if not path.exists():
        raise _missing(path, scenario, "no such file")
    records: list[dict[str, Any]] = json.loads(path.read_text())["records"]
    return records


def _missing(path: Path, scenario: str, what: str) -> ResultsMissingError:
    command = f"python -m benchmarks.ablation --scenario {scenario} --json"
    return ResultsMissingError(
        f"{path}: {what}; run {command} {path.with_name(f'ablation-{scenario}.json')}"
    )
