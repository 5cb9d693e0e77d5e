"""Online calls that an engine keeps for the daemon, over real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_engine_link import Engine, engine, path, running, steering_of, telemetry, until

from batchrun.daemon.engine_link import Steering
from batchrun.errors import StateError
from batchrun.vllm_plugin.telemetry import MAX_KEPT, CallRecorder
from batchrun.wire import RecordedCall

__all__ = ["engine", "path"]
"""The fixtures of an engine without an engine."""


async def test_calls_are_recorded_while_they_are_asked_for(
    path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steering, link = steering_of(path, [])
    calls = engine.control.calls
    async with running(steering):
        engine.channel.publish(telemetry())
        await until(lambda: link.telemetry)
        assert not calls.is_on
        (began,) = (await steering.collect_calls({})).values()
        for i in range(2_500):
            calls.arrived(f"call-{i}", 10.0 + i)
            calls.ended(f"call-{i}", 1 + i, 2)
        told = [(await steering.collect_calls({"0": at}))["0"] for at in (0, 1_000, 2_000, 2_400)]
        monkeypatch.setattr("batchrun.daemon.engine_link.RECORDING_LEASE_S", 0.0)
        await steering.collect_calls({})
        await until(lambda: not calls.is_on)

    assert began is not None and began.calls == ()
    fetched = [recording for recording in told if recording is not None]
    assert {recording.id for recording in fetched} == {began.id}
    assert [len(recording.calls) for recording in fetched] == [1_000, 1_000, 500, 100]
    assert fetched[3].calls[0] == RecordedCall(2_410.0, 2_401, 2)


async def test_an_engine_that_does_not_listen_tells_no_calls(path: Path) -> None:
    steering, _ = steering_of(path, [])
    async with running(steering):
        assert await steering.collect_calls({}) == {"0": None}
    with pytest.raises(StateError, match="no engine runs batchrun's scheduler"):
        await Steering({}, 1, list).collect_calls({})


def test_calls_that_nobody_fetches_give_way_to_newer_ones() -> None:
    calls = CallRecorder()
    calls.switch(on=True)
    calls.ended("before the recording", 1, 1)
    for i in range(MAX_KEPT + 10):
        calls.arrived(str(i), float(i))
        calls.ended(str(i), 1, 1)
    calls.arrived("open", 1e6)

    told = calls.collect(0)

    assert (told.first_number, told.calls[0].arrived_at) == (10, 10.0)
    assert told.oldest_open_at == 1e6
    assert calls.collect(MAX_KEPT + 10).calls == ()
