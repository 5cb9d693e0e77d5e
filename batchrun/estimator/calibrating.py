"""From an engine's recorded steps to its profile."""

from __future__ import annotations

from batchrun.errors import EngineError
from batchrun.estimator.chunk import pivot_tokens
from batchrun.estimator.fit import LEAST_OBSERVATIONS, fit_all
from batchrun.estimator.identical import identical_spread
from batchrun.estimator.profile import CalibrationProfile, OnlineLatency
from batchrun.estimator.recording import Recording
from batchrun.estimator.step_gap import fit_gap


def calibrate(
    recording: Recording, *, measured_at: float, online: OnlineLatency | None = None
) -> CalibrationProfile:
    """Fit all models to the recorded steps and find the pivot size by the best of them.

    `measured_at` is UTC epoch seconds. Raises EngineError when too few steps were recorded.
    """
    facts, observations = recording.facts, recording.observations
    if len(observations) < LEAST_OBSERVATIONS:
        raise EngineError(
            f"the engine computed only {len(observations)} steps in the time of a calibration"
        )
    fitted = fit_all(observations)
    return CalibrationProfile(
        engine=facts.engine,
        kv_blocks=facts.kv_blocks,
        fitted=tuple(fitted),
        spread=identical_spread(observations),
        pivot_tokens=pivot_tokens(fitted[0].model, facts.token_budget),
        online=online,
        measured_at=measured_at,
        gap=fit_gap(recording.gaps),
    )
