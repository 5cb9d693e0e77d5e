"""What the page costs: how soon a view comes, and what an open page takes of the daemon.

    python -m benchmarks.page_cost [--jobs 1000] [--engines 16] [--watch-s 30] [--json FILE]

A whole deployment with so many jobs in its store and so many engines (all names of one fake engine)
answers each view 20 times; then one page stays open. The daemon's processor time is that of its
process, with and without the page. A change is seen as soon as an open page is told of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import requests

from batchrun.control.client import DaemonClient
from batchrun.home import Home
from batchrun.store import jobs
from batchrun.store.database import open_store
from batchrun.types import JobState
from benchmarks.deployment import Deployment
from benchmarks.records import Bar, Record, finish, parser

VIEWS = ("jobs", "submit", "promises", "tide", "memory", "engines", "routing", "plan", "keys")
NUM_LOOKS = 20
LOOK_EVERY_S = 0.25
MAX_VIEW_S = 0.2
MAX_CHANGE_S = 2.0
MAX_SHARE = 0.01


def fill_store(home: Home, num_jobs: int) -> None:
    """So many jobs that have ended."""
    home.create()
    with closing(open_store(home.store)) as store:
        for number in range(num_jobs):
            spec = json.dumps({"output": {"path": f"out-{number}.parquet"}})
            new = jobs.NewJob(f"job {number}", spec, "{}", f"hash {number}", 100)
            record = jobs.create(store, new, now_s=time.time())
            jobs.start(store, record.id, now_s=time.time())
            jobs.begin_finalizing(store, record.id, JobState.FAILED, now_s=time.time())
            jobs.finish(store, record.id, now_s=time.time(), reason="the input is gone")


def use_engines(deployment: Deployment, num_engines: int) -> None:
    """batchrun.yaml with one fake engine that has many names and addresses."""
    port = deployment.engine_port
    fake = [sys.executable, "-m", "batchrun.engine.fake", f"--port={port}", "--model=fake"]
    others = [
        {"name": f"engine-{i}", "attach": f"http://127.0.0.1:{port}/{i}/..", "api_key": "page"}
        for i in range(1, num_engines)
    ]
    env = {"VLLM_API_KEY": "page"}
    first = {"name": "engine-0", "command": fake, "port": port, "env": env}
    deployment.configure(first, engines=[first, *others])


def time_views(url: str) -> dict[str, dict[str, float]]:
    """Seconds of each view, from a new connection to the last byte."""
    found = {}
    for view in VIEWS:
        seconds = []
        for _ in range(NUM_LOOKS):
            time.sleep(LOOK_EVERY_S)
            began_s = time.perf_counter()
            assert requests.get(f"{url}/{view}", timeout=60).status_code == 200
            seconds.append(time.perf_counter() - began_s)
        p50, p95 = np.percentile(seconds, [50, 95]).tolist()
        found[view] = {"p50_s": p50, "p95_s": p95}
    return found


def time_changes(url: str, home: Home) -> dict[str, float]:
    """Seconds from the switch of offline work until an open page is told."""
    seconds = []
    with requests.get(f"{url}/events/jobs", stream=True, timeout=60) as stream:
        lines = stream.iter_lines()
        for number in range(NUM_LOOKS):
            is_on = number % 2 == 1
            began_s = time.perf_counter()
            DaemonClient(home).post("/offline", {"on": is_on})
            word = b">on" if is_on else b">off"
            while b"Offline work" not in (line := next(lines)) or word not in line:
                continue
            seconds.append(time.perf_counter() - began_s)
    p50, p95 = np.percentile(seconds, [50, 95]).tolist()
    return {"p50_s": p50, "p95_s": p95}


def daemon_share(daemon: psutil.Process, span_s: float) -> float:
    """The part of a core that the daemon takes over so many seconds."""
    before, began_s = sum(daemon.cpu_times()[:2]), time.monotonic()
    time.sleep(span_s)
    return (sum(daemon.cpu_times()[:2]) - before) / (time.monotonic() - began_s)


def main() -> int:
    options = parser(__doc__, jobs=1_000, engines=16, watch_s=30.0).parse_args()
    with tempfile.TemporaryDirectory() as name:
        records = list(measure(Path(name), options))
    return finish(options.json, records, bars(records))


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """Bounds of a view and of an open page."""
    for record in records:
        if record["what"] == "page":
            name = "share of a core for an open page"
            yield Bar(name, record["page_share"], MAX_SHARE, is_most=True)
        else:
            most_s = MAX_CHANGE_S if record["what"] == "change" else MAX_VIEW_S
            yield Bar(f"{record['what']}: p95 s", record["p95_s"], most_s, is_most=True)


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Record]:
    """All figures of one deployment."""
    case = {"jobs": options.jobs, "engines": options.engines}
    deployment = Deployment(folder)
    fill_store(deployment.home, options.jobs)
    use_engines(deployment, options.engines)
    with deployment.running() as gateway:
        url = f"{gateway}/dashboard"
        daemon = psutil.Process(deployment.pid_of("daemon"))
        for view, seconds in time_views(url).items():
            yield {"what": view, **case, **seconds}
        yield {"what": "change", **case, **time_changes(url, deployment.home)}
        alone = daemon_share(daemon, options.watch_s)
        with requests.get(f"{url}/events/jobs", stream=True, timeout=60):
            watched = daemon_share(daemon, options.watch_s)
        share = {"daemon_share": alone, "page_share": watched - alone}
        yield {"what": "page", **case, **share}


if __name__ == "__main__":
    raise SystemExit(main())
