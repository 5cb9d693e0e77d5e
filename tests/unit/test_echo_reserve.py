"""What keeps rows out: blocks reserved for calls, wanted by planned rows or promised to others."""

from __future__ import annotations

from echo_views import (
    BLOCK_TOKENS,
    NOW_S,
    Kv,
    call,
    decoding_call,
    decoding_row,
    held,
    hit_of,
    idle,
    names,
    plan_of,
    row,
    view,
)

from batchrun.estimator.call_history import CallHistory
from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.view import BlockKind, BlockLaw, PrefixHit, RequestView

SHORT_ANSWERS = CallHistory()
"""Of calls that are known to end soon: how long others may become is another test's."""
for _ in range(40):
    SHORT_ANSWERS.ended(10)


def test_a_row_comes_in_up_to_the_reserve_and_no_further() -> None:
    running, waiting = [decoding_call()], [row("row 1"), row("row 2")]

    plan = plan_of(
        view(
            calls=SHORT_ANSWERS, running=running, waiting=waiting, free_blocks=50, reserve_blocks=40
        )
    )
    one_more = plan_of(
        view(
            calls=SHORT_ANSWERS, running=running, waiting=waiting, free_blocks=50, reserve_blocks=41
        )
    )

    assert names(plan.admit) == ["row 1"]
    assert one_more.admit == ()


def test_a_document_is_not_begun_on_reserved_blocks() -> None:
    running, waiting = [decoding_call()], [row("first of A", prompt=990, document="A")]

    plan = plan_of(
        view(
            calls=SHORT_ANSWERS,
            running=running,
            waiting=waiting,
            free_blocks=140,
            reserve_blocks=40,
        )
    )
    one_more = plan_of(
        view(
            calls=SHORT_ANSWERS,
            running=running,
            waiting=waiting,
            free_blocks=140,
            reserve_blocks=41,
        )
    )

    assert names(plan.admit) == ["first of A"]
    assert one_more.admit == ()


def test_the_reserve_is_there_for_calls_and_nobody_goes_for_one_that_fits_it() -> None:
    engine = view(
        running=[decoding_row("row 1")],
        waiting=[call(), row("row 2")],
        free_blocks=10,
        reserve_blocks=10,
    )

    plan = plan_of(engine)

    assert names(plan.admit) == ["call"]
    assert plan.preempt == ()


def test_blocks_that_planned_rows_will_hit_keep_other_rows_out() -> None:
    running, waiting = [decoding_call()], [row("row 1"), row("row 2")]

    plan = plan_of(
        view(
            calls=SHORT_ANSWERS, running=running, waiting=waiting, free_blocks=50, wanted_blocks=40
        )
    )
    one_more = plan_of(
        view(
            calls=SHORT_ANSWERS, running=running, waiting=waiting, free_blocks=50, wanted_blocks=41
        )
    )

    assert names(plan.admit) == ["row 1"]
    assert one_more.admit == ()


def test_the_wanted_blocks_that_a_row_hits_itself_do_not_keep_it_out() -> None:
    reader = row("row 1", prompt=590, hit=idle(200))

    def admitted_beside(wanted_blocks: int) -> list[str]:
        running = [decoding_call()]
        engine = view(
            running=running, waiting=[reader], free_blocks=60, wanted_blocks=wanted_blocks
        )
        return names(plan_of(engine).admit)

    assert admitted_beside(20) == ["row 1"]
    assert admitted_beside(21) == []


def test_a_hit_that_others_hold_costs_nothing_and_an_idle_one_its_blocks() -> None:
    on_held = row("row 1", prompt=990, hit=held(900))
    on_idle = row("row 1", prompt=990, hit=idle(900))
    running = [decoding_call()]

    assert names(
        plan_of(view(calls=SHORT_ANSWERS, running=running, waiting=[on_held], free_blocks=10)).admit
    )
    assert not names(
        plan_of(view(calls=SHORT_ANSWERS, running=running, waiting=[on_idle], free_blocks=99)).admit
    )
    assert names(
        plan_of(
            view(calls=SHORT_ANSWERS, running=running, waiting=[on_idle], free_blocks=100)
        ).admit
    )


