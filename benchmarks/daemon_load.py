"""What a job costs the daemon: processor time per row, memory, and how soon `status` answers.

    python -m benchmarks.daemon_load [--rows N] [--agents N] [--json FILE]

A deployment with the fake engine, a process of its own, over HTTP, which answers each row after so
long that about 2,000 rows/s run; with `--agents` so many of them, each with its agent. The rows
have prompts of 200 tokens in groups that share half of them. The daemon's processor time is read
over the middle of the job and given as its share of a core at 2,000 rows/s; that of the agents and
of their engines beside it, since all share the machine's cores.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from benchmarks.deployment import Deployment
from benchmarks.records import Bar, Record, finish, parser, shown

ROWS_PER_S = 2_000
WINDOW = {"requests": 256, "tokens": 2_000_000}
LATENCY_S = 0.1
"""With the time that a row spends outside the engine, a full window makes about 2,000 rows/s."""
GROUP_ROWS = 20
POLL_S = 0.5
WARM_SHARE = 0.1


def main() -> int:
    """Run the job, print the bars."""
    options = parser(__doc__, rows=200_000, agents=0).parse_args()
    with tempfile.TemporaryDirectory(prefix="batchrun-load-") as folder:
        measured = measure(Deployment(Path(folder)), options.rows, options.agents)
        (record,) = records = shown([measured])
    bars = [
        Bar("daemon, share of a core at 2,000 rows/s", record["core_share"], 0.75, is_most=True),
        Bar("status, slowest answer in s", record["status_max_s"], 0.1, is_most=True),
    ]
    return finish(options.json, records, bars)


def measure(deployment: Deployment, num_rows: int, num_agents: int) -> Record:
    """One job from start to end."""
    deployment.use_fake_engine(LATENCY_S, window=WINDOW)
    if num_agents:
        deployment.use_agents(num_agents, LATENCY_S, window=WINDOW)
    for name in deployment.agents:
        deployment.start_agent(name)
    job = deployment.write_job("load", num_rows, text=_text)
    with deployment.running():
        daemon = psutil.Process(deployment.pid_of("daemon"))
        records = [deployment.home.agent_process(name) for name in deployment.agents]
        agents = [psutil.Process(json.loads(each.read_text())["pid"]) for each in records]
        engines = [child for agent in agents for child in agent.children(recursive=True)]
        deployment.batchrun("submit", job.name)
        parts = [daemon], agents, engines
        samples = np.array(list(_watch(deployment, parts, num_rows)))
    done = samples[:, 1]
    inside = samples[(done >= WARM_SHARE * num_rows) & (done < num_rows)]
    span_s, rows, cpu_s, agents_s, engines_s = (inside[-1] - inside[0])[:5]
    return {
        "rows": num_rows,
        "num_agents": num_agents,
        "rows_per_s": float(rows / span_s),
        "cpu_us_per_row": float(1e6 * cpu_s / rows),
        "agents_us_per_row": float(1e6 * agents_s / rows),
        "engines_us_per_row": float(1e6 * engines_s / rows),
        "core_share": float(ROWS_PER_S * cpu_s / rows),
        "status_max_s": float(samples[:, 5].max()),
        "status_median_s": float(np.median(samples[:, 5])),
        "resident_mb": float(samples[:, 6].max() / 1e6),
    }


def _text(_name: str, row: int) -> str:
    return f"document {row // GROUP_ROWS} ".ljust(400, "d") + f"question {row} ".ljust(400, "q")


def _watch(
    deployment: Deployment, parts: Sequence[Sequence[psutil.Process]], num_rows: int
) -> Iterator[list[float]]:
    """Instant, rows done, CPU seconds of each part, seconds for the answer, and resident bytes of
    the first part, until the end."""
    while True:
        began_s = time.monotonic()
        (view,) = deployment.client.get("/status")["jobs"]
        answer_s = time.monotonic() - began_s
        spent_s = [sum(sum(each.cpu_times()[:2]) for each in part) for part in parts]
        resident_bytes = parts[0][0].memory_info().rss
        done = view["num_completed"] + view["num_failed"]
        yield [began_s, done, *spent_s, answer_s, resident_bytes]
        if view["state"] not in {"validating", "running", "finalizing"} or done >= num_rows:
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    raise SystemExit(main())
