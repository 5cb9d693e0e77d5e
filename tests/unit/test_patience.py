"""No row is overtaken for long, whatever it is, nor stands still for long while it runs."""

from __future__ import annotations

import pytest
from echo_views import (
    NOW_S,
    decoding_call,
    decoding_row,
    group_of,
    held,
    names,
    prefilling_row,
    row,
    view,
)

from batchrun.estimator.step_time import LinearModel
from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.patience import MAX_LOOKED_AT, OVERTAKEN_S, Patience, Standstill
from batchrun.scheduling.policies import make_policy
from batchrun.scheduling.view import EngineView, Plan, RequestView

RESERVED = 60
"""Blocks that rows leave free for calls; the rows of these tests ask for more than the rest."""


def policy() -> EchoPolicy:
    return EchoPolicy(EchoOptions(), ArrivalOrder())


def at(now_s: float, *waiting: RequestView, running: tuple[RequestView, ...] = ()) -> EngineView:
    """An engine with 100 free blocks beside a call, in which rows fill 40 of them at most."""
    return view(
        running=[decoding_call(), *running],
        waiting=waiting,
        free_blocks=100,
        reserve_blocks=RESERVED,
        now_s=now_s,
    )


def rows_of(document: str, *ranks: int) -> list[RequestView]:
    """Rows whose prefix is there: they need a block or two each, and may use the reserve."""
    return [
        row(f"row {rank}", prompt=210, hit=held(200), document=document, rank=rank)
        for rank in ranks
    ]


@pytest.mark.parametrize(
    "big",
    [row("big", prompt=490, rank=1), row("big", prompt=690, hit=held(200), rank=1)],
    ids=["uncached", "cached in part"],
)
def test_a_row_that_others_overtook_for_30_s_comes_in_whatever_is_reserved(
    big: RequestView,
) -> None:
    echo = policy()
    front = row("front", prompt=400, rank=0, lora_id=3)

    def planned(since_s: float, *others: RequestView) -> Plan:
        return echo.plan(at(NOW_S + since_s, front, big, *others))

    assert names(planned(0.0, *rows_of("B", 2)).admit) == ["row 2"]
    assert "big" not in names(planned(OVERTAKEN_S, *rows_of("B", 3)).admit)
    assert names(planned(OVERTAKEN_S + 0.5, *rows_of("B", 4)).admit)[0] == "big"


def test_nobody_behind_it_comes_in_while_it_waits_for_rows_that_run() -> None:
    echo, big = policy(), row("big", prompt=1_500, document="A", rank=1)
    running = decoding_row("row 0", prompt=990, output=100, rank=0)

    def planned(since_s: float, *others: RequestView) -> list[str]:
        return names(echo.plan(at(NOW_S + since_s, big, *others, running=(running,))).admit)

    assert planned(0.0, *rows_of("B", 2), row("row 3", rank=3)) == ["row 2", "row 3"]
    assert planned(OVERTAKEN_S + 0.5, *rows_of("B", 6), row("row 7", rank=7)) == []


@pytest.mark.parametrize("prompt", [490, 900], ids=["short", "long"])
def test_a_row_whose_answer_may_find_no_room_beside_calls_comes_in_when_its_prompt_does(
    prompt: int,
) -> None:
    echo, endless = policy(), row("endless", prompt=prompt, output=2_000, rank=1)

    def planned(since_s: float) -> list[str]:
        return names(echo.plan(at(NOW_S + since_s, endless)).admit)

    assert (planned(0.0), planned(OVERTAKEN_S + 0.5)) == ([], ["endless"])


def test_others_come_in_beside_a_row_whose_answer_may_find_no_room_beside_calls() -> None:
    echo, endless = policy(), row("endless", prompt=490, output=2_000, rank=1)
    begun = decoding_row("endless", prompt=490, output=2_000, rank=1)

    def planned(since_s: float, *running: RequestView, waiting: RequestView) -> list[str]:
        return names(echo.plan(at(NOW_S + since_s, waiting, running=running)).admit)

    assert planned(0.0, waiting=endless) == []
    assert planned(OVERTAKEN_S + 0.5, waiting=endless) == ["endless"]
    assert planned(OVERTAKEN_S + 1.0, begun, waiting=row("short", rank=2)) == ["short"]
    assert planned(OVERTAKEN_S + 2.0, waiting=row("other", rank=3)) == ["other"]
    assert planned(OVERTAKEN_S + 3.0, begun, waiting=row("third", rank=4)) == []


