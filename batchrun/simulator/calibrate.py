"""A calibration, from the start of an engine to its profile: probes, then online calls alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from msgspec import structs

from batchrun.config import Deployment, SloConfig
from batchrun.daemon.plugin import read_or_make_nonce
from batchrun.daemon.supervisor import build_model, make_engine
from batchrun.engine import process
from batchrun.engine.client import EngineClient
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import ConfigError, EngineError, StateError
from batchrun.estimator.probes import PROBING_SETTINGS, ProbeCall, PromptMaker, make_round
from batchrun.estimator.profile import (
    CalibrationProfile,
    EngineFacts,
    OnlineLatency,
    Recording,
    calibrate,
    read_recording,
)
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel
from batchrun.home import Home
from batchrun.simulator.replay import (
    CHAT_ANSWER,
    CHAT_PROMPT,
    CallArrival,
    ReplayTarget,
    make_prompt,
    percentile,
    replay,
)
from batchrun.types import OutcomeKind, ProgressSink, Request

NUM_ROUNDS = 6
"""The first is not counted where a second was sent whole: an engine that has just started allocates
memory as it goes."""
LONGEST_S = 120.0
"""With the online calls after it, everything is done in under three minutes."""


async def probe(
    client: EngineClient, model: str, steps_path: Path, progress: ProgressSink
) -> Recording:
    """Send all rounds of probes, or those that LONGEST_S allows; what was recorded after the first.

    The engine records its steps to `steps_path`. Raises EngineError when it is too small, answers
    with an error or records nothing.
    """
    facts = _read(steps_path).facts
    probes = make_round(facts)
    prompts = PromptMaker(facts.vocabulary)
    epoch, numbers = int(time.time()), itertools.count(1)
    warm_up, num_sent = Recording(facts, ()), 0

    async def send(calls: Iterable[ProbeCall]) -> None:
        for call in calls:
            body = {
                "model": model,
                "prompt": prompts.prompt(call),
                "max_tokens": call.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            request = _Probe("calibrate", next(numbers), 1, epoch, "/v1/completions", body)
            outcome = await client.execute(request)
            if outcome.kind is not OutcomeKind.OK:
                reason = outcome.error.message if outcome.error else outcome.kind
                raise EngineError(f"the engine did not answer a call of the calibration: {reason}")

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_S):
            for turn in range(NUM_ROUNDS):
                prompts.next_round()
                for i, each in enumerate(probes, turn * len(probes)):
                    progress(f"measuring {each.stage}", i, NUM_ROUNDS * len(probes))
                    await asyncio.gather(*[send(calls) for calls in each.callers])
                num_sent = turn + 1
                if num_sent == 1:
                    warm_up = _read(steps_path)
    recording = _read(steps_path)
    return recording.after(warm_up) if num_sent > 1 else recording


class _Probe(Request):
    """A request that the engine's door takes for no row: those come in a few at a time."""

    @property
    def request_id(self) -> str:
        return f"calibrate-{self.epoch}-{self.row}"


