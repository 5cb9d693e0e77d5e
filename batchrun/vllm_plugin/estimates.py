"""How long an engine's steps take, and how much KV its online work needs: measured and predicted.

A step's load is read off vLLM's output (`scheduled_load`), its time taken by `StepClock`. Both go
to `Estimates`, which start from the profile of a calibration and learn from every step, or, while
an engine is calibrated, to the file of a `StepRecorder`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from batchrun.cache.eviction import reserve_blocks
from batchrun.errors import ConfigError
from batchrun.estimator.forecast import KvForecast
from batchrun.estimator.online_fit import OnlineFit, ScaledModel
from batchrun.estimator.profile import (
    EngineFacts,
    EngineIdentity,
    facts_line,
    profile_from_json,
    step_line,
)
from batchrun.estimator.step_load import NUM_KINDS, ObservedGap, StepLoad
from batchrun.estimator.step_time import AnyModel, StepTimeModel
from batchrun.vllm_plugin.settings import PluginSettings

log = logging.getLogger(__name__)

MAX_RECORDED_STEPS = 200_000
MAX_PROFILE_BYTES = 1 << 20
NUM_ALONE_STEPS = 64
"""Steps of each kind that are remembered from while the engine held no row."""
LEAST_ALONE_STEPS = 16
"""Fewer tell nothing of their kind."""
ALONE_MEMORY_S = 600.0
"""Older ones are not believed: the machine may be slower since."""
COMPARE_EVERY_STEPS = 64
LEAST_ALONE_SHARE = 0.5
"""Steps without rows in the engine are not believed to take less of what the model says."""


def engine_facts(config: VllmConfig, kv_blocks: int) -> EngineFacts:
    """What the engine of this configuration is, and how large its requests may be."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    device = config.device_config.device_type
    if device == "cuda":
        device = current_platform.get_device_name()
    num_devices = config.parallel_config.world_size
    identity = EngineIdentity(
        model=str(model.served_model_name),
        vllm_version=vllm.__version__,
        device=device if num_devices == 1 else f"{num_devices} x {device}",
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=cache.block_size,
    )
    return EngineFacts(
        engine=identity,
        kv_blocks=kv_blocks,
        longest_tokens=model.max_model_len,
        token_budget=scheduler.max_num_batched_tokens,
        max_running=scheduler.max_num_seqs,
        vocabulary=model.get_vocab_size(),
    )


def read_models(path: str | None, engine: EngineIdentity) -> tuple[AnyModel, ...]:
    """The models of the profile at `path`; none without one.

    A profile that cannot be read, or was measured with another engine, is ignored with a warning:
    the estimates then start cold and learn from the steps, as without a profile.
    """
    if path is None:
        return ()
    try:
        with Path(path).open(encoding="utf-8") as file:
            profile = profile_from_json(file.read(MAX_PROFILE_BYTES), path)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        log.warning("batchrun: the calibration profile is ignored: %s", error)
        return ()
    if (mismatch := profile.mismatch(engine)) is not None:
        log.warning(
            "batchrun: the calibration profile %s is ignored: %s; run `batchrun calibrate` again",
            path,
            mismatch,
        )
        return ()
    return profile.models