def test_a_row_for_which_calls_leave_no_room_holds_up_nobody() -> None:
    echo, huge = policy(), row("huge", prompt=8_000, document="A", rank=1)

    def planned(since_s: float, rank: int) -> list[str]:
        return names(echo.plan(at(NOW_S + since_s, huge, *rows_of("B", rank))).admit)

    assert planned(0.0, 2) == ["row 2"]
    assert planned(OVERTAKEN_S + 0.5, 3) == ["row 3"]


@pytest.mark.parametrize("name", ["echo", "bs+e"])
@pytest.mark.parametrize("prompt", [90, 5_000])
def test_none_with_an_adapter_comes_in_behind_it_while_rows_that_run_hold_its_own(
    name: str, prompt: int
) -> None:
    policy, other = make_policy(name), row("other", rank=1, lora_id=2)
    running = decoding_row("row 0", rank=0, lora_id=1)
    assert policy is not None

    def planned(since_s: float, rank: int) -> list[str]:
        base = row("base", prompt=prompt, rank=4)
        waiting = [other, row(f"row {rank}", rank=rank, lora_id=1), base]
        engine = view(running=[running], waiting=waiting, max_loras=1, now_s=NOW_S + since_s)
        return names(policy.plan(engine).admit)

    assert planned(0.0, 2) == ["row 2", "base"]
    assert planned(OVERTAKEN_S + 0.5, 3) == ["base"]


def overdue(
    patience: Patience, now_s: float, *waiting: RequestView, computing: str | None = None
) -> list[str]:
    groups = frozenset() if computing is None else {group_of(computing)}
    seen = view(waiting=waiting, now_s=now_s)
    return names(patience.overdue(seen, groups))


def test_a_preempted_row_waits_from_its_preemption_on() -> None:
    patience, late = Patience(), row("late", rank=9)
    patience.let_in([late], NOW_S)
    back, first = row("back", rank=5), row("first", rank=1)
    back.preempted_at_s = NOW_S + 100.0

    assert overdue(patience, NOW_S + 101.0, first, back) == ["first"]
    assert overdue(patience, NOW_S + 131.0, first, back) == ["first", "back"]


def test_a_row_that_comes_late_with_an_early_place_waits_from_then_on() -> None:
    patience = Patience()
    patience.let_in([row("late", rank=9)], NOW_S)
    urgent = row("urgent", rank=2, arrival_at_s=NOW_S + 50.0)

    assert overdue(patience, NOW_S + 51.0, urgent) == []
    assert overdue(patience, NOW_S + 81.0, urgent) == ["urgent"]


def test_rows_whose_prefix_is_computed_for_them_are_not_overdue() -> None:
    patience, follower = Patience(), row("follower", rank=1, document="A")
    patience.let_in([row("late", rank=9)], NOW_S)

    assert overdue(patience, NOW_S + 31.0, follower, row("other", rank=2), computing="A") == [
        "other"
    ]
    assert overdue(patience, NOW_S + 31.0, follower) == ["follower"]


def test_who_stands_behind_all_that_were_let_in_was_not_overtaken() -> None:
    patience = Patience()
    patience.let_in([row("past", rank=3)], NOW_S)

    assert overdue(patience, NOW_S + 90.0, row("next", rank=4)) == []


def test_who_stands_first_for_long_is_overdue_although_nobody_overtakes_it() -> None:
    patience, first = Patience(), row("first", rank=4)

    assert overdue(patience, NOW_S, first) == []
    assert overdue(patience, NOW_S + OVERTAKEN_S + 1, first) == ["first"]


def test_however_many_overtake_it_the_memory_is_small_and_the_row_stays_overdue() -> None:
    patience, first = Patience(), row("first", rank=0)
    for second in range(3_600):
        patience.let_in([row("x", rank=1 + second)], NOW_S + second)
        if second > OVERTAKEN_S + 1:
            assert overdue(patience, NOW_S + second, first) == ["first"]