def _read(steps_path: Path) -> Recording:
    try:
        return read_recording(steps_path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(
            "the engine recorded no steps; are there --scheduler-cls or --additional-config "
            "among its `vllm_args`?"
        ) from error


ENGINE_NAME = "calibrate"
"""Its record is that of an engine, so `batchrun down` ends it should we be killed."""


def choose_engine(deployment: Deployment, name: str | None) -> int:
    """The index of the engine or fleet of this name, or of the first that batchrun starts from
    `model`, fleets last. A fleet's engine is measured on this machine.

    Raises ConfigError when there is none.
    """
    by_place = sorted(enumerate(deployment.engines), key=lambda each: each[1].ray is not None)
    for index, config in by_place:
        if config.name == name and not config.may_be_calibrated:
            raise ConfigError(f"engine {name} is not a vLLM that batchrun starts; see `engines`")
        if config.may_be_calibrated and name in {None, config.name}:
            return index
    if name is not None:
        known = ", ".join(config.name for config in deployment.engines)
        raise ConfigError(f"there is no engine {name}; the engines are {known}")
    raise ConfigError("no engine to calibrate: batchrun starts none of the `engines` from `model`")


def check_nothing_runs(deployment: Deployment, home: Home) -> None:
    """Raises StateError while an engine of this home holds the machine, or may."""
    for config in deployment.engines:
        if config.ray is not None and home.fleet(config.name).exists():
            raise StateError(
                f"fleet {config.name} may have replicas on this machine; end them with "
                "`batchrun down` first"
            )
        record = process.read_record(home.run / f"engine-{config.name}.json")
        if record is not None and process.is_alive(record):
            raise StateError(
                f"engine {config.name} is running, and would be measured against itself; "
                "stop it with `batchrun down` first"
            )


def _plain(deployment: Deployment) -> Deployment:
    """Its engines without profiles, those of fleets too on this machine."""
    plain = {"profile": None, "ray": None, "secret_file": None}
    engines = [each.model_copy(update=plain) for each in deployment.engines]
    update = {"policy": "echo", "slo": SloConfig(), "engines": engines}
    return deployment.model_copy(update=update)


def make_measured_engine(
    deployment: Deployment, home: Home, index: int, steps_path: Path
) -> ManagedEngine:
    """The engine, not started; the profile that it names may be the one that is to be written.

    What a calibration that was killed left running is ended first.
    """
    engine = make_engine(_plain(deployment), home, index, read_or_make_nonce(home))
    assert isinstance(engine, ManagedEngine)
    settings = replace(
        engine.settings,
        name=ENGINE_NAME,
        scheduler={**PROBING_SETTINGS, "record_steps": str(steps_path)},
    )
    process.stop_recorded(settings.record_path)
    return ManagedEngine(settings)


DURATION_S = 20.0
BUSY_SHARE = 0.5
"""How busy the online calls alone keep the engine, by its model."""
MOST_CALLS_PER_S = 20.0

_TYPICAL_PROMPT_TOKENS = 80
_TYPICAL_OUTPUT_TOKENS = 24
_TYPICAL_BATCH = 4


async def observe_online(
    client: EngineClient, served_model: str, facts: EngineFacts, model: StepTimeModel
) -> OnlineLatency | None:
    """Poisson chat calls for DURATION_S; None when some were not answered.

    That is so with a model that has no chat template.
    """
    rate_per_s = calls_per_s(model)
    calls = _poisson_calls(rate_per_s, facts.longest_tokens // 8)
    results = await replay(calls, _target(client, served_model))
    ttfts_s = [each.ttft_s for each in results if each.ttft_s is not None]
    tpots_s = [each.tpot_s for each in results if each.tpot_s is not None]
    if any(each.error is not None for each in results) or not ttfts_s or not tpots_s:
        return None
    shares = itertools.product((ttfts_s, tpots_s), (0.5, 0.99))
    latencies_s = [percentile(values_s, share) or 0.0 for values_s, share in shares]
    return OnlineLatency(len(results), rate_per_s, *latencies_s)


def _target(client: EngineClient, served_model: str) -> ReplayTarget:
    return ReplayTarget(
        f"{client.base_url}/v1",
        served_model,
        api_key=client.api_key,
        extra_body={"ignore_eos": True},
    )


NUM_APART, LEAST_APART = 40, 5
LEAST_APART_S, STEPS_APART = 0.2, 4.0
"""Between calls that come one by one: in seconds, and in steps of one such call."""


async def outside_s(
    client: EngineClient, served_model: str, steps_path: Path, model: StepTimeModel
) -> float:
    """What the first token of a chat call takes beside its step, at the median: HTTP, the chat
    template, the tokenizer. Each call finds the engine idle, and one step answers it."""
    before = _read(steps_path)
    results = await replay(_calls_apart(model), _target(client, served_model))
    ttfts_s = [each.ttft_s for each in results if each.ttft_s is not None]
    steps_s = [step_s for _, step_s in _read(steps_path).after(before).observations]
    if not ttfts_s or not steps_s:
        return 0.0
    return max(0.0, median(ttfts_s) - median(steps_s))


def _calls_apart(model: StepTimeModel) -> list[CallArrival]:
    rng = random.Random(0)
    step_s = model.predict_s(StepLoad.of([(_TYPICAL_PROMPT_TOKENS,) * 2 + (False,)]))
    apart_s = max(LEAST_APART_S, STEPS_APART * step_s)
    num_calls = min(NUM_APART, max(LEAST_APART, round(DURATION_S / apart_s)))
    prompts = [make_prompt(_TYPICAL_PROMPT_TOKENS, rng=rng) for _ in range(num_calls)]
    return [CallArrival(apart_s * i, prompt, 1) for i, prompt in enumerate(prompts)]


def _poisson_calls(rate_per_s: float, longest_tokens: int) -> list[CallArrival]:
    """The same calls at every calibration of an engine of this speed."""
    rng = random.Random(0)
    calls: list[CallArrival] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < DURATION_S:
        num_words, max_tokens = (
            min(lengths.draw(rng), longest_tokens) for lengths in (CHAT_PROMPT, CHAT_ANSWER)
        )
        calls.append(CallArrival(at_s, make_prompt(num_words, rng=rng), max_tokens))
        at_s += rng.expovariate(rate_per_s)
    return calls


def calls_per_s(model: StepTimeModel) -> float:
    """The rate at which typical calls take BUSY_SHARE of the engine's time."""
    prefill_s = model.predict_s(StepLoad.of([(_TYPICAL_PROMPT_TOKENS,) * 2 + (False,)]))
    context_tokens = _TYPICAL_PROMPT_TOKENS + _TYPICAL_OUTPUT_TOKENS
    batch_s = model.predict_s(StepLoad.of([(1, context_tokens, True)] * _TYPICAL_BATCH))
    call_s = prefill_s + _TYPICAL_OUTPUT_TOKENS * batch_s / _TYPICAL_BATCH
    return min(MOST_CALLS_PER_S, BUSY_SHARE / max(call_s, 1e-6))


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
    await asyncio.to_thread(build_model, _plain(deployment), home)
    steps_path = home.run / "calibration-steps.jsonl"
    engine = await asyncio.to_thread(make_measured_engine, deployment, home, index, steps_path)
    try:
        begin_s = time.monotonic()
        await _with_stages(engine, engine.start(), progress)
        ready_s = time.monotonic()
        model = deployment.for_engine(deployment.engines[index]).model_name
        recording = await probe(engine.client, model, steps_path, progress)
        progress("fitting", 0, 0)
        profile = await asyncio.to_thread(calibrate, recording, measured_at=time.time())
        progress("measuring online calls", 0, 0)
        best = profile.models[0]
        online = await observe_online(engine.client, model, recording.facts, best)
        if online is not None:
            found_s = await outside_s(engine.client, model, steps_path, best)
            online = structs.replace(online, outside_s=found_s)
        done_s = time.monotonic()
    finally:
        progress("stopping the engine", 0, 0)
        await engine.stop()
        steps_path.unlink(missing_ok=True)
    num_steps = len(recording.observations)
    return Measured(
        structs.replace(profile, online=online), num_steps, ready_s - begin_s, done_s - ready_s
    )


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