def test_a_window_that_is_cached_in_part_takes_no_more_than_a_window() -> None:
    window = BlockKind(BLOCK_TOKENS, num_groups=6, most_blocks=30, kept_blocks=11)
    law = BlockLaw(BlockKind(BLOCK_TOKENS), window)
    long = call(prompt=2_999, handle=Kv(PrefixHit(200, idle_blocks=20 + 6 * 10)))
    engine = view(waiting=[long], law=law, free_blocks=law.blocks(3_000))

    assert names(plan_of(engine).admit) == ["call"]


def test_a_row_that_is_mostly_cached_may_use_the_reserve() -> None:
    half, more = row("row 1", prompt=100, hit=held(50)), row("row 2", prompt=100, hit=held(60))

    plan = plan_of(
        view(
            calls=SHORT_ANSWERS,
            running=[decoding_call()],
            waiting=[half, more],
            free_blocks=20,
            reserve_blocks=20,
        )
    )

    assert names(plan.admit) == ["row 2"]


def test_where_one_row_of_a_document_finds_no_room_the_others_are_not_looked_at() -> None:
    rows = [row(f"row {i}", prompt=100, hit=held(40), document="A") for i in range(5)]
    looked_up: list[str] = []

    def look_up(request: RequestView) -> PrefixHit:
        looked_up.append(request.request_id)
        return hit_of(request)

    plan = plan_of(view(waiting=[*rows, row("row 9", prompt=50)], free_blocks=6, look_up=look_up))

    assert names(plan.admit) == ["row 9"]
    assert looked_up == ["row 0", "row 9"]


def test_what_running_rows_will_still_generate_is_not_given_to_others() -> None:
    running = [decoding_call(), decoding_row("row 1", output=60)]

    plan = plan_of(
        view(calls=SHORT_ANSWERS, running=running, waiting=[row("row 2")], free_blocks=15)
    )
    one_less = plan_of(
        view(calls=SHORT_ANSWERS, running=running, waiting=[row("row 2")], free_blocks=14)
    )

    assert names(plan.admit) == ["row 2"]
    assert one_less.admit == ()


def test_a_document_that_stood_first_for_ten_seconds_may_use_the_reserve() -> None:
    policy, head = EchoPolicy(EchoOptions(), ArrivalOrder()), row("row 1", prompt=990, document="A")

    def admitted_at(now_s: float) -> list[str]:
        engine = view(running=[decoding_call()], waiting=[head], free_blocks=100, now_s=now_s)
        engine.reserve_blocks = 50
        return names(policy.plan(engine).admit)

    assert admitted_at(NOW_S) == []
    assert admitted_at(NOW_S + 10.5) == ["row 1"]


def test_a_document_may_begin_on_the_blocks_of_one_that_is_about_to_end() -> None:
    ending = decoding_row("last of A", generated=8, output=40, document="A")
    lasting = decoding_row("last of A", generated=8, output=41, document="A")
    waiting = [row("first of B", prompt=990, document="B")]

    beside_ending = plan_of(view(running=[ending], waiting=waiting, free_blocks=95))
    beside_lasting = plan_of(view(running=[lasting], waiting=waiting, free_blocks=95))

    assert names(beside_ending.admit) == ["first of B"]
    assert beside_lasting.admit == ()


def test_a_document_with_rows_to_come_is_not_about_to_end() -> None:
    waiting = [row("first of B", prompt=990, document="B")]
    last = decoding_row("row of A", generated=8, output=40, document="A")
    not_last = decoding_row("row of A", generated=8, output=40, document="A", num_followers=1)

    assert plan_of(view(running=[last], waiting=waiting, free_blocks=95)).admit
    assert not plan_of(view(running=[not_last], waiting=waiting, free_blocks=95)).admit
