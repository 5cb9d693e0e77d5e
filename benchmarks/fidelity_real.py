"""The real side of `benchmarks.fidelity`: calibrate the CPU engine, run a job beside chats."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchrun.estimator.profile import CalibrationProfile, profile_from_json
from batchrun.jobs.prompts.tokens import read_prompts
from batchrun.simulator.cluster import FrontEndTimes
from batchrun.simulator.replay import OnlineResult, ReplayTarget, percentile, replay
from batchrun.simulator.virtual.run import Slo
from benchmarks.cpu_shares import CpuShares, find_process
from benchmarks.fidelity_front_end import measure_front_end
from benchmarks.fidelity_jobs import Workload
from benchmarks.ports import free_port

FOLDER = Path("fidelity")
TOKEN_BUDGET, MAX_NUM_SEQS, MAX_MODEL_LEN = 512, 64, 32_768
SLO = Slo(1.0, 0.1)
WARM_UP_S = 10.0
"""The job runs alone before chats come and tokens are counted."""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What the simulation knows of the real engine."""

    profile: CalibrationProfile
    front_end: FrontEndTimes


def prepare() -> None:
    """A fresh folder, a deployment on free ports, and what `read_calibrated` reads."""
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
    calibrate()
    gateway = _batchrun("up", "-d")["gateway"]
    try:
        server = find_process("api_server")
        target = _target(f"{gateway}/v1")
        times = asyncio.run(measure_front_end(target, server, num_chat_tokens))
    finally:
        _batchrun("down")
    (FOLDER / "front-end.json").write_text(json.dumps(asdict(times)))


def calibrate() -> None:
    """Measure the engine's steps, which the next run's engine knows at its start."""
    _batchrun("calibrate", "-o", "profile.json")


def read_calibrated() -> Calibrated:
    """What `prepare` and the last `calibrate` measured."""
    path = FOLDER / "profile.json"
    times = json.loads((FOLDER / "front-end.json").read_text())
    return Calibrated(profile_from_json(path.read_text(), str(path)), FrontEndTimes(**times))


def num_chat_tokens(text: str) -> int:
    """Prompt tokens of a chat call with this one message."""
    prompts = read_prompts(FOLDER / "home/models/tiny", now=datetime.now(UTC))
    assert prompts.count is not None
    return max(1, prompts.count(prompts.text({"messages": [{"role": "user", "content": text}]})))


def run_for_real(workload: Workload, seconds: float) -> Figures:
    """One run on an engine with an empty cache; its job is cancelled, so nothing goes on later."""
    job_file = workload.write(FOLDER)
    gateway = _batchrun("up", "-d")["gateway"]
    try:
        figures = asyncio.run(_measure(workload, job_file, f"{gateway}/v1", seconds))
    finally:
        _batchrun("down")
    print(f"{workload.name}: {_shown(figures)}", flush=True)
    return figures


async def _measure(workload: Workload, job_file: Path, base_url: str, seconds: float) -> Figures:
    target = _target(base_url)
    _check_nothing_runs()
    job_id = _batchrun("submit", job_file.name)["id"]
    await _until_running(job_id)
    await asyncio.sleep(WARM_UP_S)
    before, begin_s = _job(job_id)
    shares = CpuShares()
    results, _ = await asyncio.gather(
        replay(workload.arrivals(seconds), target), asyncio.sleep(seconds)
    )
    cpu = shares.since()
    view, end_s = _job(job_id)
    telemetry = _step_telemetry()
    _batchrun("cancel", job_id)
    _check_run(workload, view, results)
    return {
        "offline_tokens_per_s": (_served(view) - _served(before)) / (end_s - begin_s),
        "hit_rate": view["num_cached_tokens"] / max(1, view["num_prompt_tokens"]),
        "prompt_tokens": view["num_prompt_tokens"] / max(1, view["num_completed"]),
        **_latencies(results),
        **telemetry,
        **{f"cpu_{name}": share for name, share in cpu.items()},
    }


def _target(base_url: str) -> ReplayTarget:
    return ReplayTarget(base_url=base_url, model="tiny", extra_body={"ignore_eos": True})


def _check_nothing_runs() -> None:
    jobs = _batchrun("status")["jobs"]
    left = [job["id"] for job in jobs if job["finished_at"] is None]
    if left:
        raise SystemExit(f"jobs {', '.join(left)} are left from an earlier run")


def _check_run(workload: Workload, view: dict[str, Any], results: list[OnlineResult]) -> None:
    errors = [result.error for result in results if result.error]
    if errors:
        raise SystemExit(f"{workload.name}: {len(errors)} calls failed, the first: {errors[0]}")
    if view["state"] != "running":
        raise SystemExit(f"{workload.name}: the job was {view['state']} before the time was over")


async def _until_running(job_id: str) -> None:
    """Return once its rows are handed out."""
    while True:
        view, _ = _job(job_id)
        if view["num_in_flight"]:
            return
        await asyncio.sleep(0.2)


def _job(job_id: str) -> tuple[dict[str, Any], float]:
    """Its figures, and when they were told; what the command takes is alike each time."""
    (view,) = _batchrun("status", job_id)["jobs"]
    return dict(view), time.monotonic()


def _served(view: dict[str, Any]) -> int:
    return int(view["num_prompt_tokens"] + view["num_output_tokens"])


def _step_telemetry() -> Figures:
    """What the engine's steps took, and what its model said of them, in seconds."""
    telemetry = _batchrun("status")["engines"][0]["telemetry"]["step"]
    return {f"step_{name}": telemetry[name] for name in ("predicted_s", "measured_s")}


def _latencies(results: list[OnlineResult]) -> Figures:
    ttfts_s = [result.ttft_s for result in results if result.ttft_s is not None]
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
