"""The simulator against the real CPU engine with the tiny model.

    python -m benchmarks.fidelity [--seconds 300] [--repeats 3] [--json FILE]

Runs each of three workloads (`fidelity_jobs`) for real, through the `batchrun` command and the
OpenAI endpoint, and in the simulator, with the engine calibrated before each run and after it: a
machine's speed drifts by several percent within minutes, so a run's prediction is the mean of what
is simulated with both. Prints the means of predictions and measurements, their spread, and whether
the bars hold: served offline tokens/s within 10 %, online TTFT p50 and p90 and TPOT p50 within
15 %, hit rate within 3 points.

The simulator knows no HTTP, and processes that share cores and a lock wait for each other: what
the calls take longer for real than simulated beside a fourth workload, `PROBE`, is measured once at
the beginning, at the median and at the 90th percentile, and added to those of the three. The record
says how much that was. State and output stay in the folder `fidelity/`. Nothing else may run on the
machine: the record has the cores that each process took, and what other processes took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobTerms, job_of_file
from batchrun.simulator.online import Calls
from batchrun.simulator.replay import CallArrival
from batchrun.simulator.scenario_file import calibrated
from batchrun.simulator.simulation import Simulated, SimulationPlan, simulate
from batchrun.simulator.virtual.engine import Timing
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.fidelity_jobs import PROBE, WORKLOADS, Workload
from benchmarks.fidelity_real import (
    FOLDER,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    SLO,
    TOKEN_BUDGET,
    WARM_UP_S,
    Calibrated,
    Figures,
    calibrate,
    num_chat_tokens,
    prepare,
    read_calibrated,
    run_for_real,
)
from benchmarks.records import Bar, parser, write_records

BARS = {
    "offline_tokens_per_s": 0.10,
    "ttft_p50_s": 0.15,
    "ttft_p90_s": 0.15,
    "tpot_p50_s": 0.15,
    "hit_rate": 0.03,
}
"""Relative errors, but for the hit rate."""
PROBE_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run, and what is simulated of it with the calibrations before and after it."""

    measured: Figures
    predicted: tuple[Figures, Figures]

    def mean(self, name: str) -> float:
        """The prediction of a figure."""
        return fmean(figures[name] for figures in self.predicted)


def main() -> int:
    """Measure, simulate, compare."""
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=300.0)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--only", nargs="+", choices=[workload.name for workload in WORKLOADS])
    options = made.parse_args()
    chosen = [w for w in WORKLOADS if not options.only or w.name in options.only]
    prepare()
    calibrations = [read_calibrated()]
    overheads = _overheads(calibrations[0])
    runs: dict[str, list[Run]] = {workload.name: [] for workload in chosen}
    for _ in range(options.repeats):
        for workload in chosen:
            measured = run_for_real(workload, options.seconds)
            calibrate()
            calibrations.append(read_calibrated())
            before, after = (
                _with(overheads, _simulated(workload, known, options.seconds))
                for known in calibrations[-2:]
            )
            runs[workload.name].append(Run(measured, (before, after)))
            records = [*(_calibration(known) for known in calibrations), _record(overheads)]
            for each in chosen:
                records += _compared(each, runs[each.name]) if runs[each.name] else []
            if options.json is not None:
                write_records(options.json, records)
    return 0


def _calibration(known: Calibrated) -> dict[str, object]:
    profile, front = known.profile, known.front_end
    best, gap = profile.fitted[0], profile.gap
    return {
        "figure": "calibration",
        "model": best.model.name,
        "held_out_mape": best.held_out_mape,
        "identical_steps_mape": profile.spread.mean_ape,
        "gap_base_s": gap and gap.base_s,
        "gap_request_s": gap and gap.request_s,
        "front_end_request_s": front.request_s,
        "front_end_token_s": front.token_s,
    }


