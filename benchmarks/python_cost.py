"""What `batchrun.map` takes beside `batchrun submit --wait` of the same rows, on the fake engine.

    python -m benchmarks.python_cost --rows 10000 --rounds 3

Each round asks other rows of one running deployment, both ways in turn. Times are from the call to
the answers: a frame of them, or the output file.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import polars as pl

import batchrun
from batchrun.control.starting import start_in_background, stop_everything
from batchrun.home import Home
from benchmarks.deployment import free_port
from benchmarks.records import Bar, finish, parser

MAX_RATIO = 1.1

JOB_FILE = """\
name: cost
input: {path: rows.parquet, messages: [{role: user, content: "{{ text }}"}]}
request: {max_tokens: 8}
output: {path: out.parquet}
"""


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = Home(folder / "home")
        config = _configure(folder)
        try:
            start_in_background(home, ["--config", str(config)], is_shown=False)
            taken = [_round(folder, home, given.rows, number) for number in range(given.rounds)]
        finally:
            stop_everything(home)
    map_s, submit_s = (statistics.median(times) for times in zip(*taken, strict=True))
    ratio = map_s / submit_s
    record = {"rows": given.rows, "map_s": map_s, "submit_s": submit_s, "ratio": ratio}
    return finish(given.json, [record], [Bar("map over submit", ratio, MAX_RATIO, is_most=True)])


def _configure(folder: Path) -> Path:
    port = free_port()
    command = [sys.executable, "-m", "batchrun.engine.fake", f"--port={port}", "--model=fake"]
    document = {
        "listen": f"127.0.0.1:{free_port()}",
        "engines": [{"command": command, "port": port}],
    }
    path = folder / "batchrun.yaml"
    path.write_text(json.dumps(document))
    return path


def _round(folder: Path, home: Home, num_rows: int, number: int) -> tuple[float, float]:
    """Seconds of `map` and of a job file; which comes first changes from round to round."""
    ways = {"map": _by_map, "submit": _by_submit}
    order = sorted(ways, reverse=bool(number % 2))
    taken: dict[str, float] = {}
    for way in order:
        text = [f"{way} {number}: a question about thing {row}" for row in range(num_rows)]
        table = pl.DataFrame({"text": text})
        began_s = time.monotonic()
        ways[way](table, folder, home)
        taken[way] = time.monotonic() - began_s
    return taken["map"], taken["submit"]


def _by_map(table: pl.DataFrame, folder: Path, home: Home) -> None:
    del folder
    answered = batchrun.map(table, "{{ text }}", max_tokens=8, home=home.path, progress=False)
    assert answered["response"].null_count() == 0


def _by_submit(table: pl.DataFrame, folder: Path, home: Home) -> None:
    table.write_parquet(folder / "rows.parquet")
    path = folder / "job.yaml"
    path.write_text(JOB_FILE.replace("out.parquet", str(folder / "out.parquet")))
    job = batchrun.submit(path, home=home.path, progress=False).wait(progress=False)
    assert job.results().select(pl.col("response").null_count()).collect().item() == 0


if __name__ == "__main__":
    raise SystemExit(main())