def test_a_step_looks_at_few_rows() -> None:
    patience = Patience()
    waiting = [row(f"{n}", rank=n) for n in range(100)]
    patience.let_in([row("late", rank=200)], NOW_S)

    assert len(overdue(patience, NOW_S + OVERTAKEN_S + 1, *waiting)) == MAX_LOOKED_AT


CONTEXT_S, PAIR_S = 1e-7, 3e-9
"""A token, and the least chunk, behind 250,000 tokens take half a TPOT bound."""


def given(
    echo: EchoPolicy, since_s: float, *long: RequestView, free: int = 1_000
) -> dict[str, int]:
    """Tokens of long rows and of 300 short ones that leave them no time, in a step of 50 ms."""
    short = [decoding_row(f"row {n}", prompt=85) for n in range(300)]
    seen = view(
        running=[decoding_call(due_in_s=since_s + 0.05), *short, *long],
        max_running=1_000,
        total_blocks=200_000,
        free_blocks=free,
        model=LinearModel(0.0, 1e-4, PAIR_S, CONTEXT_S, 0.0),
        now_s=NOW_S + since_s,
    )
    plan = echo.plan(seen)
    assert plan.predicted_s <= 0.05
    return {each.request_id: plan.caps.get(each.request_id, 1) for each in (*short, *long)}


@pytest.mark.parametrize(
    "long",
    [
        decoding_row("long", prompt=250_000, output=90_000),
        prefilling_row("long", prompt=260_000, left=10_000),
    ],
    ids=["at its next token", "at its prompt"],
)
def test_a_row_that_runs_and_stood_still_for_30_s_goes_before_the_others_until_it_ends(
    long: RequestView,
) -> None:
    echo = policy()

    assert given(echo, 0.0, long)["long"] == 0
    assert given(echo, OVERTAKEN_S, long)["long"] == 0
    for step in range(1, 20):
        tokens = given(echo, OVERTAKEN_S + step, long)
        assert tokens["long"] > 0
        assert sum(tokens.values()) > 100


def test_a_row_for_which_calls_leave_no_time_keeps_nobody_from_going_on() -> None:
    echo, huge = policy(), decoding_row("long", prompt=900_000)

    for since_s in (0.0, OVERTAKEN_S, OVERTAKEN_S + 1):
        assert sum(given(echo, since_s, huge).values()) == 300


def test_of_many_rows_that_stood_still_one_goes_before_the_others_in_turn() -> None:
    echo = policy()
    long = [decoding_row(f"long {n}", prompt=250_000) for n in range(4)]

    given(echo, 0.0, *long)
    steps = [given(echo, OVERTAKEN_S + step, *long) for step in range(1, 13)]
    assert [sum(step[row.request_id] for step in steps) for row in long] == [3] * 4
    assert all(sum(step.values()) > 100 for step in steps)


def test_a_prompt_that_finds_no_blocks_keeps_no_other_row_from_its_turn() -> None:
    echo = policy()
    prompts = [prefilling_row(f"prompt {n}", prompt=260_000, left=10_000) for n in range(4)]
    long = decoding_row("long", prompt=250_000)

    given(echo, 0.0, *prompts, long, free=0)
    tokens = given(echo, OVERTAKEN_S + 1, *prompts, long, free=0)
    assert [tokens[row.request_id] for row in prompts] == [0] * 4
    assert tokens["long"] == 1


def test_nobody_stands_still_while_no_row_goes_on() -> None:
    standstill, still = Standstill(), decoding_row("still")

    def pressing(since_s: float) -> list[str]:
        return names(standstill.pressing(view(running=[still], now_s=NOW_S + since_s)))

    standstill.note(["still"], NOW_S, goes_on=True)
    for second in range(1, 60):
        standstill.note(["still"], NOW_S + second, goes_on=False)
        assert pressing(second) == []
    standstill.note(["still"], NOW_S + 59 + OVERTAKEN_S, goes_on=True)
    assert pressing(59 + OVERTAKEN_S) == []
    assert pressing(60 + OVERTAKEN_S) == ["still"]
