"""The real side of `benchmarks.fidelity`: calibrate the CPU engine, run a job beside chats."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import psutil

from batchrun.estimator.profile import CalibrationProfile, profile_from_json
from batchrun.jobs.prompts.tokens import read_prompts
from batchrun.samples.generators import TextSource
from batchrun.simulator.cluster import FrontEndTimes
from batchrun.simulator.records import Slo
from batchrun.simulator.replay import CallArrival, OnlineResult, ReplayTarget, percentile, replay
from benchmarks.deployment import Deployment
from benchmarks.fidelity_jobs import Workload

NUM_CALLS = 40
TOKENS_SHORT, TOKENS_LONG = 20, 3_000
SPACING_S = 0.2

CountTokens = Callable[[str], int]


async def measure_front_end(
    target: ReplayTarget, server: psutil.Process, count_tokens: CountTokens
) -> FrontEndTimes:
    """A line through short and long calls, each sent alone and answered with one token.

    The prompts of a length are one text, so that the engine finds the KV of all but the first call.
    """
    idle_s = await _cpu_s(target, server, [])
    costs_s, lengths = [], []
    source = TextSource(1)
    for num_tokens in (TOKENS_SHORT, TOKENS_LONG):
        prompt = " ".join(source.sentences(Random(num_tokens), num_tokens))
        await replay([CallArrival(0.0, prompt, 1)], target)
        calls = [CallArrival(SPACING_S * i, prompt, 1) for i in range(NUM_CALLS)]
        costs_s.append((await _cpu_s(target, server, calls) - idle_s) / NUM_CALLS)
        lengths.append(count_tokens(prompt))
    token_s = max(0.0, (costs_s[1] - costs_s[0]) / (lengths[1] - lengths[0]))
    return FrontEndTimes(max(0.0, costs_s[0] - token_s * lengths[0]), token_s)


async def _cpu_s(target: ReplayTarget, server: psutil.Process, calls: list[CallArrival]) -> float:
    """Processor time of the server in the time of all calls; without calls: of as long a wait."""
    before_s = _spent_s(server)
    await replay([*calls, CallArrival(SPACING_S * NUM_CALLS, "end", 1)], target)
    return _spent_s(server) - before_s


def _spent_s(server: psutil.Process) -> float:
    times = server.cpu_times()
    return times.user + times.system


KINDS = (
    ("worker", "VLLM::Worker"),
    ("engine_core", "VLLM::EngineC"),
    ("api_server", "vllm.entrypoints"),
    ("gateway", "batchrun.server.gateway"),
    ("daemon", "batchrun up"),
)
"""The first whose text stands in the command line."""


class CpuShares:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._before = _cpu_by_process()

    def since(self) -> dict[str, float]:
        """Cores taken by each kind since then; `client` is this process, `other` all others."""
        wall_s = time.monotonic() - self._begin_s
        shares = dict.fromkeys([*(name for name, _ in KINDS), "client", "other"], 0.0)
        for (pid, kind), cpu_s in _cpu_by_process().items():
            shares[kind] += (cpu_s - self._before.get((pid, kind), 0.0)) / wall_s
        return shares


def find_process(kind: str) -> psutil.Process:
    """The process of one of the KINDS; ends the program when there is more than one."""
    text = dict(KINDS)[kind]
    found = [p for p in psutil.process_iter() if text in " ".join(p.cmdline())]
    if len(found) != 1:
        pids = ", ".join(str(process.pid) for process in found) or "none"
        raise SystemExit(f"one {kind} is to run on this machine, but there are: {pids}")
    return found[0]


def _cpu_by_process() -> dict[tuple[int, str], float]:
    seconds: dict[tuple[int, str], float] = {}
    for process in psutil.process_iter():
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        if process.pid == os.getpid():
            kind = "client"
        else:
            kind = next((name for name, text in KINDS if text in command), "other")
        seconds[process.pid, kind] = times.user + times.system
    return seconds


FOLDER = Path("fidelity")
DEPLOYMENT = Deployment(FOLDER)
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
    port = DEPLOYMENT.engine_port
    engine = {"port": port, "vllm_args": arguments, "profile": "profile.json"}
    slo = {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
    DEPLOYMENT.configure(engine, model="tiny", slo=slo)
    DEPLOYMENT.batchrun("models", "tiny", "home/models/tiny")
    calibrate()
    with DEPLOYMENT.running() as gateway:
        server = find_process("api_server")
        target = _target(f"{gateway}/v1")
        times = asyncio.run(measure_front_end(target, server, num_chat_tokens))
    (FOLDER / "front-end.json").write_text(json.dumps(asdict(times)))


def calibrate() -> None:
    """Measure the engine's steps, which the next run's engine knows at its start."""
    DEPLOYMENT.batchrun("calibrate", "-o", "profile.json")


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
    with DEPLOYMENT.running() as gateway:
        figures = asyncio.run(_measure(workload, job_file, f"{gateway}/v1", seconds))
    print(f"{workload.name}: {_shown(figures)}", flush=True)
    return figures


async def _measure(workload: Workload, job_file: Path, base_url: str, seconds: float) -> Figures:
    target = _target(base_url)
    _check_nothing_runs()
    job_id = DEPLOYMENT.batchrun("submit", job_file.name)["id"]
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
    DEPLOYMENT.batchrun("cancel", job_id)
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
    jobs = DEPLOYMENT.batchrun("status")["jobs"]
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
    (view,) = DEPLOYMENT.batchrun("status", job_id)["jobs"]
    return dict(view), time.monotonic()


def _served(view: dict[str, Any]) -> int:
    return int(view["num_prompt_tokens"] + view["num_output_tokens"])


def _step_telemetry() -> Figures:
    """What the engine's steps took, and what its model said of them, in seconds."""
    telemetry = DEPLOYMENT.batchrun("status")["engines"][0]["telemetry"]["step"]
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
