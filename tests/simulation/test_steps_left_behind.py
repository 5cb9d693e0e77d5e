"""The scheduler leaves a file of what it ran last, true after every step, and one of how long
answers were; while it is paused it says so."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from pathlib import Path

import pytest
import scheduler_rig
from scheduler_rig import make_request
from vllm.v1.core.sched.interface import PauseState

from batchrun.daemon.engine_link import EngineLink
from batchrun.engine.sockets import EngineSockets
from batchrun.estimator.call_history import FIRST_LIKELY_TOKENS
from batchrun.vllm_plugin.control import ANSWERS_SUFFIX
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.wire import CHANNEL_VARIABLE, NUM_STEPS, SUFFIX, read_last_steps


@pytest.mark.parametrize("policy", ["bs", "echo"])
def test_the_file_names_the_rows_of_the_last_steps(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHANNEL_VARIABLE, str(tmp_path / "engine-0"))
    scheduler = scheduler_rig.build(policy=policy, token_budget=64, max_num_seqs=6)
    try:
        for row in range(12):
            request = make_request(f"row-{row}", 60, row=row, max_tokens=2 + row % 5)
            scheduler.add_request(request)
        steps: deque[set[int]] = deque(maxlen=NUM_STEPS)
        for number in itertools.count():
            if number == 4:
                scheduler.add_request(make_request("call", 40, max_tokens=9))
            names = set(scheduler_rig.step(scheduler))
            if names:
                steps.append({int(name[4:]) for name in names if name != "call"})
            told = read_last_steps(tmp_path / f"engine-0{SUFFIX}")
            assert told == {("job", row) for step in steps for row in step}
            if not scheduler.has_unfinished_requests():
                break
        assert number > 12
    finally:
        scheduler.shutdown()
    assert (tmp_path / f"engine-0{SUFFIX}").stat().st_mode & 0o777 == 0o600


def test_the_next_engine_knows_how_long_answers_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHANNEL_VARIABLE, str(tmp_path / "engine-0"))
    likely_tokens = []
    for _ in range(2):
        scheduler = scheduler_rig.build(policy="echo", token_budget=64, max_num_seqs=6)
        try:
            assert isinstance(scheduler, ColocatedScheduler)
            likely_tokens.append(scheduler.state.calls.likely_tokens(9_000))
            for number in range(40):
                scheduler.add_request(make_request(f"call-{number}", 20, max_tokens=20))
            while scheduler.has_unfinished_requests():
                scheduler_rig.step(scheduler)
        finally:
            scheduler.shutdown()

    assert likely_tokens[0] == FIRST_LIKELY_TOKENS
    assert 15 < likely_tokens[1] < 30
    assert (tmp_path / f"engine-0{ANSWERS_SUFFIX}").stat().st_mode & 0o777 == 0o600


async def test_a_paused_engine_says_so_without_a_step_and_owes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHANNEL_VARIABLE, str(tmp_path / "engine-0"))
    scheduler = scheduler_rig.build(policy="echo", token_budget=64, max_num_seqs=1)
    link = EngineLink(EngineSockets(tmp_path / "engine-0"), "one")
    hearing = asyncio.create_task(link.run(lambda: None))

    def has_work() -> bool:
        look = link.look(has_rows=True)
        return look is not None and bool(look.has_work)

    async def has_work_at(pause: PauseState) -> bool:
        scheduler.set_pause_state(pause)
        while link.telemetry is None or link.telemetry.pause != pause:
            await asyncio.sleep(0.01)
        return has_work()

    try:
        async with asyncio.timeout(30):
            for row in range(2):
                scheduler.add_request(make_request(f"row-{row}", 60, row=row, max_tokens=9))
            scheduler_rig.step(scheduler)
            states = (PauseState.PAUSED_ALL, PauseState.UNPAUSED, PauseState.PAUSED_NEW)
            assert [await has_work_at(each) for each in states] == [False, True, True]
            while scheduler.has_requests():
                scheduler_rig.step(scheduler)
            assert len(scheduler.waiting) == 1
            while has_work():
                await asyncio.sleep(0.01)
    finally:
        hearing.cancel()
        await asyncio.wait([hearing])
        scheduler.shutdown()
