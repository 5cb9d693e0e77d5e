"""What `batchrun.map` takes beside `batchrun submit --wait` of the same rows, on the fake engine.

    python -m benchmarks.python_cost --rows 10000 --rounds 7

Each round asks other rows of one running deployment, both ways in turn. Times are from the call to
the answers: a frame of them, or the output file. By the clock, and in CPU seconds of this process,
the daemon, the gateway and the engine together, which other work on the machine moves little. The
ratios are medians over the rounds; a small round before them is not counted.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import psutil

import batchrun
from benchmarks.deployment import Deployment
from benchmarks.records import Bar, Record, finish, parser, shown

MAX_RATIO = 1.1

MESSAGES = [{"role": "user", "content": "{{ text }}"}]


def main() -> int:
    given = parser(__doc__, rows=10_000, rounds=7).parse_args()
    with tempfile.TemporaryDirectory() as name:
        rounds = shown(measure(Deployment(Path(name)), given.rows, given.rounds))
    keys = [key for key in rounds[0] if key not in {"kind", "round"}]
    medians = {key: statistics.median(each[key] for each in rounds) for key in keys}
    bars = [Bar(key, medians[key], MAX_RATIO, is_most=True) for key in ("ratio", "cpu_ratio")]
    return finish(given.json, [*rounds, {"kind": "medians", **medians}], bars)


def measure(deployment: Deployment, num_rows: int, num_rounds: int) -> Iterator[Record]:
    """A record of each round; which way comes first changes from one to the next."""
    command = [sys.executable, "-m", "batchrun.engine.fake", "--model=fake"]
    port = deployment.engine_port
    deployment.configure({"command": [*command, f"--port={port}"], "port": port})
    ways: dict[str, Callable[[pl.DataFrame, Deployment], None]]
    ways = {"map": _by_map, "submit": _by_submit}
    with deployment.running():
        for way in ways:
            ways[way](_table(f"{way} warms up", 100), deployment)
        for number in range(num_rounds):
            found = {}
            for way in sorted(ways, reverse=bool(number % 2)):
                table = _table(f"{way} {number}", num_rows)
                before_s, began_s = _cpu_seconds(deployment), time.monotonic()
                ways[way](table, deployment)
                found[f"{way}_s"] = time.monotonic() - began_s
                found[f"{way}_cpu_s"] = _cpu_seconds(deployment) - before_s
            found["ratio"] = found["map_s"] / found["submit_s"]
            found["cpu_ratio"] = found["map_cpu_s"] / found["submit_cpu_s"]
            yield {"kind": "round", "round": number, "rows": num_rows, **found}


def _table(name: str, num_rows: int) -> pl.DataFrame:
    return pl.DataFrame({
        "text": [f"{name}: a question about thing {row}" for row in range(num_rows)]
    })


def _cpu_seconds(deployment: Deployment) -> float:
    """Of this process and all of the deployment so far."""
    parts = [psutil.Process(deployment.pid_of(part)) for part in ("daemon", "gateway", "engine")]
    processes = {psutil.Process(), *parts, *(child for each in parts for child in each.children())}
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _by_map(table: pl.DataFrame, deployment: Deployment) -> None:
    home = deployment.home.path
    answered = batchrun.map(table, "{{ text }}", max_tokens=8, home=home, progress=False)
    assert answered["response"].null_count() == 0


def _by_submit(table: pl.DataFrame, deployment: Deployment) -> None:
    folder, home = deployment.folder, deployment.home.path
    table.write_parquet(folder / "rows.parquet")
    given = {"path": "rows.parquet", "messages": MESSAGES}
    job_file = {"name": "cost", "input": given, "request": {"max_tokens": 8}}
    path = folder / "job.yaml"
    path.write_text(json.dumps({**job_file, "output": {"path": str(folder / "out.parquet")}}))
    job = batchrun.submit(path, home=home, progress=False).wait(progress=False)
    assert job.results().select(pl.col("response").null_count()).collect().item() == 0


if __name__ == "__main__":
    raise SystemExit(main())
