"""What vLLM offers works under each order of calls: one real engine whose order changes while it
runs, offline rows beside every check."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from combination_rig import (
    ENV,
    check_callers_that_leave,
    check_more_adapters_than_slots,
    check_nothing_is_left,
    check_several_choices,
    check_structured_outputs,
    feature_args,
    settings_of,
)
from engine_builders import start_and_let_go, stop
from engine_calls import DOCUMENT, NONCE, EngineCalls, promised

from batchrun.daemon.engine_link import EngineLink, Steering
from batchrun.engine.command import ManagedSettings
from batchrun.engine.sockets import EngineSockets
from batchrun.scheduling.policies import DEFAULT_QUEUE, QUEUES
from batchrun.wire import CHANNEL_VARIABLE

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

ORDERS = sorted(QUEUES.keys() - {DEFAULT_QUEUE})
CLASSES = ({"ttft_s": 0.5, "tpot_s": 0.2}, {"ttft_s": 5.0, "tpot_s": 1.0})
TESTS = Path(__file__).parents[1]
NUM_CALLS = 40
"""More than run at once."""
TURNS = [[*range(100, 180)], [*range(300, 320)], [*range(500, 590)]]
EPOCHS = itertools.count(1)
"""Orders of an earlier test are older than those of a later one."""


@pytest.fixture(scope="module")
def settings(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedSettings]:
    """The engine, which takes orders at `channel` in its run folder."""
    folder = tmp_path_factory.mktemp("orders")
    route = "--middleware=session_route.SessionRoute"
    plain = settings_of(folder, tiny_model, route, *feature_args(folder))
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = ENV | {CHANNEL_VARIABLE: str(folder / "channel"), "PYTHONPATH": paths}
    made = replace(plain, env=env)
    start_and_let_go(made)
    yield made
    stop(made)


@pytest_asyncio.fixture(params=ORDERS)
async def engine(
    settings: ManagedSettings, request: pytest.FixtureRequest
) -> AsyncIterator[EngineCalls]:
    """The engine under an order of calls, that is given to it as by the daemon. No plan may have
    failed."""
    link = EngineLink(EngineSockets(settings.run_dir / "channel"), "0")
    wanted = {"0": (link, NONCE)}
    steering = Steering(wanted, next(EPOCHS), lambda: ["job"], online_queue=request.param)
    listening = asyncio.create_task(steering.run())
    calls = EngineCalls(settings.base_url)
    try:
        while (told := link.telemetry) is None or told.online_queue != request.param:
            await asyncio.sleep(0.05)
        yield calls
        told = link.telemetry
        assert told is not None
        assert (told.num_policy_errors, told.num_malformed_hints) == (0, 0)
    finally:
        await calls.close()
        listening.cancel()
        await asyncio.wait([listening])


async def test_callers_leave_while_they_are_answered_and_while_they_wait(
    engine: EngineCalls,
) -> None:
    await check_callers_that_leave(engine)

    prompts = [f"{number} {DOCUMENT}" for number in range(NUM_CALLS)]
    alone = [await engine.text(prompt) for prompt in prompts[1::8]]
    async with engine.rows_beside():
        calls = [
            asyncio.create_task(engine.text(prompt, **promised(**CLASSES[number % 2])))
            for number, prompt in enumerate(prompts)
        ]
        await engine.gauge_of_at_least("vllm:num_requests_waiting", 1)
        for call in calls[::2]:
            call.cancel()
        stayed = await asyncio.gather(*calls[1::2])
        await asyncio.gather(*calls[::2], return_exceptions=True)
    assert stayed[::4] == alone
    await check_nothing_is_left(engine)


async def test_several_choices(engine: EngineCalls) -> None:
    await check_several_choices(engine)


async def test_structured_outputs(engine: EngineCalls) -> None:
    await check_structured_outputs(engine)


async def test_more_adapters_than_slots(engine: EngineCalls) -> None:
    await check_more_adapters_than_slots(engine)


async def test_turns_of_streaming_sessions_are_answered_as_alone(engine: EngineCalls) -> None:
    alone = await engine.session(TURNS, **promised(**CLASSES[0]))
    async with engine.rows_beside():
        beside = await asyncio.gather(
            *(engine.session(TURNS, **promised(**CLASSES[number % 2])) for number in range(4))
        )
    assert [len(answer) for answer in alone] == [16] * len(TURNS)
    assert beside == [alone] * 4
    # vLLM keeps of an answer what was computed: all but its last token.
    before = [*TURNS[0], *alone[0][:-1], *TURNS[1], *alone[1][:-1], *TURNS[2]]
    whole = await engine.complete(before, return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == alone[2]
    await check_nothing_is_left(engine)
