"""A calibration, from the start of an engine to its profile: probes, then online calls alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
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
from batchrun.estimator.step_load import Observation, StepLoad
from batchrun.estimator.step_time import StepTimeModel
from batchrun.home import Home
from batchrun.simulator.replay import (
    CHAT_ANSWER,
    CHAT_PROMPT,
    CallArrival,
    OnlineResult,
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
"""With MOST_ONLINE_S and MOST_APART_S after it, everything is done in under three minutes."""


async def probe(
    client: EngineClient, model: str, steps_path: Path, progress: ProgressSink
) -> Recording:
    """Send all rounds of probes, or those that LONGEST_S allows; what was recorded after the first.

    Of the first round none is begun whose first step would not end in time, by the best pace so
    far: a slow engine's step goes on after its caller has left, into the calls that come next.
    The engine records its steps to `steps_path`. Raises EngineError when it is too small, answers
    with an error or records nothing.
    """
    facts = _read(steps_path).facts
    probes = make_round(facts)
    prompts = PromptMaker(facts.vocabulary)
    epoch, numbers = int(time.time()), itertools.count(1)
    warm_up, num_sent = Recording(facts, ()), 0
    end_s, token_s = time.monotonic() + LONGEST_S, 0.0

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
                    begin_s = time.monotonic()
                    step_tokens = min(each.num_tokens, facts.token_budget)
                    if turn == 0 and begin_s + token_s * step_tokens > end_s:
                        return _read(steps_path)
                    progress(f"measuring {each.stage}", i, NUM_ROUNDS * len(probes))
                    await asyncio.gather(*[send(calls) for calls in each.callers])
                    took_s = (time.monotonic() - begin_s) / each.num_tokens
                    token_s = min(token_s or took_s, took_s)
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
"""In which online calls begin."""
MOST_ONLINE_S = 35.0
"""In which they end."""
BUSY_SHARE = 0.5
"""How busy the online calls alone keep the engine, by its model."""
MOST_CALLS_PER_S = 20.0
LEAST_CALLS, LEAST_ANSWERED = 5, 2
"""Where fewer would come in DURATION_S they come one after another; fewer answers tell nothing."""
SLOW_ANSWER_TOKENS = 8
"""Of calls that come one after another: more of them end, and each has enough for its TPOT."""

_TYPICAL_PROMPT_TOKENS = 80
_TYPICAL_OUTPUT_TOKENS = 24
_TYPICAL_BATCH = 4


async def observe_online(
    client: EngineClient, served_model: str, facts: EngineFacts, model: StepTimeModel
) -> OnlineLatency:
    """Poisson chat calls for DURATION_S; to a slow engine calls one after another.

    Raises EngineError when some were refused, as by a model that has no chat template, or too few
    were answered in time.
    """
    rate_per_s, longest_tokens = calls_per_s(model), facts.longest_tokens // 8
    calls = _poisson_calls(rate_per_s, longest_tokens)
    if len(calls) >= LEAST_CALLS:
        target = _target(client, served_model, MOST_ONLINE_S - DURATION_S)
        results = await replay(calls, target)
    else:
        target = _target(client, served_model, MOST_ONLINE_S)
        begin_s = time.monotonic()
        results = await _one_after_another(longest_tokens, target)
        rate_per_s = len(results) / (time.monotonic() - begin_s)
    ended = [each for each in results if not each.is_late]
    ttfts_s = [each.ttft_s for each in ended if each.ttft_s is not None]
    tpots_s = [each.tpot_s for each in ended if each.tpot_s is not None]
    if any(each.error is not None for each in ended) or (ended and not tpots_s):
        raise EngineError("the model did not answer chat calls")
    if len(tpots_s) < LEAST_ANSWERED:
        raise EngineError(f"the engine was too slow to answer chat calls in {MOST_ONLINE_S:g} s")
    shares = itertools.product((ttfts_s, tpots_s), (0.5, 0.99))
    latencies_s = [percentile(values_s, share) or 0.0 for values_s, share in shares]
    return OnlineLatency(len(ended), rate_per_s, *latencies_s)


async def _one_after_another(longest_tokens: int, target: ReplayTarget) -> list[OnlineResult]:
    """Calls with short answers for DURATION_S, or until LEAST_CALLS have ended. None is begun that
    would not end within MOST_ONLINE_S by the pace of those before: its step would go on."""
    rng, results = random.Random(0), list[OnlineResult]()
    begin_s = now_s = time.monotonic()
    word_s = 0.0
    while len(results) < LEAST_CALLS or now_s < begin_s + DURATION_S:
        num_words = min(CHAT_PROMPT.draw(rng), longest_tokens)
        if now_s + word_s * num_words > begin_s + MOST_ONLINE_S:
            break
        left = replace(target, timeout_s=begin_s + MOST_ONLINE_S - now_s)
        prompt = make_prompt(num_words, rng=rng)
        results += await replay([CallArrival(0.0, prompt, SLOW_ANSWER_TOKENS)], left)
        if results[-1].error is not None:
            break
        took_s, now_s = time.monotonic() - now_s, time.monotonic()
        word_s = max(word_s, took_s / num_words)
    return results


def _target(
    client: EngineClient, served_model: str, timeout_s: float, **body: object
) -> ReplayTarget:
    return ReplayTarget(
        f"{client.base_url}/v1",
        served_model,
        api_key=client.api_key,
        timeout_s=timeout_s,
        extra_body={"ignore_eos": True, **body},
    )


NUM_APART, MOST_APART_S = 40, 10.0
"""Calls that come one by one: at most so many, that begin within so long."""
LEAST_APART_S, PROMPTS_APART = 0.2, 2.0
"""Between them: in seconds, and in times of a prompt of two tokens a word."""


async def outside_s(
    client: EngineClient, served_model: str, steps_path: Path, model: StepTimeModel
) -> float | None:
    """What the first token of a chat call takes beside its steps, at the median: HTTP, the chat
    template, the tokenizer. Each call finds the engine idle, and asks for the token's id, which
    comes where a reasoning parser takes its text. None when none was answered."""
    before = _read(steps_path)
    target = _target(client, served_model, MOST_APART_S, return_token_ids=True)
    results = await replay(calls_apart(model, before.facts.token_budget), target)
    ttfts_s = [each.ttft_s for each in results if each.ttft_s is not None]
    prompts_s = _prompts_s(_read(steps_path).after(before).observations)
    if not ttfts_s or not prompts_s:
        return None
    return max(0.0, median(ttfts_s) - median(prompts_s))


def _prompts_s(steps: Iterable[Observation]) -> list[float]:
    """The time of all steps of each prompt; a step that goes on where the one before ended is of
    the same one."""
    prompts_s: list[float] = []
    end_tokens = 0
    for load, step_s in steps:
        if end_tokens and load.context_tokens - load.num_tokens == end_tokens:
            prompts_s[-1] += step_s
        else:
            prompts_s.append(step_s)
        end_tokens = load.context_tokens
    return prompts_s


def calls_apart(model: StepTimeModel, token_budget: int) -> list[CallArrival]:
    """Calls for one token, each when the one before should have ended; few to a slow engine."""
    rng = random.Random(0)
    most_tokens = 2 * _TYPICAL_PROMPT_TOKENS
    step_tokens = min(most_tokens, token_budget)
    step_s = model.predict_s(StepLoad.of([(step_tokens, most_tokens, False)]))
    apart_s = max(LEAST_APART_S, PROMPTS_APART * math.ceil(most_tokens / token_budget) * step_s)
    num_calls = max(1, min(NUM_APART, int(MOST_APART_S / apart_s)))
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
    """A profile, and how long it took to get: to start the engine, and to measure and fit.

    `without_online` says why the profile has no figures of online calls.
    """

    profile: CalibrationProfile
    num_steps: int
    engine_start_s: float
    measuring_s: float
    without_online: str = ""


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
        best, online, without_online = profile.models[0], None, ""
        try:
            online = await observe_online(engine.client, model, recording.facts, best)
            found_s = await outside_s(engine.client, model, steps_path, best)
            online = structs.replace(online, outside_s=found_s)
        except EngineError as error:
            without_online = str(error)
        done_s = time.monotonic()
    finally:
        progress("stopping the engine", 0, 0)
        await engine.stop()
        steps_path.unlink(missing_ok=True)
    num_steps = len(recording.observations)
    return Measured(
        structs.replace(profile, online=online),
        num_steps,
        ready_s - begin_s,
        done_s - ready_s,
        without_online,
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