class StepRecorder:
    """Writes the engine's facts, then each step at once; at most MAX_RECORDED_STEPS."""

    def __init__(self, path: str, facts: EngineFacts) -> None:
        """Replaces what is at `path`; only its owner may read it."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        weakref.finalize(self, os.close, self._fd)
        os.write(self._fd, facts_line(facts).encode())
        self._num_left = MAX_RECORDED_STEPS

    def add(self, load: StepLoad, step_s: float, gap: ObservedGap | None) -> None:
        """A step with this load took so long, after such a gap."""
        if self._num_left > 0:
            self._num_left -= 1
            os.write(self._fd, step_line(load, step_s, gap).encode())


class AloneSteps:
    """How long steps take while the engine holds no row, by what the model says of them.

    Rows that sit a step out slow it too: caches are cold after the step before, and the host plans
    and keeps account of more. So what steps beside them teach says too much of calls alone.
    """

    def __init__(self) -> None:
        self._steps = [
            deque[tuple[float, StepLoad, float]](maxlen=NUM_ALONE_STEPS) for _ in range(NUM_KINDS)
        ]
        self.shares = (1.0,) * NUM_KINDS
        """By kind of step; 1 where too little is known."""

    def add(self, load: StepLoad, step_s: float, now_s: float) -> None:
        """A step took so long, and the engine holds no row."""
        self._steps[load.kind].append((now_s, load.totals(), step_s))

    def compare(self, model: StepTimeModel, now_s: float) -> None:
        """Set the shares by the model as it stands: O(steps remembered), 0.2 ms."""
        self.shares = tuple([self._share(steps, model, now_s) for steps in self._steps])

    def _share(
        self, steps: deque[tuple[float, StepLoad, float]], model: StepTimeModel, now_s: float
    ) -> float:
        while steps and now_s - steps[0][0] > ALONE_MEMORY_S:
            steps.popleft()
        if len(steps) < LEAST_ALONE_STEPS:
            return 1.0
        share = median([step_s / max(model.predict_s(load), 1e-9) for _, load, step_s in steps])
        return min(1.0, max(LEAST_ALONE_SHARE, share))


class Estimates:
    """The step-time model, refined by every step, and the online reserve."""

    def __init__(
        self, settings: PluginSettings, total_blocks: int, calibrated: Sequence[AnyModel] = ()
    ) -> None:
        """`calibrated` are the models of a profile, the best first."""
        self._fit = OnlineFit(calibrated)
        self._reserve_share = settings.reserve if isinstance(settings.reserve, float) else None
        self._total_blocks = total_blocks
        self.forecast = KvForecast(
            window_s=settings.forecast_window_s,
            rule=settings.forecast_rule,
            sigmas=settings.forecast_sigmas,
        )
        self._are_calls_near = True
        self._alone = AloneSteps()
        self._num_samples = 0
        self.model: StepTimeModel = self._fit.as_of_late()

    def predict_s(self, load: StepLoad | None) -> float:
        """How long a step with this load should take; 0 for none."""
        return 0.0 if load is None else self.model.predict_s(load)

    @property
    def error_share(self) -> float:
        """How far predictions of the latest steps were off, on average (0.1: 10 %)."""
        return self._fit.error_share

    @property
    def alone_model(self) -> StepTimeModel:
        """What steps would take if the engine held no row."""
        shares = self._alone.shares
        return self.model if min(shares) == 1.0 else ScaledModel(self.model, shares)

    def observe(self, load: StepLoad, step_s: float) -> None:
        """A step with this load took so long."""
        self._fit.observe(load, step_s)
        self.expect_calls(soon=self._are_calls_near)

    def observe_alone(self, load: StepLoad, step_s: float, now_s: float) -> None:
        """The same step, where the engine holds no row."""
        self._alone.add(load, step_s, now_s)

    def expect_calls(self, *, soon: bool) -> None:
        """Beside calls, and where some may come, `model` follows what steps took of late; rows
        alone are planned by the best one, which is steadier."""
        self._are_calls_near = soon
        self.model = self._fit.as_of_late() if soon else self._fit.best()

    def sample(self, now_s: float, online_blocks: int) -> None:
        """Before a step: online requests hold so many blocks now."""
        self.forecast.sample(now_s, online_blocks)
        self._num_samples += 1
        if self._num_samples % COMPARE_EVERY_STEPS == 0:
            self._alone.compare(self.model, now_s)

    def reserve_blocks(self, online_blocks: int) -> int:
        """Blocks to keep free for online requests that have not come yet."""
        forecast_blocks = self.forecast.forecast_blocks
        return reserve_blocks(
            self._reserve_share, self._total_blocks, online_blocks, forecast_blocks
        )


@dataclass(slots=True)
class _Flight:
    load: StepLoad | None
    scheduled_at_s: float
    predicted_s: float
    gap: ObservedGap | None


class StepClock:
    """The steps that were scheduled and whose output has not come back, oldest first.

    A step begins when the one before it ends, or when it was scheduled if the engine was idle.
    Where no step is scheduled ahead there is a gap between two steps; it counts after a step that
    computed something, if requests were left.
    """

    def __init__(self) -> None:
        self._flights: deque[_Flight] = deque()
        self._last_end_s = float("-inf")
        self._num_before = 0
        self.gap: ObservedGap | None = None
        """The gap before the step that ended last."""

    def scheduled(self, load: StepLoad | None, predicted_s: float, now_s: float) -> None:
        """A step was handed to the engine; `load` is None when nothing is computed."""
        gap = None
        if self._num_before and not self._flights:
            gap = self._num_before, now_s - self._last_end_s
        self._flights.append(_Flight(load, now_s, predicted_s, gap))

    def ended(self, now_s: float) -> tuple[StepLoad, float, float] | None:
        """The oldest step's output came: (load, measured seconds, predicted seconds)."""
        if not self._flights:
            return None
        flight = self._flights.popleft()
        began_s = max(self._last_end_s, flight.scheduled_at_s)
        self._last_end_s = now_s
        self.gap = flight.gap
        if flight.load is None:
            self._num_before = 0
            return None
        self._num_before = flight.load.num_requests
        return flight.load, now_s - began_s, flight.predicted_s

    def fell_idle(self) -> None:
        """No request is left: what comes before the next step is no gap."""
        self._num_before = 0

    def rest_s(self, now_s: float) -> float:
        """The predicted time until every step in flight has ended."""
        end_s = now_s
        previous_s = self._last_end_s
        for flight in self._flights:
            began_s = max(previous_s, flight.scheduled_at_s)
            previous_s = max(began_s + flight.predicted_s, now_s)
            end_s = previous_s
        return max(0.0, end_s - now_s)


def scheduled_load(
    output: SchedulerOutput, planned: StepLoad | None, requests: Mapping[str, Request]
) -> StepLoad | None:
    """The load of the step: the planned one where the step went as planned, None for an empty one.

    `requests` are the scheduler's, after it scheduled the step.
    """
    num_tokens = output.total_num_scheduled_tokens
    if not num_tokens:
        return None
    if (
        planned is not None
        and planned.num_tokens == num_tokens
        and planned.num_requests == len(output.num_scheduled_tokens)
    ):
        return planned
    load = StepLoad()
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        context = request.num_computed_tokens
        load.add(tokens, context, is_decode=tokens == 1 and context > request.num_prompt_tokens)
    return load
