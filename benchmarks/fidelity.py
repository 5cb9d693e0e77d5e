"""The simulator against the real CPU engine with the tiny model.

    flock /tmp/heavy.lock python -m benchmarks.fidelity [--seconds 300] [--repeats 3] [--json FILE]

Calibrates the engine, then runs each of three workloads for real, through the `batchrun` command
and the OpenAI endpoint, and in the simulator: a LooGLE-shaped job beside bursty chats. Prints what
was predicted, the mean and the spread of the repeats, and whether the bars hold: served offline
tokens/s within 10 %, online TTFT p50 and p90 and TPOT p50 within 15 %, hit rate within 3 points.

The simulator knows no HTTP: what a lone call takes longer for real than simulated, the median of
some calls before each run, is added to its TTFT, and the record says how much that was. State and
output stay in the folder `fidelity/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from batchrun.estimator import CalibrationProfile, profile_from_json
from batchrun.inputs.prompts import read_prompts
from batchrun.replay import ReplayTarget, TokenRange, TraceShape, generate_trace, replay
from batchrun.replay.results import OnlineResult, percentile
from batchrun.replay.trace import Arrival
from batchrun.simulator import (
    Calls,
    EnginePlan,
    JobTerms,
    ModelLaw,
    SimulationPlan,
    job_of_file,
    simulate,
)
from batchrun.vllm_plugin.virtual import EngineShape, Slo, Timing
from benchmarks.bars import Bar
from benchmarks.ports import free_port
from benchmarks.records import write_records

FOLDER = Path("fidelity")
TOKEN_BUDGET, MAX_NUM_SEQS, MAX_MODEL_LEN = 512, 64, 32_768
SLO = Slo(1.0, 0.1)
NUM_LONE_CALLS = 8
CHAT = TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=300)
ANSWER = TokenRange(mu=2.8, sigma=0.5, min_tokens=4, max_tokens=40)
BARS = {
    "offline_tokens_per_s": 0.10,
    "ttft_p50_s": 0.15,
    "ttft_p90_s": 0.15,
    "tpot_p50_s": 0.15,
    "hit_rate": 0.03,
}
"""Relative errors, but for the hit rate."""

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


def main() -> int:
    """Measure, simulate, compare."""
    options = _parser().parse_args()
    chosen = [w for w in WORKLOADS if not options.only or w.name in options.only]
    profile = _prepare()
    records: list[dict[str, object]] = []
    for workload in chosen:
        runs = [_real(workload, options.seconds) for _ in range(options.repeats)]
        overhead_s = median(run["lone_ttft_s"] for run in runs) - _lone_ttft_s(profile)
        predicted = _simulated(workload, profile, options.seconds, max(0.0, overhead_s))
        records += _compared(workload, predicted, runs, overhead_s)
    if options.json is not None:
        write_records(options.json, records)
    return 0


def _prepare() -> CalibrationProfile:
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


def _real(workload: Workload, seconds: float) -> Figures:
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
    lone = await replay(_lone_calls(), target)
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


def _lone_calls() -> list[Arrival]:
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


def _engine(profile: CalibrationProfile) -> EnginePlan:
    shape = EngineShape(
        num_blocks=profile.kv_blocks,
        token_budget=TOKEN_BUDGET,
        max_num_seqs=MAX_NUM_SEQS,
        block_tokens=profile.engine.block_tokens,
        max_model_len=MAX_MODEL_LEN,
    )
    slo = {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
    return EnginePlan(
        shape,
        settings={"slo": slo},
        law=ModelLaw(profile.models[0]),
        # vLLM schedules no step ahead on a CPU.
        timing=Timing(steps_in_flight=1),
        believed=profile.models,
    )


def _calls(arrivals: list[Arrival]) -> Calls:
    """The chats with the prompt tokens that the model's template makes of them."""
    prompts = read_prompts(FOLDER / "home/models/tiny", now=datetime.now(UTC))
    assert prompts.count is not None
    bodies = [{"messages": [{"role": "user", "content": call.prompt}]} for call in arrivals]
    lengths = [max(1, prompts.count(prompts.text(body))) for body in bodies]
    return Calls(
        np.array([call.at_s for call in arrivals]),
        np.array(lengths, np.int64),
        np.array([call.max_tokens for call in arrivals], np.int64),
    )


def _lone_ttft_s(profile: CalibrationProfile) -> float:
    calls = _calls(_lone_calls())
    seconds = 2.0 * NUM_LONE_CALLS
    return simulate(SimulationPlan(seconds, calls, engine=_engine(profile))).online.ttft_p50_s or 0


def _simulated(
    workload: Workload, profile: CalibrationProfile, seconds: float, overhead_s: float
) -> Figures:
    job = job_of_file(
        FOLDER / f"{workload.name}.yaml", JobTerms(), model_folder=FOLDER / "home/models/tiny"
    )
    plan = SimulationPlan(
        seconds, _calls(workload.arrivals(seconds)), [job], engine=_engine(profile), slo=SLO
    )
    figures = simulate(replace(plan, seed=1))
    online, offline = figures.online, figures.offline
    return {
        "offline_tokens_per_s": offline.served_tokens_per_s,
        "hit_rate": offline.hit_rate or 0.0,
        "ttft_p50_s": (online.ttft_p50_s or 0.0) + overhead_s,
        "ttft_p90_s": (online.ttft_p90_s or 0.0) + overhead_s,
        "tpot_p50_s": online.tpot_p50_s or 0.0,
    }


def _compared(
    workload: Workload, predicted: Figures, runs: list[Figures], overhead_s: float
) -> list[dict[str, object]]:
    """A record for each figure, printed."""
    records: list[dict[str, object]] = []
    for name, bound in BARS.items():
        measured = [run[name] for run in runs]
        mean = fmean(measured)
        whole = 1.0 if name == "hit_rate" else mean
        error = abs(predicted[name] - mean) / whole if whole else float("inf")
        spread = (max(measured) - min(measured)) / whole if whole else float("inf")
        bar = Bar(f"{workload.name}, error of {name}", error, bound, is_most=True)
        print(f"- {bar}; {predicted[name]:,.4f} for {mean:,.4f}, repeats spread by {spread:.3f}")
        records.append({
            "workload": workload.name,
            "figure": name,
            "predicted": predicted[name],
            "measured": mean,
            "error": error,
            "spread": spread,
            "repeats": len(runs),
            "overhead_s": overhead_s,
        })
    return records


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
