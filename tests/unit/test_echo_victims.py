"""Whom a call pushes out: the offline rows whose KV is worth least, and nobody in vain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from echo_views import call, decoding_call, decoding_row, names, plan_of, row, view

from batchrun.scheduling.view import RequestView


def of_document(letter: str, *, private: Sequence[int], followers: int = 0) -> list[RequestView]:
    """Rows that decode behind a document of 400 tokens; each has some blocks of its own."""
    return [
        decoding_row(
            f"row {letter}{i}",
            prompt=400 + 10 * blocks - 5,
            private=blocks,
            document=letter,
            num_followers=followers,
        )
        for i, blocks in enumerate(private, start=1)
    ]


def test_a_call_that_finds_no_room_pushes_out_the_row_worth_least() -> None:
    rows = [
        decoding_row("row 6", num_followers=3),
        decoding_row("row 7", num_followers=1),
        decoding_row("row 8", num_followers=2),
    ]

    plan = plan_of(view(running=rows, waiting=[call()], free_blocks=0))

    assert names(plan.preempt) == ["row 7"]
    assert names(plan.admit) == ["call"]


def test_nobody_goes_where_free_blocks_are_enough() -> None:
    plan = plan_of(view(running=[decoding_row()], waiting=[call()], free_blocks=10))

    assert plan.preempt == ()
    assert names(plan.admit) == ["call"]


def test_one_missing_block_is_reason_enough() -> None:
    plan = plan_of(view(running=[decoding_row()], waiting=[call()], free_blocks=9))

    assert names(plan.preempt) == ["row"]


def test_a_call_needs_room_for_its_first_token_too() -> None:
    exact, one_more = call(prompt=99), call(prompt=100)

    plan = plan_of(view(running=[decoding_row()], waiting=[exact], free_blocks=10))
    longer = plan_of(view(running=[decoding_row()], waiting=[one_more], free_blocks=10))

    assert plan.preempt == ()
    assert names(longer.preempt) == ["row"]


def test_a_row_that_frees_enough_goes_before_a_cheaper_one_that_does_not() -> None:
    small, large = decoding_row("row 1", prompt=40), decoding_row("row 2", num_followers=5)

    plan = plan_of(view(running=[small, large], waiting=[call()], free_blocks=1))

    assert names(plan.preempt) == ["row 2"]


def test_where_no_row_frees_enough_the_largest_goes_and_then_the_cheapest_that_does() -> None:
    rows = [
        decoding_row("row 1", prompt=30),
        decoding_row("row 2", prompt=70),
        decoding_row("row 3", prompt=50),
    ]

    plan = plan_of(view(running=rows, waiting=[call()], free_blocks=0))

    assert names(plan.preempt) == ["row 2", "row 1"]
    assert names(plan.admit) == ["call"]


def test_rows_of_a_document_go_together_where_only_its_shared_blocks_are_enough() -> None:
    rows = of_document("A", private=[1, 1])
    big = call(prompt=399)

    plan = plan_of(view(running=rows, waiting=[big], free_blocks=0))

    assert names(plan.preempt) == ["row A1", "row A2"]
    assert names(plan.admit) == ["call"]


def test_the_document_with_the_fewest_rows_to_come_goes() -> None:
    rows = [
        *of_document("A", private=[1, 1], followers=6),
        *of_document("B", private=[1, 1], followers=2),
    ]

    plan = plan_of(view(running=rows, waiting=[call(prompt=399)], free_blocks=0))

    assert names(plan.preempt) == ["row B1", "row B2"]


def test_a_row_alone_goes_before_a_document_that_others_wait_for() -> None:
    rows = [*of_document("A", private=[1, 1], followers=6), decoding_row("row 9", prompt=400)]

    plan = plan_of(view(running=rows, waiting=[call(prompt=399)], free_blocks=0))

    assert names(plan.preempt) == ["row 9"]


def test_nobody_goes_where_all_of_them_together_would_not_do() -> None:
    rows = [decoding_row("row 1"), decoding_row("row 2")]

    plan = plan_of(view(running=rows, waiting=[call(prompt=209)], free_blocks=0))

    assert plan.preempt == () and plan.admit == ()


def test_a_call_that_finds_no_slot_takes_that_of_the_row_worth_least() -> None:
    rows = [decoding_row("row 1", num_followers=4), decoding_row("row 2")]

    plan = plan_of(view(running=rows, waiting=[call()], max_running=2))

    assert names(plan.preempt) == ["row 2"]
    assert names(plan.admit) == ["call"]


def test_no_row_goes_for_a_row_and_no_call_for_anybody() -> None:
    running = [decoding_call(), decoding_row("row 1")]

    beside_row = plan_of(view(running=running, waiting=[row("row 2")], free_blocks=0))
    only_calls = plan_of(view(running=[decoding_call()], waiting=[call("call 2")], free_blocks=0))

    assert beside_row.preempt == () and beside_row.admit == ()
    assert only_calls.preempt == () and only_calls.admit == ()


def test_a_calls_next_token_pushes_out_a_row_where_its_block_is_missing() -> None:
    full = decoding_call(prompt=96)
    assert full.num_computed_tokens == 100

    plan = plan_of(view(running=[full, decoding_row("row 1")], free_blocks=0))

    assert names(plan.preempt) == ["row 1"]
    assert "row 1" not in plan.caps


def test_a_row_that_was_pushed_out_gets_nothing_in_this_step() -> None:
    rows = [decoding_row("row 1", num_followers=4), decoding_row("row 2")]

    plan = plan_of(view(running=rows, waiting=[call()], free_blocks=0))

    assert plan.load is not None and plan.load.num_decodes == 1
    assert plan.caps == {"call": 99}


def test_a_call_with_a_new_adapter_takes_the_place_of_the_cheapest_one_of_rows() -> None:
    rows = [
        decoding_row("row 1", lora_id=1, num_followers=4),
        decoding_row("row 2", lora_id=2),
        decoding_row("row 3", lora_id=2),
    ]

    plan = plan_of(view(running=rows, waiting=[call(lora_id=3)], max_loras=2))

    assert names(plan.preempt) == ["row 2", "row 3"]
    assert names(plan.admit) == ["call"]


def test_the_adapter_of_a_call_is_nobodys_to_take() -> None:
    running = [decoding_call("call 1", lora_id=1), decoding_row("row 1", lora_id=1)]

    plan = plan_of(view(running=running, waiting=[call("call 2", lora_id=2)], max_loras=1))

    assert plan.preempt == () and plan.admit == ()


def test_rows_give_up_one_adapter_after_the_other_and_calls_none() -> None:
    rows = [decoding_row(f"row {i}", lora_id=i, num_followers=i) for i in (1, 2)]
    calls = [call(f"call {i}", lora_id=i) for i in (3, 4, 5)]

    plan = plan_of(view(running=rows, waiting=calls, max_loras=2))

    assert names(plan.preempt) == ["row 1", "row 2"]
    assert names(plan.admit) == ["call 3", "call 4"]


class Counted(list[RequestView]):
    """Knows how many times it was gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[RequestView]:
        """Once more."""
        self.num_passes += 1
        return super().__iter__()


@pytest.mark.parametrize("num_waiting", [10, 50])
def test_calls_that_wait_for_adapters_look_at_those_that_hold_them_once(num_waiting: int) -> None:
    holders = Counted(decoding_call(f"holder {i}", lora_id=i) for i in (1, 2))
    calls = [call(f"call {i}", lora_id=3) for i in range(num_waiting)]

    plan = plan_of(view(online_running=holders, online_waiting=calls, max_loras=2))

    assert plan.admit == ()
    assert holders.num_passes < 10
