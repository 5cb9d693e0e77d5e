"""The real side of `benchmarks.fidelity`: calibrate the CPU engine, run a job beside chats."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from batchrun.estimator import CalibrationProfile, profile_from_json
from batchrun.replay import ReplayTarget, TokenRange, TraceShape, generate_trace, replay
from batchrun.replay.results import OnlineResult, percentile
from batchrun.replay.trace import Arrival
from batchrun.vllm_plugin.virtual import Slo
from benchmarks.ports import free_port

FOLDER = Path("fidelity")
TOKEN_BUDGET, MAX_NUM_SEQS, MAX_MODEL_LEN = 512, 64, 32_768
SLO = Slo(1.0, 0.1)
NUM_LONE_CALLS = 8
CHAT = TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=300)
ANSWER = TokenRange(mu=2.8, sigma=0.5, min_tokens=4, max_tokens=40)

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """A job of `num_rows` LooGLE-shaped rows with answers of a fixed length, beside chats."""

    name: str
    rate_per_s: float
    burst_factor: float
    num_rows: int
    output_tokens: int

    def arrivals(self, duration_s: float) -> list[Arrival]:
        """The chats; the same in every repeat."""
        shape = TraceShape(
            duration_s=duration_s,
            rate_per_s=self.rate_per_s,
            burst_factor=self.burst_factor,
            burst_period_s=30.0,
            burst_length_s=5.0,
            prompt=CHAT,
            output=ANSWER,
        )
        return generate_trace(shape, seed=1)


WORKLOADS = (
    Workload("calm", 0.5, 2.0, 6_000, 16),
    Workload("bursty", 1.2, 4.0, 6_000, 16),
    Workload("long-answers", 0.8, 4.0, 6_000, 64),
)


def prepare() -> CalibrationProfile:
    """A fresh folder, a deployment on free ports, and the engine's profile."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    limits = {
        "--max-num-batched-tokens": TOKEN_BUDGET,
        "--max-num-seqs": MAX_NUM_SEQS,
        "--max-model-len": MAX_MODEL_LEN,
    }
    arguments = [str(part) for pair in limits.items() for part in pair]
    deployment = {
        "model": "tiny",
        "listen": f"127.0.0.1:{free_port()}",
        "engines": [{"port": free_port(), "vllm_args": arguments, "profile": "profile.json"}],
        "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
    }
    (FOLDER / "batchrun.yaml").write_text(json.dumps(deployment))
    _batchrun("models", "tiny", "home/models/tiny")
    _batchrun("calibrate", "-o", "profile.json")
    path = FOLDER / "profile.json"
    return profile_from_json(path.read_text(), str(path))


def run_for_real(workload: Workload, seconds: float) -> Figures:
    """One run on an engine with an empty cache."""
    _write_job(workload)
    gateway = _batchrun("up", "-d")["gateway"]
    try:
        figures = asyncio.run(_measure(workload, f"{gateway}/v1", seconds))
    finally:
        _batchrun("down")
    print(f"{workload.name}: {_shown(figures)}", flush=True)
    return figures


def _write_job(workload: Workload) -> None:
    data = FOLDER / f"{workload.name}.parquet"
    if not data.exists():
        rows = str(workload.num_rows)
        _batchrun("datasets", "sample", "loogle", "--rows", rows, "-o", data.name)
    job = json.loads(json.dumps(JOB))
    job["input"]["path"] = data.name
    job["request"]["max_tokens"] = workload.output_tokens
    job["name"] = workload.name
    (FOLDER / f"{workload.name}.yaml").write_text(json.dumps(job))


JOB: dict[str, Any] = {
    "model": "tiny",
    "input": {
        "path": "",
        "messages": [{"role": "user", "content": "{{ document }}\n\n{{ question }}"}],
    },
    "request": {"temperature": 0, "ignore_eos": True},
    "output": {"path": "answers.parquet"},
}


async def _measure(workload: Workload, base_url: str, seconds: float) -> Figures:
    target = ReplayTarget(base_url=base_url, model="tiny", extra_body={"ignore_eos": True})
    lone = await replay(lone_calls(), target)
    job_id = _batchrun("submit", f"{workload.name}.yaml")["id"]
    before = await _until_running(job_id)
    results, _ = await asyncio.gather(
        replay(workload.arrivals(seconds), target), asyncio.sleep(seconds)
    )
    view = _job(job_id)
    served = view["num_prompt_tokens"] + view["num_output_tokens"]
    start = before["num_prompt_tokens"] + before["num_output_tokens"]
    return {
        "offline_tokens_per_s": (served - start) / seconds,
        "hit_rate": view["num_cached_tokens"] / max(1, view["num_prompt_tokens"]),
        "lone_ttft_s": median(_ttfts_s(lone)),
        **_latencies(results),
    }


def lone_calls() -> list[Arrival]:
    return [Arrival(2.0 * i, "how do you do", 8) for i in range(NUM_LONE_CALLS)]


async def _until_running(job_id: str) -> dict[str, Any]:
    """The job's figures once its rows are handed out."""
    while True:
        view = _job(job_id)
        if view["num_in_flight"]:
            return view
        await asyncio.sleep(0.2)


def _job(job_id: str) -> dict[str, Any]:
    (view,) = _batchrun("status", job_id)["jobs"]
    return dict(view)


def _ttfts_s(results: list[OnlineResult]) -> list[float]:
    return [result.ttft_s for result in results if result.ttft_s is not None]


def _latencies(results: list[OnlineResult]) -> Figures:
    ttfts_s = _ttfts_s(results)
    tpots_s = [result.tpot_s for result in results if result.tpot_s is not None]
    shares = (
        ("ttft_p50_s", ttfts_s, 0.5),
        ("ttft_p90_s", ttfts_s, 0.9),
        ("tpot_p50_s", tpots_s, 0.5),
    )
    return {name: percentile(values, share) or 0.0 for name, values, share in shares}


def _shown(figures: Figures) -> str:
    return ", ".join(f"{name} {value:,.4f}" for name, value in figures.items())


def _batchrun(*arguments: str) -> dict[str, Any]:
    """Call the command in the folder; a failure ends the benchmark with the command's message."""
    where = [] if arguments[0] in {"datasets", "models"} else ["--home", "home"]
    command = [sys.executable, "-m", "batchrun", *arguments, *where, "--json"]
    done = subprocess.run(command, cwd=FOLDER, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document
