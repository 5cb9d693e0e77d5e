"""The main job, shown: a LooGLE batch beside bursty chat traffic, on one real engine.

    python -m benchmarks.demo [--json FILE] [--rows N] [--policy vllm]

Everything goes through the `batchrun` command and the OpenAI endpoint, as a user would; state and
output stay in the folder `demo/`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchrun.errors import BatchrunError
from batchrun.simulator.replay import ReplayTarget, TokenRange, replay
from benchmarks.deployment import Deployment
from benchmarks.records import Bar, finish, parser
from benchmarks.replay import TraceShape, generate_trace, summarize, table

say = partial(print, flush=True)

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
    options = parser(__doc__, rows=96, policy="echo").parse_args()
    start_s = time.monotonic()
    deployment = Deployment(FOLDER)
    _prepare(deployment, options.rows, options.policy)
    say("starting the gateway, the daemon and one CPU engine (about half a minute)")
    with deployment.running() as gateway:
        try:
            record = asyncio.run(_measure(deployment, gateway)) | {"policy": options.policy}
        except BatchrunError as error:
            say(f"demo failed: {error}")
            return 1
    record["demo_s"] = time.monotonic() - start_s
    say(table(record))
    wrong_rows = max(abs(record[key] - options.rows) for key in ("rows", "rows_in_output"))
    bars = [
        Bar("rows too few or too many in the output", wrong_rows, 0, is_most=True),
        Bar("online calls answered", record["answered"], MIN_ONLINE_CALLS),
    ]
    code = finish(options.json, [record], bars)
    say("demo failed" if code else "demo ok")
    return code


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
    say(f"writing {num_rows} LooGLE-shaped rows and building the tiny model")
    (FOLDER / "datasets").mkdir()
    data = "datasets/loogle.parquet"
    deployment.batchrun("datasets", "sample", "loogle", "--rows", str(num_rows), "-o", data)
    deployment.batchrun("models", "tiny", "home/models/tiny")


async def _measure(deployment: Deployment, gateway: str) -> dict[str, Any]:
    """Submit the job, replay online traffic until both are through, and put figures together."""
    start_s = time.monotonic()
    say(f"submitting the job; replaying bursty chat traffic against {gateway}/v1 beside it")
    target = ReplayTarget(base_url=f"{gateway}/v1", model="tiny", extra_body={"ignore_eos": True})
    online = asyncio.create_task(replay(generate_trace(TRACE, seed=1), target))
    view = await asyncio.to_thread(deployment.batchrun, "submit", "jobs/loogle.yaml", "--wait")
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


if __name__ == "__main__":
    raise SystemExit(main())
