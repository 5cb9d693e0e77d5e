"""The main job, shown: a LooGLE batch beside bursty chat traffic, on one real engine.

    python -m benchmarks.demo [--json FILE] [--rows N] [--policy vllm]

Everything goes through the `batchrun` command and the OpenAI endpoint, as a user would; state and
output stay in the folder `demo/`.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchrun.simulator.replay import ReplayTarget, TokenRange, replay
from benchmarks.deployment import Deployment
from benchmarks.records import finish, parser
from benchmarks.replay import TraceShape, generate_trace, summarize

FOLDER = Path("demo")
JOB_FILE = Path("jobs/loogle.yaml")
MIN_ONLINE_CALLS = 50
SLO_TTFT_S = 1.0
SLO_TPOT_S = 0.1
TRACE = TraceShape(
    duration_s=45.0,
    rate_per_s=1.2,
    burst_factor=4.0,
    burst_period_s=15.0,
    burst_length_s=3.0,
    prompt=TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=300),
    output=TokenRange(mu=2.8, sigma=0.5, min_tokens=4, max_tokens=40),
)


def main() -> int:
    """Run the demo; 0 when every row is in the output and enough online calls were answered."""
    made = parser(__doc__)
    made.add_argument("--rows", type=int, default=96, help="rows of the LooGLE sample")
    made.add_argument("--policy", default="echo", help="the engine's; vllm: its own scheduler")
    options = made.parse_args()
    start_s = time.monotonic()
    deployment = Deployment(FOLDER)
    _prepare(deployment, options.rows, options.policy)
    _say("starting the gateway, the daemon and one CPU engine (about half a minute)")
    with deployment.running() as gateway:
        record = asyncio.run(_measure(deployment, gateway)) | {"policy": options.policy}
    record["demo_s"] = time.monotonic() - start_s
    finish(options.json, [record])
    return _report(record, options.rows)


def _prepare(deployment: Deployment, num_rows: int, policy: str) -> None:
    """A fresh folder with the job file, its data, and a deployment on free ports."""
    if FOLDER.exists():
        deployment.batchrun("down")
        shutil.rmtree(FOLDER)
    (FOLDER / "jobs").mkdir(parents=True)
    shutil.copy(JOB_FILE, FOLDER / "jobs" / JOB_FILE.name)
    engine = {"port": deployment.engine_port, "vllm_args": ["--max-num-batched-tokens", "512"]}
    slo = {"ttft_s": SLO_TTFT_S, "tpot_s": SLO_TPOT_S}
    deployment.configure(engine, model="tiny", policy=policy, slo=slo)
    _say(f"writing {num_rows} LooGLE-shaped rows and building the tiny model")
    (FOLDER / "datasets").mkdir()
    data = "datasets/loogle.parquet"
    deployment.batchrun("datasets", "sample", "loogle", "--rows", str(num_rows), "-o", data)
    deployment.batchrun("models", "tiny", "home/models/tiny")


async def _measure(deployment: Deployment, gateway: str) -> dict[str, Any]:
    """Submit the job, replay online traffic until both are through, and put figures together."""
    start_s = time.monotonic()
    job_id = deployment.batchrun("submit", "jobs/loogle.yaml")["id"]
    _say(f"{job_id} is running; replaying bursty chat traffic against {gateway}/v1 beside it")
    target = ReplayTarget(base_url=f"{gateway}/v1", model="tiny", extra_body={"ignore_eos": True})
    online = asyncio.create_task(replay(generate_trace(TRACE, seed=1), target))
    view = await _until_ended(deployment, job_id)
    job_s = time.monotonic() - start_s
    summary = summarize(await online, slo_ttft_s=SLO_TTFT_S, slo_tpot_s=SLO_TPOT_S)
    prompt, output = view["num_prompt_tokens"], view["num_output_tokens"]
    return {
        "scenario": "cpu-demo",
        "rows": view["num_rows"],
        "rows_failed": view["num_failed"],
        "job_s": job_s,
        "rows_per_s": view["num_completed"] / job_s,
        "computed_tokens_per_s": (prompt - view["num_cached_tokens"] + output) / job_s,
        "offline_tokens_per_s": (prompt + output) / job_s,
        "prefix_hit_rate": view["num_cached_tokens"] / prompt if prompt else 0.0,
        "output_path": view["output_path"],
        "rows_in_output": pq.read_metadata(view["output_path"]).num_rows,
        **summary,
    }


async def _until_ended(deployment: Deployment, job_id: str) -> dict[str, Any]:
    while True:
        view = await asyncio.to_thread(deployment.job, job_id)
        if view["state"] in {"completed", "failed", "paused", "cancelled", "expired"}:
            return view
        await asyncio.sleep(0.5)


def _report(record: dict[str, Any], num_rows: int) -> int:
    lines = {
        "rows done / failed": f"{record['rows'] - record['rows_failed']} / {record['rows_failed']}",
        "rows/s": f"{record['rows_per_s']:.2f}",
        "computed tokens/s": f"{record['computed_tokens_per_s']:,.0f}",
        "served tokens/s": f"{record['offline_tokens_per_s']:,.0f}",
        "prefix hit rate": f"{record['prefix_hit_rate']:.1%}",
        "online calls answered / failed": f"{record['answered']} / {record['failed']}",
        "online TTFT p50 / p99": _seconds(record, "ttft"),
        "online TPOT p50 / p99": _seconds(record, "tpot"),
        f"online within TTFT {SLO_TTFT_S:g} s, TPOT {SLO_TPOT_S:g} s": _share(record),
        "whole demo": f"{record['demo_s']:.0f} s",
    }
    _say("")
    for key, value in lines.items():
        _say(f"  {key:<40} {value:>18}")
    _say(f"\noutput: {record['output_path']}")
    is_whole = record["rows_in_output"] == record["rows"] == num_rows
    if not is_whole or record["answered"] < MIN_ONLINE_CALLS:
        _say(f"demo failed: {record['rows_in_output']} rows in the output")
        return 1
    _say(f"demo ok: {record['rows']} rows, {record['rows_failed']} failed")
    return 0


def _seconds(record: dict[str, Any], name: str) -> str:
    values = (record[f"{name}_p50_s"], record[f"{name}_p99_s"])
    return " / ".join("-" if value is None else f"{value:.3f}" for value in values) + " s"


def _share(record: dict[str, Any]) -> str:
    share = record["slo_attainment"]
    return "-" if share is None else f"{share:.1%}"


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
