"""Where the parts of Echo that can be left out make a difference, and where they make none."""

from __future__ import annotations

from echo_views import (
    call,
    decoding_call,
    decoding_row,
    held,
    names,
    plan_of,
    prefilling_row,
    row,
    view,
)

from batchrun.scheduling.policies import make_policy


def test_bs_is_vllms_own_order_and_no_policy_of_ours() -> None:
    assert make_policy("bs") is None


def test_without_the_choice_by_kv_rows_come_in_as_they_came_and_none_overtakes() -> None:
    documents = [
        row("row 1", prompt=2_000, document="A"),
        row("row 2", prompt=2_050, document="B", hit=held(2_000)),
        row("row 3", prompt=2_000, document="C", num_followers=9),
        row("row 4"),
    ]

    by_kv = names(plan_of(view(waiting=documents), "bs+e+s").admit)
    in_order = names(plan_of(view(waiting=documents), "bs+e").admit)

    assert by_kv == ["row 2", "row 4", "row 3"]
    assert in_order == ["row 1", "row 2"]


def test_only_echo_keeps_the_reserve() -> None:
    engine = view(running=[decoding_call()], waiting=[row()], free_blocks=50, reserve_blocks=45)

    admitted = {name: names(plan_of(engine, name).admit) for name in ("bs+e", "bs+e+s", "echo")}

    assert admitted == {"bs+e": ["row"], "bs+e+s": ["row"], "echo": []}


def test_every_policy_makes_room_for_a_call_alike() -> None:
    rows = [decoding_row("row 1", num_followers=2), prefilling_row("row 2", left=10)]
    engine = view(running=rows, waiting=[call(), row("row 3")], free_blocks=1)

    plans = [plan_of(engine, name) for name in ("bs+e", "bs+e+s", "echo")]

    assert plans[0] == plans[1] == plans[2]
    assert names(plans[0].preempt) == ["row 1"]
