"""What the gateways of several daemons count, added up by the leader."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import msgspec
import pytest

from batchrun.hints import SloBounds
from batchrun.server.gateway.tally import SeenReply, Tally, create_tally
from batchrun.server.web.calls_of_all import (
    FORGET_S,
    GAP_S,
    REPORT_PREFIX,
    CallReport,
    CallsOfAll,
)
from batchrun.server.web.gateway_figures import EngineCalls, GatewayFigures
from batchrun.store import jobs
from batchrun.store.database import Store
from batchrun.wire import FeltCalls

BOUNDS = SloBounds(1.0, 0.05)


@dataclass(slots=True)
class Leader:
    """The leader's look at its own gateway, which counts as the test says, and at others'."""

    store: Store
    figures: GatewayFigures = field(
        default_factory=lambda: GatewayFigures("http://127.0.0.1:9", "secret")
    )
    tally: Tally = field(default_factory=lambda: Tally(create_tally(1), 1, 0))
    calls: CallsOfAll = field(init=False)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.calls = CallsOfAll(self.store, "here", self.figures)

    async def look(self, num_calls: int, after_s: float = 5.0) -> bool:
        """So many calls end at the own gateway, a quarter of them late."""
        for number in range(num_calls):
            ttft_s = 2.0 if number % 4 == 0 else 0.1
            reply = SeenReply("", "a", ttft_s, 0.02, 100, 40, 10, BOUNDS)
            self.tally.count_reply(reply)
        told = [(each.kind, each.labels, each.values.tolist()) for each in self.tally.read()]
        self.now_s += after_s
        self.figures.take(json.dumps(told).encode(), self.now_s)
        return await self.calls.look(self.now_s)

    def hear(self, other: str, engine: str, num_calls: int) -> None:
        """What another daemon has laid into the store."""
        counts = EngineCalls(engine, num_calls, 100 * num_calls, 0, 10 * num_calls)
        report = CallReport(
            self.now_s,
            {engine: counts},
            {engine: FeltCalls(num_calls, 0, num_calls, 0)},
            [(100, 10)],
        )
        jobs.write_setting(self.store, REPORT_PREFIX + other, msgspec.to_builtins(report))

    @property
    def num_calls(self) -> dict[str, int]:
        return {name: each.num_calls for name, each in self.calls.totals.items()}


async def test_calls_of_all_gateways_are_added_up(store: Store) -> None:
    leader = Leader(store)
    leader.hear("b", "a", 1_000)
    assert await leader.look(7)
    assert leader.num_calls == {}, "what came before it led is not counted"
    leader.hear("b", "a", 1_010)
    leader.hear("c", "z", 500)
    await leader.look(4)
    assert leader.num_calls == {"a": 14}
    assert leader.calls.felt == {"a": FeltCalls(14, 1, 14, 0)}
    assert leader.calls.totals["a"] == EngineCalls("a", 14, 1_400, 160, 140)
    leader.hear("c", "z", 503)
    await leader.look(0)
    assert leader.num_calls == {"a": 14, "z": 3}
    assert leader.calls.lengths == [(100, 10)] * 2


async def test_of_each_prompt_as_much_is_cached_as_gateways_saw_since_they_began(
    store: Store,
) -> None:
    leader = Leader(store)
    leader.hear("b", "z", 10)
    assert leader.calls.cached_share(["a"]) == 0
    await leader.look(10)
    assert leader.calls.cached_share(["a"]) == 0.4
    assert leader.calls.cached_share(["a", "z"]) == 0.2


async def test_a_gateway_that_began_anew_is_counted_from_nothing(store: Store) -> None:
    leader = Leader(store)
    leader.hear("b", "a", 100)
    await leader.look(0)
    leader.hear("b", "a", 30)
    await leader.look(0)
    assert leader.num_calls == {"a": 30}


@pytest.mark.parametrize("odd", [None, 3, "x", {"calls": 1}, {"calls": {"a": [1]}, "felt": {}}])
async def test_a_report_that_nobody_can_read_hides_no_other(store: Store, odd: object) -> None:
    leader = Leader(store)
    jobs.write_setting(store, REPORT_PREFIX + "odd", odd)
    leader.hear("b", "a", 1)
    assert await leader.look(0)
    leader.hear("b", "a", 2)
    await leader.look(0)
    assert leader.num_calls == {"a": 1}


async def test_a_gateway_that_is_silent_for_a_minute_tells_nothing(store: Store) -> None:
    leader = Leader(store)
    assert not await leader.calls.look(0.0)
    assert await leader.look(1)
    assert not await leader.calls.look(leader.now_s + 60.0)
    assert await leader.look(5, after_s=90.0)
    assert leader.num_calls == {"a": 5}


async def test_a_gateway_whose_daemon_died_is_missed_for_a_while(store: Store) -> None:
    leader, heard = Leader(store), []
    for number in range(3):
        leader.hear("b", "a", number)
        await leader.look(1)
    for after_s in (0.0, 61.0, 600.0, 300.0):
        assert await leader.look(1, after_s)
        heard.append(leader.calls.are_all_heard)
    assert heard == [True, False, False, True]


async def test_reports_of_daemons_that_are_gone_are_removed(store: Store) -> None:
    leader = Leader(store)
    leader.hear("gone", "a", 5)
    leader.hear("there", "a", 5)
    await leader.look(0)
    leader.hear("there", "a", 6)
    await leader.look(0, after_s=FORGET_S)
    await leader.look(0)
    assert [*jobs.list_settings(store, REPORT_PREFIX)] == ["there"]
    leader.hear("gone", "a", 8)
    await leader.look(0)
    assert leader.num_calls == {"a": 1}, "when the others came, nobody knows"
    assert leader.calls.lengths == [(100, 10)] * 2


async def test_what_came_while_a_daemon_told_nothing_is_no_minutes_work(store: Store) -> None:
    leader = Leader(store)
    leader.hear("b", "a", 1_000)
    await leader.look(0)
    leader.now_s += GAP_S
    leader.hear("b", "a", 100_000)
    await leader.look(0)
    assert leader.num_calls == {}
    leader.hear("b", "a", 100_003)
    await leader.look(0)
    assert leader.num_calls == {"a": 3}


async def test_others_count_while_the_gateway_here_is_silent(store: Store) -> None:
    leader = Leader(store)
    leader.hear("b", "a", 0)
    assert not await leader.calls.look(0.0), "the gateway here may only just begin"
    for seconds in (60, 120, 180):
        leader.now_s = seconds
        leader.hear("b", "a", seconds)
        assert await leader.calls.look(float(seconds))
    assert leader.num_calls == {"a": 120}
    assert not await leader.calls.look(300.0), "by now nobody tells anything"
