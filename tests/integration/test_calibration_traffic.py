"""The traffic of a calibration against the fake engine: probes, online calls, failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from conftest import FakeEngineFactory
from engine_builders import FAKE_MODEL
from estimator_builders import LINEAR_LAW, observed, random_loads

from batchrun.engine.client import EngineClient
from batchrun.engine.command import ManagedSettings
from batchrun.errors import EngineError
from batchrun.estimator.probes import make_round
from batchrun.estimator.profile import EngineFacts, EngineIdentity, Recording, facts_line, step_line
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import LinearModel
from batchrun.simulator import calibrate as online
from batchrun.simulator.calibrate import NUM_ROUNDS
from batchrun.simulator.replay import CallArrival, ReplayTarget, replay

FACTS = EngineFacts(
    EngineIdentity(FAKE_MODEL, "0.32.0", "cpu", "float32", 16),
    kv_blocks=64,
    longest_tokens=256,
    token_budget=64,
    max_running=4,
    vocabulary=2048,
)
STEPS = observed(LINEAR_LAW, random_loads(0, 30))
SLOW_LAW = LinearModel(base_s=0.5, token_s=0.04, pair_s=0, decode_context_s=0, request_s=0)
"""An 8B model on a CPU."""


def recorded_steps(folder: Path) -> Path:
    """The record of an engine that has computed STEPS."""
    path = folder / "steps.jsonl"
    path.write_text(facts_line(FACTS) + "".join(step_line(load, s) for load, s in STEPS))
    return path


def probe(settings: ManagedSettings, steps_path: Path) -> tuple[Recording, list[tuple[str, int]]]:
    """What comes of probing the engine, and the stages told on the way."""
    told: list[tuple[str, int]] = []

    async def run() -> Recording:
        client = EngineClient(settings.base_url)
        try:
            return await online.probe(
                client,
                FAKE_MODEL,
                steps_path,
                lambda stage, done, total: told.append((stage, done)),
            )
        finally:
            await client.close()

    return asyncio.run(run()), told


def test_all_rounds_are_sent_and_the_first_is_not_counted(
    shared_fake_engine: ManagedSettings, tmp_path: Path
) -> None:
    recording, told = probe(shared_fake_engine, recorded_steps(tmp_path))

    # This engine recorded nothing after the first round.
    assert (recording.facts, list(recording.observations)) == (FACTS, [])
    assert [done for _, done in told] == list(range(NUM_ROUNDS * len(make_round(FACTS))))
    assert told[0][0] == "measuring prefills"


def test_an_engine_without_our_scheduler_is_one_line(
    shared_fake_engine: ManagedSettings, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="the engine recorded no steps; are there --scheduler"):
        probe(shared_fake_engine, tmp_path / "steps.jsonl")


async def test_an_engine_that_refuses_a_call_is_one_line(
    fake_engine: FakeEngineFactory, tmp_path: Path
) -> None:
    rule = {"match": {"nth": 3}, "action": {"status": 400}}
    settings = await fake_engine(rules=(rule,))

    with pytest.raises(EngineError, match="did not answer a call of the calibration: "):
        await asyncio.to_thread(probe, settings, recorded_steps(tmp_path))


async def test_online_figures_are_those_of_the_calls(
    fake_engine: FakeEngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "DURATION_S", 1.0)
    settings = await fake_engine("--latency-s=0.1")

    shown = await online.observe_online(
        EngineClient(settings.base_url), FAKE_MODEL, FACTS, LINEAR_LAW
    )

    assert shown.num_calls > 0
    assert 0.1 <= shown.ttft_p50_s <= shown.ttft_p99_s


async def test_what_a_call_takes_beside_its_step_is_the_difference(
    fake_engine: FakeEngineFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(online, "NUM_APART", 4)
    settings = await fake_engine("--latency-s=0.1")
    steps_path, (load, _) = recorded_steps(tmp_path), STEPS[0]
    client = EngineClient(settings.base_url)

    async def record() -> None:
        await asyncio.sleep(0.3)
        with steps_path.open("a") as steps:
            steps.write(step_line(load, 0.06))

    measured_s, _ = await asyncio.gather(
        online.outside_s(client, FAKE_MODEL, steps_path, LINEAR_LAW), record()
    )

    assert measured_s is not None and measured_s >= 0.1 - 0.06
    assert await online.outside_s(client, FAKE_MODEL, steps_path, LINEAR_LAW) is None


async def test_all_steps_of_a_prompt_are_taken_off_its_first_tokens_time(
    fake_engine: FakeEngineFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(online, "NUM_APART", 4)
    settings = await fake_engine("--latency-s=0.1")
    steps_path = recorded_steps(tmp_path)
    chunks = [(64, 64, 0.01), (64, 128, 0.01), (64, 192, 1000.0)]

    async def record() -> None:
        await asyncio.sleep(0.3)
        with steps_path.open("a") as steps:
            for tokens, context, step_s in chunks:
                steps.write(step_line(StepLoad.of([(tokens, context, False)]), step_s))

    client = EngineClient(settings.base_url)
    measured_s, _ = await asyncio.gather(
        online.outside_s(client, FAKE_MODEL, steps_path, LINEAR_LAW), record()
    )

    assert measured_s == 0.0


@pytest.mark.parametrize("law", [LINEAR_LAW, SLOW_LAW])
async def test_an_engine_that_answers_no_chat_calls_has_no_online_figures(
    fake_engine: FakeEngineFactory, monkeypatch: pytest.MonkeyPatch, law: LinearModel
) -> None:
    monkeypatch.setattr(online, "DURATION_S", 1.0)
    settings = await fake_engine(rules=({"match": {"every": 1}, "action": {"status": 400}},))

    with pytest.raises(EngineError, match="did not answer chat calls"):
        await online.observe_online(EngineClient(settings.base_url), FAKE_MODEL, FACTS, law)


async def test_a_slow_engine_is_sent_calls_one_after_another(
    fake_engine: FakeEngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "DURATION_S", 0.1)
    settings = await fake_engine("--latency-s=0.1")

    shown = await online.observe_online(
        EngineClient(settings.base_url), FAKE_MODEL, FACTS, SLOW_LAW
    )

    assert shown.num_calls == online.LEAST_CALLS
    assert shown.ttft_p50_s >= 0.1


@pytest.mark.parametrize("law", [LINEAR_LAW, SLOW_LAW])
async def test_an_engine_that_answers_too_late_is_called_too_slow(
    fake_engine: FakeEngineFactory, monkeypatch: pytest.MonkeyPatch, law: LinearModel
) -> None:
    monkeypatch.setattr(online, "DURATION_S", 1.0)
    monkeypatch.setattr(online, "MOST_ONLINE_S", 1.5)
    settings = await fake_engine("--latency-s=60")

    with pytest.raises(EngineError, match=r"too slow to answer chat calls in 1\.5 s"):
        await online.observe_online(EngineClient(settings.base_url), FAKE_MODEL, FACTS, law)


async def test_a_token_without_text_counts_by_its_id() -> None:
    """What vLLM sends where its reasoning parser takes the first token's text."""
    events = [
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"delta": {}, "token_ids": [7], "finish_reason": "length"}]}',
        b"[DONE]",
    ]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"".join(b"data: %b\n\n" % event for event in events))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        target = ReplayTarget(f"{server.make_url('/v1')}", "m")
        (result,) = await replay([CallArrival(0.0, "hi", 1)], target)

    assert result.error is None
    assert result.ttft_s is not None


@pytest.mark.parametrize("step_s", [0.001, 0.1, 1.0, 3.0, 20.0])
def test_calls_that_come_one_by_one_are_over_in_time(step_s: float) -> None:
    calls = online.calls_apart(LinearModel(step_s, 0, 0, 0, 0), 2_048)

    assert calls[-1].at_s < online.MOST_APART_S
    assert online.LONGEST_S + online.MOST_ONLINE_S + 2 * online.MOST_APART_S < 180


def test_calls_that_come_one_by_one_leave_time_for_every_step_of_a_prompt() -> None:
    one, many = (online.calls_apart(LinearModel(0.1, 0, 0, 0, 0), size) for size in (2_048, 32))

    assert (one[1].at_s, many[1].at_s) == (0.2, 1.0)


def test_calls_come_at_a_rate_that_half_fills_the_engine() -> None:
    rate_per_s = online.calls_per_s(LINEAR_LAW)

    assert rate_per_s == pytest.approx(0.5 / (0.0105 + 24 * 0.0011), rel=0.1)
