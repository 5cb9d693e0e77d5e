"""A calibration from the start of the engine to its profile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace

from batchrun.calibration.engine import make_measured_engine
from batchrun.calibration.online import observe_online
from batchrun.calibration.probing import Prober
from batchrun.config import Deployment
from batchrun.daemon.supervisor import build_model
from batchrun.engine import ManagedEngine
from batchrun.estimator import CalibrationProfile, calibrate
from batchrun.home import Home
from batchrun.types import ProgressSink

_STAGE_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile, and how long it took to get: to start the engine, and to measure and fit."""

    profile: CalibrationProfile
    num_steps: int
    engine_start_s: float
    measuring_s: float


async def calibrate_engine(
    deployment: Deployment, home: Home, index: int, progress: ProgressSink
) -> Measured:
    """Start `deployment.engines[index]`, measure it, end it. Writes no profile.

    The caller has seen to it that no other engine runs (`check_nothing_runs`). Raises EngineError
    when this one cannot start or be measured. Cancelled or failed, it leaves nothing behind but
    the engine's log.
    """
    await asyncio.to_thread(build_model, deployment, home)
    steps_path = home.run / "calibration-steps.jsonl"
    engine = await asyncio.to_thread(make_measured_engine, deployment, home, index, steps_path)
    try:
        begin_s = time.monotonic()
        await _with_stages(engine, engine.start(), progress)
        ready_s = time.monotonic()
        recording = await Prober(engine.client, deployment.model_name, steps_path).run(progress)
        progress("fitting", 0, 0)
        profile = await asyncio.to_thread(calibrate, recording, measured_at=time.time())
        progress("measuring online calls", 0, 0)
        online = await observe_online(
            engine.client.base_url, deployment.model_name, recording.facts, profile.models[0]
        )
        done_s = time.monotonic()
    finally:
        progress("stopping the engine", 0, 0)
        await engine.stop()
        steps_path.unlink(missing_ok=True)
    num_steps = len(recording.observations)
    return Measured(replace(profile, online=online), num_steps, ready_s - begin_s, done_s - ready_s)


async def _with_stages(
    engine: ManagedEngine, starting: Awaitable[None], progress: ProgressSink
) -> None:
    """Wait for the engine, and tell what it is busy with."""
    task = asyncio.ensure_future(starting)
    try:
        while not (await asyncio.wait([task], timeout=_STAGE_POLL_S))[0]:
            progress(f"engine: {engine.stage}", 0, 0)
    finally:
        task.cancel()
    await task
