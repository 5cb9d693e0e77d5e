"""What a step of Echo holds: calls, then rows that run, then rows whose KV is there."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from echo_views import (
    NOW_S,
    TOKEN_S,
    call,
    decoding_call,
    decoding_row,
    held,
    names,
    plan_of,
    prefilling_call,
    prefilling_row,
    row,
    view,
)

from batchrun.estimator.step_time import LinearModel
from batchrun.scheduling.draft import MIN_CHUNK_TOKENS
from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.fill import EARLY_STEPS, LITTLE_MORE
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.view import EngineView, Plan, RequestView


def later_plans_of(*engines: EngineView, mean_rows: int) -> list[Plan]:
    """What a policy plans one after another, that has seen so many rows decode in many steps."""
    policy = EchoPolicy(EchoOptions(), ArrivalOrder())
    usual = late_engine(*[decoding_row(f"row {i}") for i in range(mean_rows)])
    for _ in range(EARLY_STEPS):
        policy.plan(usual)
    return [policy.plan(engine) for engine in engines]


def late_engine(*rows: RequestView, **fields: Any) -> EngineView:
    """One whose next step takes at most 25 ms, with room for all."""
    blocks = {"total_blocks": 10_000, "free_blocks": 7_000, "max_running": 256}
    return view(running=[decoding_call(due_in_s=-3.0), *rows], **blocks | fields)


def test_an_empty_engine_gets_an_empty_plan() -> None:
    plan = plan_of(view())

    assert plan.admit == () and plan.preempt == ()
    assert plan.caps == {} and plan.predicted_s == 0.0


def test_a_plan_is_frozen_and_the_same_view_gives_the_same_plan() -> None:
    engine = view(
        running=[decoding_call(), decoding_row("row 1")],
        waiting=[call("call 2"), row("row 2"), row("row 3", prompt=2_000)],
    )

    plan = plan_of(engine)

    assert plan == plan_of(engine)
    with pytest.raises(FrozenInstanceError):
        plan.predicted_s = 1.0  # type: ignore[misc]


def test_calls_take_the_tokens_of_a_step_before_rows_do() -> None:
    engine = view(
        running=[decoding_row("row 1"), prefilling_call("call 2", left=60), decoding_call()],
        waiting=[row("row 3")],
        token_budget=61,
    )

    plan = plan_of(engine)

    assert plan.caps == {"call 2": 60, "row 1": 0}
    assert plan.admit == ()


def test_waiting_calls_come_in_first_and_in_their_order() -> None:
    rows = [row("row 1", prompt=20), row("row 2", prompt=20)]

    plan = plan_of(view(waiting=[*rows, call("call 1"), call("call 2")]))

    assert names(plan.admit) == ["call 1", "call 2", "row 1", "row 2"]
    assert plan.caps == {"call 1": 99, "call 2": 99, "row 1": 20, "row 2": 20}
    assert plan.predicted_s == pytest.approx(238 * 0.0001, rel=1e-3)


def test_a_call_without_room_holds_up_the_calls_and_rows_behind_it() -> None:
    big = call("call 1", prompt=999)
    engine = view(waiting=[big, call("call 2"), row("row 1")], free_blocks=99)

    plan = plan_of(engine)

    assert plan.admit == ()


def test_a_call_whose_adapter_must_wait_holds_up_nobody() -> None:
    engine = view(
        running=[decoding_call("call 1", lora_id=1)],
        waiting=[call("call 2", lora_id=2), call("call 3", lora_id=1), row("row 1")],
        max_loras=1,
    )

    plan = plan_of(engine)

    assert names(plan.admit) == ["call 3", "row 1"]


def test_a_call_takes_all_its_prompt_where_no_other_call_decodes() -> None:
    plan = plan_of(view(waiting=[call(prompt=9_000)]))

    assert plan.caps == {"call": 9_000}


def test_a_calls_prompt_is_cut_to_the_slack_of_the_calls_that_decode() -> None:
    # A twentieth of their TPOT bound is left: 25 tokens.
    engine = view(
        running=[decoding_call("call 1", due_in_s=0.08)], waiting=[call("call 2", prompt=2_000)]
    )

    plan = plan_of(engine)

    assert plan.caps == {"call 2": 800 - 25 - 1}


def test_a_calls_prompt_moves_by_32_tokens_however_full_the_step_is() -> None:
    late = [decoding_call(f"call {i}", due_in_s=-1.0) for i in range(250)]
    engine = view(running=[*late, prefilling_call("new call", left=90)], max_running=300)

    plan = plan_of(engine)

    assert plan.caps == {"new call": 32}


def test_a_rows_prompt_is_cut_to_what_the_tightest_call_leaves() -> None:
    loose, tight = decoding_call("call 1", due_in_s=9), decoding_call("call 2", due_in_s=0.04)
    engine = view(running=[loose, tight, prefilling_row(prompt=3_000, left=2_000)])

    plan = plan_of(engine)

    assert plan.caps == {"row": 400 - 25 - 2}
    assert plan.predicted_s == pytest.approx(0.0375, abs=1e-6)


def test_a_late_call_leaves_rows_half_of_its_token_time() -> None:
    engine = view(running=[decoding_call(due_in_s=-3.0), prefilling_row(prompt=3_000, left=2_000)])

    plan = plan_of(engine)

    assert plan.caps == {"row": 250 - 1}


def test_rows_that_decode_go_on_before_rows_that_read() -> None:
    reading, decoding = prefilling_row("row 1", left=50), decoding_row("row 2")

    plan = plan_of(view(running=[reading, decoding], token_budget=33))

    assert plan.caps == {"row 1": 32}


def test_no_more_rows_decode_before_prompts_than_did_of_late() -> None:
    """In a step of 25 ms that of 100 rows and one takes a token of 0.1 ms each."""
    rows = [decoding_row(f"row {i}") for i in range(200)]
    engine = late_engine(*rows, prefilling_row("last", prompt=3_000, left=2_000))

    (plan,) = later_plans_of(engine, mean_rows=100)

    assert plan.caps == {f"row {i}": 0 for i in range(101, 200)} | {"last": 148}
    assert plan.predicted_s == pytest.approx(0.025, abs=1e-6)
    assert plan_of(engine).caps == {"last": 49}


def test_rows_that_were_put_off_decode_in_the_next_step() -> None:
    rows = [decoding_row(f"row {i}") for i in range(200)]
    engine = late_engine(*rows, prefilling_row("last", prompt=3_000, left=2_000))

    first, second = later_plans_of(engine, engine, mean_rows=100)

    assert first.caps.keys() - second.caps.keys() == {f"row {i}" for i in range(101, 200)}
    assert second.caps == {f"row {i}": 0 for i in range(2, 101)} | {"last": 148}


def test_flex_calls_and_rows_of_an_engine_without_calls_are_never_put_off() -> None:
    rows = [decoding_row(f"row {i}") for i in range(200)]
    read = prefilling_row("last", prompt=3_000, left=2_000)
    flex = decoding_row("flex", is_row=False)
    alone = replace(late_engine(*rows, read), online_running=[])

    beside, without = later_plans_of(late_engine(*rows, flex, read), alone, mean_rows=100)

    assert "flex" not in beside.caps and "row 100" in beside.caps
    assert without.caps.keys() == {"last"}


def test_decodes_of_rows_take_what_prompts_leave() -> None:
    rows = [decoding_row(f"row {i}") for i in range(200)]
    reads = late_engine(*rows, prefilling_row("last", left=40))
    comes = late_engine(*rows, waiting=[row("last", prompt=90)])

    without, beside, before = later_plans_of(late_engine(*rows), reads, comes, mean_rows=50)

    assert without.caps == {}
    assert beside.caps == {"last": 40}
    assert before.caps == {f"row {i}": 0 for i in range(159, 200)} | {"last": 90}


def test_decodes_of_rows_come_first_where_their_blocks_are_wanted() -> None:
    rows = [decoding_row(f"row {i}") for i in range(200)]
    reading = prefilling_row("last", prompt=3_000, left=2_000)

    (plan,) = later_plans_of(late_engine(*rows, reading, free_blocks=2_900), mean_rows=100)

    assert plan.caps == {"last": 49}


def test_decodes_of_rows_that_exceed_the_step_sit_it_out_the_last_in_order_first() -> None:
    rows = [decoding_row(f"row {i}") for i in range(4)]

    plan = plan_of(view(running=[decoding_call(), *rows], token_budget=4))

    assert plan.caps == {"row 3": 0}


@pytest.mark.parametrize(("num", "most"), [(3, 2), (4, 1), (5, 4), (7, 6), (8, 7), (23, 22)])
def test_as_many_rows_decode_as_fit(num: int, most: int) -> None:
    rows = [decoding_row(f"row {i}") for i in range(num)]

    plan = plan_of(view(running=rows, token_budget=most))

    assert plan.caps == {f"row {i}": 0 for i in range(most, num)}


def test_a_request_whose_last_tokens_are_in_flight_takes_no_place_in_the_step() -> None:
    ending_call, ending_row = decoding_call("call 1"), decoding_row("row 1")
    ending_call.work_left_tokens = ending_row.work_left_tokens = 0

    plan = plan_of(view(running=[ending_call, ending_row], waiting=[row("row 2")]))

    assert names(plan.admit) == ["row 2"]
    assert plan.caps == {"row 2": 90}


def test_a_row_reads_no_further_than_there_are_blocks() -> None:
    engine = view(running=[prefilling_row(prompt=1_000, left=595)], free_blocks=20)

    plan = plan_of(engine)

    assert plan.caps == {"row": 5 + 200}


def test_a_row_that_reads_leaves_rows_that_decode_the_blocks_of_their_next_32_tokens() -> None:
    decoding = decoding_row("row 1", output=200)
    reading = prefilling_row("row 2", prompt=1_000, left=600)

    plan = plan_of(view(running=[decoding, reading], free_blocks=20))

    assert plan.caps == {"row 2": (20 - 3) * 10}


def test_a_row_whose_prefix_is_cached_goes_before_an_earlier_one_that_must_be_read() -> None:
    uncached = row("row 1", prompt=2_000, document="A")
    cached = row("row 2", prompt=2_050, document="B", hit=held(2_000))

    plan = plan_of(view(waiting=[uncached, cached]))

    assert names(plan.admit) == ["row 2", "row 1"]
    assert plan.caps == {"row 2": 50, "row 1": 2_000}


def test_followers_wait_while_their_leader_reads_the_document() -> None:
    leader = prefilling_row("row 1", prompt=2_000, left=1_500, document="A")
    follower = row("row 2", prompt=1_000, hit=held(500), document="A")
    other = row("row 3", document="B")

    plan = plan_of(view(running=[leader], waiting=[follower, other]))

    assert names(plan.admit) == ["row 3"]


def test_followers_come_in_together_once_their_leader_has_read_the_document() -> None:
    leader = decoding_row("row 1", prompt=2_000, document="A")
    followers = [row(f"row {i}", prompt=2_050, hit=held(2_000), document="A") for i in range(2, 5)]

    plan = plan_of(view(running=[leader], waiting=followers))

    assert names(plan.admit) == ["row 2", "row 3", "row 4"]
    assert plan.caps == {"row 2": 50, "row 3": 50, "row 4": 50}


def test_one_document_at_a_time_is_read() -> None:
    reading = prefilling_row("row 1", prompt=2_000, left=600, document="A")
    documents = [row("row 2", prompt=2_000, document="B"), row("row 3", prompt=900, document="C")]

    beside = plan_of(view(running=[reading], waiting=documents))
    alone = plan_of(view(waiting=documents))

    assert beside.admit == ()
    assert len(alone.admit) == 1


def test_a_row_that_is_not_ready_is_passed_over() -> None:
    engine = view(waiting=[row("row 1"), row("row 2")], is_ready=lambda r: r.request_id != "row 1")

    plan = plan_of(engine)

    assert names(plan.admit) == ["row 2"]


def test_a_document_that_stood_first_for_ten_seconds_is_begun_before_a_better_one() -> None:
    policy, head = (
        EchoPolicy(EchoOptions(), ArrivalOrder()),
        row("row 1", prompt=2_000, document="A"),
    )
    better = row("row 2", prompt=2_000, document="B", num_followers=9)

    def admitted_at(now_s: float) -> list[str]:
        return names(policy.plan(view(waiting=[head, better], now_s=now_s)).admit)

    assert admitted_at(NOW_S) == ["row 2"]
    assert admitted_at(NOW_S + 10.0) == ["row 2"]
    assert admitted_at(NOW_S + 10.5) == ["row 1"]


def test_an_overdue_document_that_waits_for_running_rows_holds_the_others_back() -> None:
    policy, running = EchoPolicy(EchoOptions(), ArrivalOrder()), decoding_row("row 0", output=200)
    head = row("row 1", prompt=2_000, document="A")
    smaller = row("row 2", prompt=600, document="B")

    def planned_at(now_s: float) -> Plan:
        fields: dict[str, Any] = {"free_blocks": 195, "watermark_blocks": 10, "now_s": now_s}
        return policy.plan(view(running=[running], waiting=[head, smaller], **fields))

    assert names(planned_at(NOW_S).admit) == ["row 2"]
    assert planned_at(NOW_S + 10.5).admit == ()
    assert planned_at(NOW_S + 31.0).admit == ()


def test_an_overdue_document_that_lacks_the_watermark_beside_calls_holds_nobody_back() -> None:
    policy, running = EchoPolicy(EchoOptions(), ArrivalOrder()), decoding_call()
    head = row("row 1", prompt=1_890, document="A")
    smaller = row("row 2", prompt=600, document="B")
    fields: dict[str, Any] = {"free_blocks": 195, "watermark_blocks": 10}

    for waited_s in (0.0, 10.5, 31.0):
        engine = view(running=[running], waiting=[head, smaller], now_s=NOW_S + waited_s, **fields)
        assert names(policy.plan(engine).admit) == ["row 2"]


def test_a_row_comes_in_whatever_is_reserved_where_nothing_else_is_there() -> None:
    reserved: dict[str, Any] = {"free_blocks": 100, "reserve_blocks": 95}

    plan = plan_of(view(waiting=[row("row 1"), row("row 2")], **reserved))

    assert names(plan.admit) == ["row 1"]
    assert plan_of(view(running=[decoding_call()], waiting=[row()], **reserved)).admit == ()


def test_the_first_row_moves_a_little_where_nothing_else_would_run_in_time() -> None:
    rows = [prefilling_row(f"row {i}", prompt=5_000, left=3_000) for i in range(2)]

    begun = plan_of(view(running=rows, online_slo_ttft_s=0.001))
    new = plan_of(view(waiting=[row(prompt=5_000)], online_slo_ttft_s=0.001))

    assert begun.caps == {"row 0": MIN_CHUNK_TOKENS * LITTLE_MORE, "row 1": 0}
    assert new.caps == {"row": MIN_CHUNK_TOKENS * LITTLE_MORE}


def test_rows_go_on_together_where_no_step_is_as_short_as_it_should_be() -> None:
    decoding = [decoding_row(f"row {i}") for i in range(9)]
    slow = LinearModel(0.5, TOKEN_S, 0.0, 0.0, 0.0)

    plan = plan_of(view(running=decoding, waiting=[row("row 9")], model=slow))

    assert plan.caps == {"row 9": 90}


def test_a_lone_row_without_room_takes_all_there_is_time_for() -> None:
    alone = prefilling_row(prompt=5_000, left=3_000)

    assert plan_of(view(running=[alone], free_blocks=0)).caps.get("row", 3_000) == 3_000


def test_rows_that_are_switched_off_sit_out_and_none_comes_in() -> None:
    engine = view(
        running=[decoding_call(), decoding_row("row 1")],
        waiting=[row("row 2"), call("call 2")],
        is_offline_on=False,
    )

    plan = plan_of(engine)

    assert names(plan.admit) == ["call 2"]
    assert plan.caps == {"row 1": 0, "call 2": 99}


def test_rows_take_no_more_slots_than_are_free() -> None:
    engine = view(
        running=[decoding_call()], waiting=[row(f"row {i}") for i in range(5)], max_running=3
    )

    plan = plan_of(engine)

    assert names(plan.admit) == ["row 0", "row 1"]


def test_rows_that_need_no_block_go_on_where_those_before_them_find_none() -> None:
    """A block holds 10 tokens: the first and the third row have filled theirs."""
    rows = [decoding_row(f"row {i}", prompt=90, generated=n) for i, n in enumerate((11, 5, 21, 7))]

    none_left = plan_of(view(running=[decoding_call(), *rows], free_blocks=0))
    one_left = plan_of(view(running=[decoding_call(), *rows], free_blocks=1))

    assert none_left.caps == {"row 0": 0, "row 2": 0} and none_left.preempt == ()
    assert one_left.caps == {"row 2": 0}


def test_where_no_row_finds_a_block_the_one_worth_least_gives_way_to_the_others() -> None:
    sizes = (100, 40, 200)
    rows = [decoding_row(f"row {n}", prompt=n - 10, generated=11) for n in sizes]

    plan = plan_of(view(running=[decoding_call(), *rows], free_blocks=0))

    assert names(plan.preempt) == ["row 40"]
    assert plan.caps == {}


def test_documents_that_are_read_do_not_wait_for_one_another_for_ever() -> None:
    reading = [prefilling_row("row 1", prompt=900, left=400), prefilling_row("row 2", left=60)]

    plan = plan_of(view(running=[decoding_call(), *reading], free_blocks=0))

    assert names(plan.preempt) == ["row 2"]
    assert plan.caps["row 1"] > 0


@pytest.mark.parametrize("others", [[], ["ending"]])
def test_no_row_gives_way_while_another_is_about_to_end_or_none_would_gain(
    others: list[str],
) -> None:
    rows = [decoding_row("row", prompt=90, generated=11)]
    for name in others:
        rows.append(decoding_row(name, prompt=90, generated=11))
        rows[-1].work_left_tokens = 0

    plan = plan_of(view(running=[decoding_call(), *rows], free_blocks=0))

    assert plan.preempt == () and plan.caps["row"] == 0


def test_who_gave_way_to_a_call_does_not_give_way_again() -> None:
    """The call takes the blocks of the smallest row; then the others still find none."""
    rows = [decoding_row(f"row {n}", prompt=n - 10, generated=11) for n in (110, 40, 200)]
    engine = view(running=[decoding_call(), *rows], waiting=[call("new", prompt=39)], free_blocks=0)

    plan = plan_of(engine)

    assert names(plan.preempt) == ["row 40", "row 110"]
