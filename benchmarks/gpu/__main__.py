"""Co-location on one GPU, policy by policy, on a model of Llama-3.1-8B's shape.

    python -m benchmarks.gpu [--json FILE] [--limit-s 480] [--model-shape llama-3.1-8b]

One model load with random weights. First the engine is calibrated, then every policy runs for an
equal share of the time that is left: LooGLE-length documents as the job, the Azure conversation
trace as online calls. Works on a machine without a network.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from batchrun.errors import BatchrunError
from benchmarks.gpu.phases import Share, process_age_s
from benchmarks.gpu.shape import LLAMA_8B, SHAPES, Shape
from benchmarks.records import RESULTS, cell, parser, write_records
from benchmarks.replay import Figures

CLOSING_S = 5.0
"""Kept for the end of the process."""
CALIBRATION_SHARE = 0.06
"""Share of the whole limit that the probes may take."""
COLUMNS = {
    "offline_tokens_per_s": "served/s",
    "computed_tokens_per_s": "computed/s",
    "prefix_hit_rate": "hits",
    "ttft_p50_s": "ttft p50",
    "ttft_p99_s": "p99",
    "tpot_p50_s": "tpot p50",
    "slo_ttft": "ttft met",
    "slo_tpot": "tpot met",
    "slo_deadline": "deadline",
    "plan_ms": "plan ms",
}


def main() -> int:
    """Run all phases that fit the limit. 0 when all did, 4 with one line when the engine failed."""
    begin_s = time.monotonic() - process_age_s()
    made = parser(__doc__)
    made.add_argument("--limit-s", type=float, default=480.0, help="for everything, loading too")
    made.add_argument("--model-shape", choices=SHAPES, default=LLAMA_8B.name)
    made.add_argument("--min-phase-s", type=float, default=10.0, help="shorter ones are skipped")
    made.add_argument("--max-phase-s", type=float, default=60.0)
    made.add_argument("--enforce-eager", action="store_true", help="vLLM without compilation")
    options = made.parse_args()
    shape = SHAPES[options.model_shape]
    if options.enforce_eager:
        shape = replace(shape, engine={**shape.engine, "enforce_eager": True})
    os.environ["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    path: Path = options.json or RESULTS / "gpu.jsonl"
    records: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="batchrun-gpu-") as folder:
        try:
            end_s = begin_s + options.limit_s - CLOSING_S
            share = Share(options.min_phase_s, options.max_phase_s)
            for record in run(shape, Path(folder), end_s, share):
                records.append(record)
                write_records(path, records)
        except BatchrunError as error:
            sys.stderr.write(f"benchmarks.gpu: {error}\n")
            return error.exit_code
    _say(f"{time.monotonic() - begin_s:.0f} s in all; figures in {path}")
    return 0


def run(shape: Shape, folder: Path, end_s: float, share: Share) -> Iterator[Figures]:
    """Load, calibrate, run the phases; yields one record each. `end_s` is monotonic.

    Phases that would get less than `share.least_s` are skipped, the last ones first, and say so.
    """
    from benchmarks.gpu.engine import LoadedModel, calibrate_model
    from benchmarks.gpu.phases import phase_plans, run_phase

    whole_s = end_s - time.monotonic()
    _say(f"loading {shape.name} with random weights")
    model = LoadedModel(shape, folder / "model")
    try:
        scenario: Figures = {
            "kind": "phase",
            "scenario": f"gpu-{device_name()}",
            "model_shape": shape.name,
            "steps_in_flight": 2 if model.is_async else 1,
        }
        _say(f"loaded; {end_s - time.monotonic():.0f} s left")
        profile, profile_path = calibrate_model(
            model, shape.budget, folder, limit_s=CALIBRATION_SHARE * whole_s
        )
        yield {**scenario, "kind": "calibration", **_calibration_figures(profile)}
        plans = list(phase_plans(shape))
        for number, plan in enumerate(plans):
            left_s = end_s - time.monotonic()
            duration_s = share.of(left_s, len(plans) - number)
            if duration_s is None:
                _say(f"{plan.title}: SKIPPED, the time ran out ({left_s:.0f} s left)")
                yield {**scenario, "policy": plan.policy, "order": plan.order, "skipped": True}
                continue
            found = run_phase(model, shape, plan, profile_path, duration_s)
            _say(_row(plan.title, found))
            yield {**scenario, **found}
    finally:
        model.close()


def device_name() -> str:
    """The accelerator, or `cpu`, as it can stand in a file name."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def _calibration_figures(profile: object) -> Figures:
    from batchrun.estimator.profile import CalibrationProfile

    assert isinstance(profile, CalibrationProfile)
    errors = {each.model.name: each.held_out_mape for each in profile.fitted}
    shown = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    _say(f"step-time models, held-out error: {shown}; pivot {profile.pivot_tokens:,} tokens")
    return {
        "pivot_tokens": profile.pivot_tokens,
        "num_held_out": profile.fitted[0].num_held_out,
        **{f"held_out_mape_{name}": error for name, error in errors.items()},
    }


def _row(title: str, found: Figures) -> str:
    cells = (f"{name} {cell(found.get(key))}" for key, name in COLUMNS.items())
    return f"{title:<44}" + "  ".join(cells)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
