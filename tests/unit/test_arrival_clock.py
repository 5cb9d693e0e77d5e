"""When calls came, on the engine's clock, though the wall clock is set or the machine sleeps."""

from __future__ import annotations

import math

import pytest
import scheduler_rig as rig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from batchrun.vllm_plugin.scheduler import ColocatedScheduler


class Clocks:
    """A wall clock and a monotonic one, which stands while the machine sleeps."""

    def __init__(self) -> None:
        self.wall_s, self.ours_s = 1_800_000_000.0, 500.0

    def engine(self) -> ColocatedScheduler:
        scheduler = rig.ours(rig.build())
        state = scheduler.state
        state.clock, state.wall = lambda: self.ours_s, lambda: self.wall_s
        state.wall_offset_s = self.wall_s - self.ours_s
        return scheduler

    def call(self, name: str, age_s: float) -> Request:
        request = rig.make_request(name)
        request.arrival_time = self.wall_s - age_s
        return request


@pytest.mark.parametrize("set_by_s", [-3_600.0, -0.5, 0.0, 0.5, 86_400.0])
def test_a_call_is_as_old_as_it_is_after_the_wall_clock_has_jumped(set_by_s: float) -> None:
    clocks = Clocks()
    scheduler = clocks.engine()
    clocks.wall_s += set_by_s
    scheduler.add_request(clocks.call("call", age_s=0.2))

    assert scheduler.state.views["call"].arrival_at_s == pytest.approx(499.8, abs=1e-6)
    assert scheduler.daemon_link.telemetry(500.0).sent_at == pytest.approx(clocks.wall_s)


def test_a_call_from_the_future_comes_now() -> None:
    clocks = Clocks()
    scheduler = clocks.engine()
    scheduler.add_request(clocks.call("call", age_s=-30.0))

    assert scheduler.state.views["call"].arrival_at_s == 500.0


def test_calls_of_one_instant_stay_together_though_the_clocks_drift() -> None:
    clocks = Clocks()
    scheduler = clocks.engine()
    first = clocks.call("first", age_s=1.0)
    clocks.wall_s += 0.001
    second = rig.make_request("second")
    second.arrival_time = first.arrival_time
    scheduler.add_request(first)
    scheduler.add_request(second)

    views = scheduler.state.views
    assert views["first"].arrival_at_s == views["second"].arrival_at_s


def test_rows_that_begin_after_calls_that_no_step_was_planned_for_hear_of_them() -> None:
    clocks = Clocks()
    scheduler = clocks.engine()
    scheduler.add_request(clocks.call("call", age_s=0.0))
    clocks.ours_s = 700.0
    rig.run(scheduler)

    assert hear_of_calls(scheduler, clocks, 1.0)
    assert not hear_of_calls(scheduler, clocks, 59.0)


def test_rows_beside_a_session_hear_of_its_turns_alone() -> None:
    clocks = Clocks()
    scheduler = clocks.engine()
    for _ in range(2):
        turn = rig.make_request("session", max_tokens=1, resumable=True)
        turn.arrival_time = clocks.wall_s
        scheduler.add_request(turn)
        for _ in range(3):
            rig.step(scheduler)
        assert hear_of_calls(scheduler, clocks, 1.0)
        assert not hear_of_calls(scheduler, clocks, 59.0)
    assert "session" in scheduler.state.views


def hear_of_calls(scheduler: ColocatedScheduler, clocks: Clocks, after_s: float) -> bool:
    clocks.ours_s += after_s
    clocks.wall_s += after_s
    return scheduler.view_builder.view((), 0, 64, 8).were_calls_lately


def test_calls_that_a_pause_fell_into_tell_nothing_of_latencies() -> None:
    clocks = Clocks()
    scheduler = clocks.engine()
    scheduler.add_request(clocks.call("paused", age_s=0.0))
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    clocks.ours_s += 600.0
    clocks.wall_s += 600.0
    scheduler.set_pause_state(PauseState.UNPAUSED)
    scheduler.add_request(clocks.call("on its way", age_s=1.0))
    scheduler.add_request(clocks.call("new", age_s=0.0))
    rig.run(scheduler)

    costs = scheduler.daemon_link.meter.costs
    assert [latency.seconds for latency in costs.ttft] == [0.0]
    assert len(costs.tpot) == 1


def test_on_a_clock_of_its_own_arrivals_stand_as_they_are() -> None:
    scheduler = rig.ours(rig.build())
    scheduler.use_clock(lambda: 5.0)
    request = rig.make_request("call")
    request.arrival_time = math.pi
    scheduler.add_request(request)

    assert scheduler.state.views["call"].arrival_at_s == math.pi
