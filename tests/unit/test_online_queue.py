"""The queue of online calls: who is looked at first, and that an order is one method of a class."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from echo_views import call, decoding_call, decoding_row, names, view

from batchrun.scheduling.draft import Draft
from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.slack import StepLimits
from batchrun.scheduling.view import BY_ARRIVAL, EngineView, Plan, RequestView
from batchrun.scheduling.worth import Victims


class LastComeFirst(ArrivalOrder):
    """The newest call first."""

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """By falling arrival."""
        return [*begun, *sorted(view.online_waiting, key=attrgetter("arrival_at_s"), reverse=True)]


class NobodyYet(ArrivalOrder):
    """Lets no call in."""

    def fill(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        """All have to wait."""
        return not prompts


class HalfASecond(ArrivalOrder):
    """Every step may take as long."""

    def limits(self, view: EngineView) -> StepLimits:
        """The same for all work."""
        return StepLimits(0.5, 0.5)


def plan_with(queue: ArrivalOrder, engine: EngineView) -> Plan:
    """What Echo makes of an engine that it has not seen before."""
    return EchoPolicy(EchoOptions(), queue).plan(engine)


def two_calls() -> list[RequestView]:
    """Calls that came one after the other."""
    return [call("first", arrival_at_s=1.0), call("second", arrival_at_s=2.0)]


def test_calls_stand_by_priority_then_by_arrival() -> None:
    urgent = call("urgent", priority=-1, arrival_at_s=9.0)
    waiting = [call("late", arrival_at_s=3.0), *two_calls(), urgent]

    assert names(sorted(waiting, key=BY_ARRIVAL)) == ["urgent", "first", "second", "late"]


def test_the_first_to_come_gets_the_only_room() -> None:
    engine = view(waiting=two_calls(), free_blocks=10)

    assert names(plan_with(ArrivalOrder(), engine).admit) == ["first"]


def test_another_order_gives_the_only_room_to_another() -> None:
    engine = view(waiting=two_calls(), free_blocks=10)

    assert names(plan_with(LastComeFirst(), engine).admit) == ["second"]


def test_a_call_that_has_to_wait_holds_up_all_behind_it() -> None:
    large = call("large", prompt=199, arrival_at_s=0.0)
    engine = view(waiting=[large, *two_calls()], free_blocks=10)

    assert plan_with(ArrivalOrder(), engine).admit == ()


def test_who_is_let_in_is_the_queues_own_affair() -> None:
    engine = view(running=[decoding_row()], waiting=two_calls())

    plan = plan_with(NobodyYet(), engine)

    assert plan.admit == plan.preempt == ()


def test_how_long_a_step_may_take_is_the_queues_own_affair() -> None:
    engine = view(running=[decoding_call()], waiting=[call(prompt=9_999)])

    chunks = [plan_with(queue, engine).caps["call"] for queue in (ArrivalOrder(), HalfASecond())]

    assert chunks[1] == 4_999
    assert chunks[0] > chunks[1]
