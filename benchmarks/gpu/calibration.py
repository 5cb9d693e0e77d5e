"""The first phase: the probes of `batchrun calibrate`, sent to the loaded model."""

from __future__ import annotations

import math
import time
from pathlib import Path

from batchrun.estimator.probes import PROBING_SETTINGS, PromptMaker, make_round
from batchrun.estimator.profile import CalibrationProfile, calibrate, read_recording
from benchmarks.gpu.engine import LoadedModel, Phase
from benchmarks.probing import ProbeSource

PROBE_LIMIT_S = 20.0
MAX_ROUNDS = 3


def calibrate_model(
    model: LoadedModel, budget: int, folder: Path, *, limit_s: float
) -> tuple[CalibrationProfile, Path]:
    """Probe the loaded model for at most about `limit_s` and write its profile to `folder`.

    Raises EngineError when the model computed too few steps in that time.
    """
    steps_path, profile_path = folder / "steps.jsonl", folder / "profile.json"
    scheduler = model.renew_scheduler(budget, {**PROBING_SETTINGS, "record_steps": str(steps_path)})
    facts = read_recording(steps_path.read_text()).facts
    prompts = PromptMaker(facts.vocabulary)
    callers = ProbeSource()
    phase = Phase(model, scheduler, [callers])
    for _ in range(MAX_ROUNDS):
        prompts.next_round()
        for probe in make_round(facts):
            if phase.now_s < limit_s:
                callers.begin(probe, prompts)
                phase.run_until(math.inf, until_idle=True)
    phase.finish()
    profile = calibrate(read_recording(steps_path.read_text()), measured_at=time.time())
    profile_path.write_text(profile.to_json())
    return profile, profile_path
