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
from pathlib import Path

import torch

from batchrun.errors import BatchrunError
from benchmarks.gpu.engine import LoadedModel, calibrate_model
from benchmarks.gpu.phases import phase_plans, phase_s, process_age_s, run_phase
from benchmarks.gpu.shape import LLAMA_8B, SHAPES, Shape
from benchmarks.records import RESULTS, describe, parser, write_records
from benchmarks.replay import Figures

CLOSING_S = 5.0
"""Kept for the end of the process."""
CALIBRATION_SHARE = 0.06
"""Share of the whole limit that the probes may take."""
PRINTED = (
    *("policy", "order", "budget", "online", "offline_tokens_per_s", "computed_tokens_per_s"),
    *("prefix_hit_rate", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "slo_deadline", "plan_ms"),
)


def main() -> int:
    """Run all phases that fit the limit. 0 when all did, 4 with one line when the engine failed."""
    begin_s = time.monotonic() - process_age_s()
    made = parser(__doc__, limit_s=480.0, min_phase_s=10.0, max_phase_s=60.0)
    made.add_argument("--model-shape", choices=SHAPES, default=LLAMA_8B.name)
    options = made.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    path: Path = options.json or RESULTS / "gpu.jsonl"
    records: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="batchrun-gpu-") as folder:
        try:
            end_s = begin_s + options.limit_s - CLOSING_S
            lengths_s = options.min_phase_s, options.max_phase_s
            for record in run(SHAPES[options.model_shape], Path(folder), end_s, *lengths_s):
                records.append(record)
                write_records(path, records)
        except BatchrunError as error:
            sys.stderr.write(f"benchmarks.gpu: {error}\n")
            return error.exit_code
    print(f"{time.monotonic() - begin_s:.0f} s in all; figures in {path}", flush=True)
    return 0


def run(
    shape: Shape, folder: Path, end_s: float, least_s: float, most_s: float
) -> Iterator[Figures]:
    """Load, calibrate, run the phases; yields one record each. `end_s` is monotonic.

    Phases that would get less than `least_s` are skipped, the last ones first, and say so.
    """
    whole_s = end_s - time.monotonic()
    print(f"loading {shape.name} with random weights", flush=True)
    model = LoadedModel(shape, folder / "model")
    try:
        has_gpu = torch.cuda.is_available()
        device = torch.cuda.get_device_name().lower().replace(" ", "-") if has_gpu else "cpu"
        scenario: Figures = {
            "kind": "phase",
            "scenario": f"gpu-{device}",
            "model_shape": shape.name,
            "steps_in_flight": 1 if model.core.batch_queue is None else 2,
        }
        print(f"loaded; {end_s - time.monotonic():.0f} s left", flush=True)
        profile, profile_path = calibrate_model(
            model, shape.budget, folder, limit_s=CALIBRATION_SHARE * whole_s
        )
        calibration: Figures = {
            "pivot_tokens": profile.pivot_tokens,
            "num_held_out": profile.fitted[0].num_held_out,
            **{f"held_out_mape_{each.model.name}": each.held_out_mape for each in profile.fitted},
        }
        print(describe(calibration), flush=True)
        yield {**scenario, "kind": "calibration", **calibration}
        plans = phase_plans(shape)
        for number, plan in enumerate(plans):
            left_s = end_s - time.monotonic()
            duration_s = phase_s(left_s, len(plans) - number, least_s, most_s)
            if duration_s is None:
                skipped = {"policy": plan.policy, "order": plan.order, "skipped": True}
                print(f"{describe(skipped)}: {left_s:.0f} s left", flush=True)
                yield {**scenario, **skipped}
                continue
            found = run_phase(model, shape, plan, profile_path, duration_s)
            print(describe({key: found[key] for key in PRINTED}), flush=True)
            yield {**scenario, **found}
    finally:
        model.core.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    raise SystemExit(main())