def _engine(known: Calibrated) -> EnginePlan:
    profile = known.profile
    shape = EngineShape(
        num_blocks=profile.kv_blocks,
        token_budget=TOKEN_BUDGET,
        max_num_seqs=MAX_NUM_SEQS,
        block_tokens=profile.engine.block_tokens,
        max_model_len=MAX_MODEL_LEN,
    )
    slo = {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
    # vLLM schedules no step ahead on a CPU.
    timing = Timing(steps_in_flight=1)
    plan = EnginePlan(shape, settings={"slo": slo}, timing=timing, front_end=known.front_end)
    return calibrated(plan, profile)


def _calls(arrivals: list[CallArrival], after_s: float = 0.0) -> Calls:
    """The chats with the prompt tokens that the model's template makes of them."""
    return Calls(
        np.array([after_s + call.at_s for call in arrivals]),
        np.array([num_chat_tokens(call.prompt) for call in arrivals], np.int64),
        np.array([call.max_tokens for call in arrivals], np.int64),
    )


def _overheads(known: Calibrated) -> Figures:
    """What is to be added to the TTFTs of a simulation, in seconds, at each percentile."""
    measured, simulated = run_for_real(PROBE, PROBE_S), _simulated(PROBE, known, PROBE_S)
    names = [name for name in simulated if name.startswith("ttft_")]
    return {name: max(0.0, measured[name] - simulated[name]) for name in names}


def _with(overheads: Figures, simulated: Figures) -> Figures:
    return {name: value + overheads.get(name, 0.0) for name, value in simulated.items()}


def _record(overheads: Figures) -> dict[str, object]:
    return {"figure": "overhead", "probe": PROBE.name, **overheads}


def _simulated(workload: Workload, known: Calibrated, seconds: float) -> Figures:
    """The run in the simulator."""
    job = job_of_file(
        workload.write(FOLDER),
        JobTerms(),
        model_folder=FOLDER / "home/models/tiny",
        draw_output_tokens=lambda num_rows: np.full(num_rows, workload.output_tokens),
    )
    calls = _calls(workload.arrivals(seconds), WARM_UP_S)
    whole = SimulationPlan(
        WARM_UP_S + seconds, calls, [job], engine=_engine(known), slo=SLO, seed=1
    )
    begun, figures = simulate(replace(whole, duration_s=WARM_UP_S)), simulate(whole)
    served = _served(figures) - _served(begun)
    online, offline = figures.online, figures.offline
    return {
        "offline_tokens_per_s": served / (figures.duration_s - begun.duration_s),
        "hit_rate": offline.hit_rate or 0.0,
        "ttft_p50_s": online.ttft_p50_s or 0.0,
        "ttft_p90_s": online.ttft_p90_s or 0.0,
        "tpot_p50_s": online.tpot_p50_s or 0.0,
    }


def _served(figures: Simulated) -> float:
    return figures.offline.served_tokens_per_s * figures.duration_s


def _compared(workload: Workload, runs: list[Run]) -> list[dict[str, object]]:
    """A record for each figure, printed."""
    records: list[dict[str, object]] = []
    for name, bound in BARS.items():
        measured = [run.measured[name] for run in runs]
        mean, predicted = fmean(measured), fmean(run.mean(name) for run in runs)
        whole = 1.0 if name == "hit_rate" else mean
        error = abs(predicted - mean) / whole if whole else float("inf")
        spread = (max(measured) - min(measured)) / whole if whole else float("inf")
        bar = Bar(f"{workload.name}, error of {name}", error, bound, is_most=True)
        print(f"- {bar}; {predicted:,.4f} for {mean:,.4f}, repeats spread by {spread:.3f}")
        records.append({
            "workload": workload.name,
            "figure": name,
            "predicted": predicted,
            "measured": mean,
            "error": error,
            "spread": spread,
            "runs": measured,
            "predicted_before": [run.predicted[0][name] for run in runs],
            "predicted_after": [run.predicted[1][name] for run in runs],
        })
    means = {
        key: fmean(run.measured[key] for run in runs)
        for key in runs[0].measured
        if key.startswith(("cpu_", "step_"))
    }
    records.append({"workload": workload.name, "figure": "conditions", **means})
    return records


if __name__ == "__main__":
    raise SystemExit(main())
