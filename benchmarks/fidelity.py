"""The simulator against the real CPU engine with the tiny model.

    python -m benchmarks.fidelity [--seconds 300] [--repeats 3] [--json FILE]

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
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median

import numpy as np

from batchrun.estimator import CalibrationProfile
from batchrun.inputs.prompts import read_prompts
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
from batchrun.vllm_plugin.virtual import EngineShape, Timing
from benchmarks.bars import Bar
from benchmarks.fidelity_real import (
    FOLDER,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_LONE_CALLS,
    SLO,
    TOKEN_BUDGET,
    WORKLOADS,
    Figures,
    Workload,
    lone_calls,
    prepare,
    run_for_real,
)
from benchmarks.records import write_records

BARS = {
    "offline_tokens_per_s": 0.10,
    "ttft_p50_s": 0.15,
    "ttft_p90_s": 0.15,
    "tpot_p50_s": 0.15,
    "hit_rate": 0.03,
}
"""Relative errors, but for the hit rate."""


def main() -> int:
    """Measure, simulate, compare."""
    options = _parser().parse_args()
    chosen = [w for w in WORKLOADS if not options.only or w.name in options.only]
    profile = prepare()
    records: list[dict[str, object]] = []
    for workload in chosen:
        runs = [run_for_real(workload, options.seconds) for _ in range(options.repeats)]
        overhead_s = median(run["lone_ttft_s"] for run in runs) - _lone_ttft_s(profile)
        predicted = _simulated(workload, profile, options.seconds, max(0.0, overhead_s))
        records += _compared(workload, predicted, runs, overhead_s)
    if options.json is not None:
        write_records(options.json, records)
    return 0


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
    calls = _calls(lone_calls())
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
