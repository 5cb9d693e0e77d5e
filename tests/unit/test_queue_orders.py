"""Orders by the size of calls and by what of them is cached."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from echo_views import NOW_S, call, held, names, prefilling_call, view

from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.queue_orders import GroupsOrder, LarryOrder
from batchrun.scheduling.view import PrefixHit, RequestView

ALL, NOTHING = held(100), PrefixHit()
"""Ten tenths of a prompt of 101 tokens."""


def waiting(name: str, *, tokens: int = 99, waited_s: float = 0.0) -> RequestView:
    return call(name, prompt=tokens, arrival_at_s=NOW_S - waited_s)


def test_a_large_call_waits_the_longer_the_more_calls_wait() -> None:
    large = waiting("large", tokens=999, waited_s=1.0)
    others = [waiting(f"small {i}", tokens=99) for i in range(20)]

    few = LarryOrder(alpha=300.0).order(view(waiting=[large, *others[:2]]), [])
    many = LarryOrder(alpha=300.0).order(view(waiting=[large, *others]), [])

    assert few[0] is large
    assert many[-1] is large


def test_memory_counts_in_blocks_of_16_tokens_whatever_the_engines_are() -> None:
    large, small = waiting("large", tokens=1_600, waited_s=1.0), waiting("small", tokens=16)
    fits = 2 * (1_600 - 20) / 16

    assert names(LarryOrder(fits + 1).order(view(waiting=[large, small]), [])) == ["large", "small"]
    assert names(LarryOrder(fits - 1).order(view(waiting=[large, small]), [])) == ["small", "large"]


def test_what_others_hold_takes_no_memory() -> None:
    fresh, cached = waiting("fresh"), waiting("cached")
    hits = {"fresh": NOTHING, "cached": ALL}
    engine = view(waiting=[fresh, cached], look_up=lambda request: hits[request.request_id])

    assert names(LarryOrder().order(engine, [])) == ["cached", "fresh"]


def test_with_a_very_large_alpha_order_is_by_arrival() -> None:
    rng = Random(0)
    calls = [
        waiting(f"call {i}", tokens=rng.randint(10, 9_000), waited_s=30.0 - i) for i in range(25)
    ]
    begun = prefilling_call("begun", left=50)
    engine = view(running=[begun], waiting=calls)

    larry, arrival = LarryOrder(1e6), ArrivalOrder()

    assert names(larry.order(engine, [begun])) == names(arrival.order(engine, [begun]))


def test_groups_take_turns_by_how_much_is_cached_and_nobody_is_left_out() -> None:
    queue, served = GroupsOrder(), []
    cached = [waiting(f"cached {i}", tokens=101) for i in range(66)]
    fresh = [waiting(f"fresh {i}") for i in range(6)]
    left = [*cached, *fresh]
    while left:
        engine = view(
            waiting=left,
            free_blocks=11,
            max_running=1,
            look_up=lambda request: ALL if "cached" in request.request_id else NOTHING,
        )
        (admitted,) = EchoPolicy(EchoOptions(), queue).plan(engine).admit
        served.append(admitted.request_id)
        left.remove(admitted)

    first = served[:24]
    assert sum("fresh" in name for name in first) == 2
    assert served.index("fresh 0") < served.index("fresh 1") < served.index("fresh 5")


def test_a_group_that_was_not_there_has_no_turns_saved_up() -> None:
    queue = GroupsOrder()
    engine = view(waiting=[waiting(f"fresh {i}") for i in range(8)], free_blocks=1_000)
    EchoPolicy(EchoOptions(), queue).plan(engine)
    half = [waiting(f"half {i}", tokens=99) for i in range(60)]
    rest = [*half, *(waiting(f"fresh {i}") for i in range(8, 10))]
    engine = view(
        waiting=rest,
        look_up=lambda request: held(50) if "half" in request.request_id else NOTHING,
    )

    order = names(queue.order(engine, []))

    assert order.index("fresh 8") < 10


def test_vllms_priority_goes_before_the_turns_of_groups() -> None:
    low = [replace(waiting(f"low {i}", tokens=101), priority=5) for i in range(3)]
    engine = view(waiting=[waiting("first"), *low], look_up=lambda _: ALL)

    assert names(GroupsOrder().order(engine, []))[0] == "first"
