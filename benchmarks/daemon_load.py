"""What a job costs the daemon: processor time per row, memory, and how soon `status` answers.

    python -m benchmarks.daemon_load [--rows N] [--json FILE]

A deployment with the fake engine, a process of its own, over HTTP, which answers each row after so
long that about 2,000 rows/s run. The rows have prompts of 200 tokens in groups that share half of
them. The daemon's processor time is read over the middle of the job and given as its share of a
core at 2,000 rows/s.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.cli.client import DaemonClient
from benchmarks.deployment import Deployment
from benchmarks.records import Bar, finish, parser

ROWS_PER_S = 2_000
WINDOW = {"requests": 256, "tokens": 2_000_000}
LATENCY_S = 0.1
"""With the time that a row spends outside the engine, a full window makes about 2,000 rows/s."""
GROUP_ROWS = 20
POLL_S = 0.5
WARM_SHARE = 0.1
JOB = """\
name: load
input: {path: rows.parquet, id: id, messages: [{role: user, content: "{{ text }}"}]}
request: {max_tokens: 8, temperature: 0}
output: {path: out.parquet}
"""


def main() -> int:
    """Run the job, print the bars."""
    made = parser(__doc__)
    made.add_argument("--rows", type=int, default=200_000)
    options = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchrun-load-") as folder:
        record = measure(Deployment(Path(folder)), options.rows)
    return finish(options.json, [record], bars(record))


def bars(record: dict[str, float]) -> Iterator[Bar]:
    """What was asked for, and what to read beside it."""
    yield Bar("rows/s", record["rows_per_s"])
    yield Bar("daemon, microseconds of CPU a row", record["cpu_us_per_row"])
    yield Bar("daemon, share of a core at 2,000 rows/s", record["core_share"], 0.75, is_most=True)
    yield Bar("status, slowest answer in s", record["status_max_s"], 0.1, is_most=True)
    yield Bar("status, median in s", record["status_median_s"])
    yield Bar("daemon, resident MB", record["resident_mb"])


def measure(deployment: Deployment, num_rows: int) -> dict[str, float]:
    """One job from start to end."""
    texts = [
        f"document {row // GROUP_ROWS} ".ljust(400, "d") + f"question {row} ".ljust(400, "q")
        for row in range(num_rows)
    ]
    table = pa.table({"id": [f"row-{row}" for row in range(num_rows)], "text": texts})
    pq.write_table(table, deployment.folder / "rows.parquet")
    (deployment.folder / "job.yaml").write_text(JOB)
    deployment.configure(deployment.fake_engine(LATENCY_S), window=WINDOW)
    with deployment.running():
        daemon = psutil.Process(deployment.daemon_pid)
        deployment.batchrun("submit", "job.yaml")
        samples = list(_watch(DaemonClient(deployment.home), daemon, num_rows))
    first = next(s for s in samples if s[1] >= WARM_SHARE * num_rows)
    last = next(s for s in reversed(samples) if s[1] < num_rows)
    rows, cpu_s, span_s = (last[i] - first[i] for i in (1, 2, 0))
    answers_s = sorted(sample[3] for sample in samples)
    return {
        "rows": num_rows,
        "rows_per_s": rows / span_s,
        "cpu_us_per_row": 1e6 * cpu_s / rows,
        "core_share": ROWS_PER_S * cpu_s / rows,
        "status_max_s": answers_s[-1],
        "status_median_s": answers_s[len(answers_s) // 2],
        "resident_mb": max(sample[4] for sample in samples) / 1e6,
    }


def _watch(
    client: DaemonClient, daemon: psutil.Process, num_rows: int
) -> Iterator[tuple[float, int, float, float, int]]:
    """(instant, rows done, CPU seconds, seconds for the answer, resident bytes), until the end."""
    while True:
        began_s = time.monotonic()
        (view,) = client.get("/status")["jobs"]
        answer_s = time.monotonic() - began_s
        times = daemon.cpu_times()
        done = view["num_completed"] + view["num_failed"]
        yield began_s, done, times.user + times.system, answer_s, daemon.memory_info().rss
        if view["state"] not in {"validating", "running", "finalizing"} or done >= num_rows:
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    raise SystemExit(main())
