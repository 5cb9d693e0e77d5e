"""What the page costs: how soon a view comes, and what an open page takes of the daemon.

    python -m benchmarks.page_cost [--jobs 1000] [--engines 16] [--watch-s 30] [--json FILE]

A whole deployment with so many jobs in its store and so many engines (all names of one fake engine)
answers each view 20 times; then one page stays open. The daemon's processor time
is that of its process, with and without the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import requests

from batchrun.home import Home
from batchrun.store import jobs
from batchrun.store.database import open_store
from benchmarks.deployment import Deployment

VIEWS = ("jobs", "promises", "tide", "memory", "engines", "routing", "plan", "keys")
NUM_LOOKS = 20
LOOK_EVERY_S = 0.25
MAX_VIEW_S = 0.2
MAX_SHARE = 0.01


def fill_store(home: Home, num_jobs: int) -> None:
    """So many jobs that have ended."""
    home.create()
    with closing(open_store(home.store)) as store:
        for number in range(num_jobs):
            spec = json.dumps({"output": {"path": f"out-{number}.parquet"}})
            new = jobs.NewJob(f"job {number}", spec, "{}", f"hash {number}", 100)
            record = jobs.create(store, new, now_s=time.time())
            jobs.fail(store, record.id, "the input is gone", now_s=time.time())


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


def daemon_share(daemon: psutil.Process, span_s: float) -> float:
    """The part of a core that the daemon takes over so many seconds."""
    before, began_s = sum(daemon.cpu_times()[:2]), time.monotonic()
    time.sleep(span_s)
    return (sum(daemon.cpu_times()[:2]) - before) / (time.monotonic() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--watch-s", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), options)
    found["is_quick"] = all(view["p95_s"] <= MAX_VIEW_S for view in found["views"].values())
    found["is_cheap"] = found["page_share"] <= MAX_SHARE
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one deployment."""
    deployment = Deployment(folder)
    fill_store(deployment.home, options.jobs)
    use_engines(deployment, options.engines)
    with deployment.running() as gateway:
        url = f"{gateway}/dashboard"
        daemon = psutil.Process(deployment.pid_of("daemon"))
        views = time_views(url)
        alone = daemon_share(daemon, options.watch_s)
        with requests.get(f"{url}/events/jobs", stream=True, timeout=60):
            watched = daemon_share(daemon, options.watch_s)
        return {
            "jobs": options.jobs,
            "engines": options.engines,
            "views": views,
            "share_without_page": alone,
            "share_with_page": watched,
            "page_share": watched - alone,
        }


if __name__ == "__main__":
    main()
