"""Orders that go by promises: the largest set of calls on time, and the least remaining time."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import combinations
from random import Random
from types import FrameType
from typing import Any

import pytest
from echo_views import (
    NOW_S,
    TOKEN_S,
    call,
    decoding_call,
    held,
    names,
    prefilling_call,
    row,
    view,
)

from batchrun.estimator.call_history import FIRST_LIKELY_TOKENS, CallHistory
from batchrun.estimator.step_time import LinearModel
from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.on_time import (
    AGED_BOUNDS,
    LinePace,
    OnTimeOrder,
    most_on_time,
    most_valued_on_time,
)
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.promise_orders import (
    LONG_PROMPT_TOKENS,
    SlackOptions,
    SlackOrder,
    first_due_s,
)
from batchrun.scheduling.view import EngineView, Plan, RequestView


def order_by(queue: ArrivalOrder, engine: EngineView) -> list[str]:
    """Who comes first, in the first step that the queue sees."""
    queue.limits(engine)
    begun = [call for call in engine.online_running if not call.is_decode]
    return names(queue.order(engine, begun))


def plan_with(queue: ArrivalOrder, engine: EngineView) -> Plan:
    """What Echo makes of an engine that it has not seen before."""
    return EchoPolicy(EchoOptions(), queue).plan(engine)


def waiting(name: str, *, tokens: int, ttft_s: float, waited_s: float = 0.0) -> RequestView:
    """A call whose prompt takes a tenth of a millisecond a token."""
    return call(name, prompt=tokens, slo_ttft_s=ttft_s, arrival_at_s=NOW_S - waited_s)


def test_as_many_jobs_as_any_choice_could_have_end_in_time() -> None:
    rng = Random(0)
    for _ in range(200):
        jobs = [(rng.uniform(0, 10), rng.uniform(0.1, 4), i) for i in range(rng.randint(0, 7))]
        best = max(
            size
            for size in range(len(jobs) + 1)
            for chosen in combinations(sorted(jobs), size)
            if all(
                sum(work for _, work, _ in chosen[: i + 1]) <= due
                for i, (due, _, _) in enumerate(chosen)
            )
        )
        taken = most_on_time(jobs)

        assert len(taken) == best
        ends = [sum(jobs[i][1] for i in taken[: n + 1]) for n in range(len(taken))]
        assert all(end <= jobs[i][0] for end, i in zip(ends, taken, strict=True))


def test_no_job_of_more_value_is_late_for_those_of_less() -> None:
    rng = Random(1)
    for _ in range(200):
        jobs = [(rng.uniform(0, 10), rng.uniform(0.1, 4), i) for i in range(rng.randint(0, 7))]
        values = [rng.choice((1.0, 2.0, 5.0)) for _ in jobs]
        best = max(
            tuple(sum(values[i] == value for *_, i in chosen) for value in (5.0, 2.0, 1.0))
            for size in range(len(jobs) + 1)
            for chosen in combinations(sorted(jobs), size)
            if all(
                sum(work for _, work, _ in chosen[: i + 1]) <= due
                for i, (due, _, _) in enumerate(chosen)
            )
        )
        taken = most_valued_on_time(jobs, values)

        # Of each value the most; which of these leaves more room for less value is left open.
        most_valued = tuple(sum(values[i] == value for i in taken) for value in (5.0, 2.0, 1.0))
        assert most_valued[0] == best[0]
        assert len(taken) >= max(most_valued)
        ends = [sum(jobs[i][1] for i in taken[: n + 1]) for n in range(len(taken))]
        assert all(end <= jobs[i][0] + 1e-9 for end, i in zip(ends, taken, strict=True))


def test_the_most_urgent_call_that_can_be_in_time_goes_first() -> None:
    loose = waiting("loose", tokens=100, ttft_s=9.0, waited_s=2.0)
    tight = waiting("tight", tokens=100, ttft_s=0.5)

    assert order_by(OnTimeOrder(), view(waiting=[loose, tight])) == ["tight", "loose"]


def test_a_call_that_is_late_lets_all_go_first_that_can_be_in_time() -> None:
    late = waiting("late", tokens=100, ttft_s=1.0, waited_s=1.2)
    on_time = waiting("on time", tokens=100, ttft_s=5.0)

    assert order_by(OnTimeOrder(), view(waiting=[late, on_time])) == ["on time", "late"]
    assert order_by(ArrivalOrder(), view(waiting=[late, on_time])) == ["late", "on time"]


def test_of_calls_that_cannot_all_be_in_time_the_longest_prompt_waits() -> None:
    long = waiting("long", tokens=9_000, ttft_s=1.2)
    short = [waiting(f"short {i}", tokens=3_000, ttft_s=1.3) for i in range(2)]
    engine = view(waiting=[long, *short], token_budget=1_000)

    assert order_by(OnTimeOrder(), engine) == ["short 0", "short 1", "long"]


def test_of_calls_that_cannot_all_be_in_time_those_of_less_value_wait() -> None:
    long = replace(waiting("long", tokens=9_000, ttft_s=1.2), slo_value=2.0)
    short = [waiting(f"short {i}", tokens=3_000, ttft_s=1.3) for i in range(2)]
    engine = view(waiting=[long, *short], token_budget=1_000)
    queue = OnTimeOrder()

    assert order_by(queue, engine) == ["long", "short 0", "short 1"]
    assert queue.num_left_out == 2


def test_an_order_tells_how_many_calls_it_cannot_bring_in_time() -> None:
    policy = EchoPolicy(EchoOptions(), OnTimeOrder())
    late = waiting("late", tokens=100, ttft_s=1.0, waited_s=1.2)
    on_time = waiting("on time", tokens=100, ttft_s=5.0)

    assert policy.plan(view(waiting=[late, on_time])).num_left_out == 1
    assert policy.plan(view(waiting=[on_time])).num_left_out == 0


def test_a_prompt_that_is_begun_gives_way_to_a_more_urgent_call() -> None:
    begun = prefilling_call("begun", left=9_000, prompt=9_999, slo_ttft_s=30.0)
    decoding = decoding_call("decoding", due_in_s=0.06)
    urgent = waiting("urgent", tokens=400, ttft_s=0.5)
    engine = view(running=[begun, decoding], waiting=[urgent])

    on_time, arrival = (plan_with(queue, engine) for queue in (OnTimeOrder(), ArrivalOrder()))

    assert on_time.caps["urgent"] == 400
    assert 0 < on_time.caps["begun"] < arrival.caps["begun"]


def test_a_call_that_waited_too_long_gets_a_share_of_the_step_but_not_all() -> None:
    aged = waiting("aged", tokens=9_000, ttft_s=1.0, waited_s=AGED_BOUNDS + 5.0)
    decoding = decoding_call("decoding", due_in_s=0.06)
    urgent = waiting("urgent", tokens=9_000, ttft_s=5.0)
    engine = view(running=[decoding], waiting=[aged, urgent], free_blocks=3_000)

    caps = plan_with(OnTimeOrder(), engine).caps

    assert caps["aged"] == pytest.approx(caps["urgent"], rel=0.05)
    assert caps["aged"] > 100


def test_nobody_comes_in_before_an_aged_call_that_finds_no_room() -> None:
    aged = waiting("aged", tokens=199, ttft_s=1.0, waited_s=AGED_BOUNDS + 5.0)
    engine = view(waiting=[aged, waiting("small", tokens=99, ttft_s=5.0)], free_blocks=10)

    assert plan_with(OnTimeOrder(), engine).admit == ()


def test_the_first_token_of_a_call_with_an_end_leaves_its_answer_time() -> None:
    ending = call(slo_ttft_s=9.0, slo_tpot_s=1.0, slo_jct_s=10.0, output=50)
    engine = view(waiting=[ending])

    assert first_due_s(engine, ending, 0.05) == pytest.approx(NOW_S + 10.0 - 50 * 0.05)
    assert first_due_s(engine, call(), 0.05) == pytest.approx(NOW_S + 1.0)


@pytest.mark.parametrize("jct_s", [60.0, 5.0])
def test_an_end_that_steps_are_paced_for_makes_no_call_late(jct_s: float) -> None:
    queue = OnTimeOrder()
    bounds: dict[str, Any] = {"slo_ttft_s": 10.0, "slo_tpot_s": 0.2, "slo_jct_s": jct_s}
    report = call("report", output=2_000, **bounds)
    engine = view(waiting=[report, waiting("chat", tokens=99, ttft_s=9.0)])

    assert first_due_s(engine, report, math.inf) == pytest.approx(report.arrival_at_s + 10.0 / 3)
    assert order_by(queue, engine) == ["report", "chat"]
    assert queue.num_left_out == 0


def test_room_that_prompts_in_the_middle_will_take_is_not_given_away() -> None:
    begun = prefilling_call("begun", left=90, prompt=99)
    decoding = decoding_call("decoding", due_in_s=0.0001)
    engine = view(running=[begun, decoding], waiting=[call("new")], free_blocks=15)

    assert plan_with(ArrivalOrder(), engine).admit == ()


@pytest.mark.parametrize(
    ("options", "first"),
    [(SlackOptions(), "on time"), (SlackOptions(is_printed=True), "late")],
)
def test_late_calls_go_last_by_slack_and_first_as_printed(
    options: SlackOptions, first: str
) -> None:
    late = waiting("late", tokens=100, ttft_s=1.0, waited_s=1.2)
    engine = view(waiting=[late, waiting("on time", tokens=100, ttft_s=0.5)])

    assert order_by(SlackOrder(options), engine)[0] == first


def test_one_long_prompt_at_a_time_by_slack() -> None:
    begun = prefilling_call("begun", left=LONG_PROMPT_TOKENS, prompt=9_999)
    long = waiting("long", tokens=LONG_PROMPT_TOKENS, ttft_s=20.0)
    engine = view(running=[begun], waiting=[long, waiting("short", tokens=50, ttft_s=20.0)])

    assert names(plan_with(SlackOrder(), engine).admit) == ["short"]
    assert names(plan_with(ArrivalOrder(), engine).admit) == ["long", "short"]


def test_the_pivots_budget_grows_with_the_tightest_bound() -> None:
    queue = SlackOrder(SlackOptions(has_pivot_budget=True))

    def chunk(tpot_s: float) -> int:
        decoding = decoding_call("decoding", slo_tpot_s=tpot_s)
        long = prefilling_call("long", left=9_000, prompt=9_999, slo_ttft_s=90.0)
        return plan_with(queue, view(running=[decoding, long])).caps["long"]

    assert chunk(0.2) == pytest.approx(2 * chunk(0.1), rel=0.01)


def test_of_calls_about_as_urgent_the_one_that_fits_the_rest_goes_first() -> None:
    queue = SlackOrder(SlackOptions(is_euclid=True))
    small = waiting("small", tokens=99, ttft_s=1.0)
    large = waiting("large", tokens=1_999, ttft_s=1.1)
    later = waiting("later", tokens=1_999, ttft_s=9.0)
    engine = view(waiting=[small, large, later], token_budget=2_000)

    assert names(plan_with(queue, engine).admit) == ["large", "small"]


def test_vllms_priority_goes_before_being_on_time() -> None:
    late = waiting("late", tokens=100, ttft_s=1.0, waited_s=1.2)
    soon = waiting("soon", tokens=100, ttft_s=0.5)
    low = replace(waiting("low", tokens=100, ttft_s=0.2), priority=5)

    assert order_by(OnTimeOrder(), view(waiting=[soon, late, low])) == ["soon", "late", "low"]


def test_what_is_cached_of_a_prompt_takes_no_time_and_is_looked_up_again() -> None:
    queue = OnTimeOrder()
    chat = waiting("chat", tokens=20_000, ttft_s=1.0)
    others = [waiting(f"other {i}", tokens=100, ttft_s=5.0) for i in range(3)]
    hits = {"chat": held(0)}
    engine = view(waiting=[chat, *others], look_up=lambda call: hits.get(call.request_id, held(0)))
    assert order_by(queue, engine)[-1] == "chat"
    assert queue.num_left_out == 1
    hits["chat"] = held(19_000)
    for _ in range(4):
        order = order_by(queue, engine)

    assert order[0] == "chat"
    assert queue.num_left_out == 0


def test_an_answer_that_is_late_makes_no_waiting_call_late() -> None:
    queue = OnTimeOrder()
    behind = [decoding_call(f"late {i}", due_in_s=-5.0) for i in range(60)]
    model = LinearModel(0.03, TOKEN_S, 0.0, 0.0, 0.0)
    engine = view(running=behind, waiting=[waiting("new", tokens=300, ttft_s=1.0)], model=model)
    order_by(queue, engine)

    assert queue.num_left_out == 0


@pytest.mark.parametrize("queue", [OnTimeOrder(), SlackOrder()])
def test_an_answer_that_was_preempted_goes_on_before_new_calls(queue: ArrivalOrder) -> None:
    begun_at_s = NOW_S - 8.0
    preempted = replace(
        waiting("preempted", tokens=200, ttft_s=1.0, waited_s=9.0), first_token_at_s=begun_at_s
    )
    engine = view(waiting=[waiting("new", tokens=50, ttft_s=0.2), preempted])

    assert order_by(queue, engine)[0] == "preempted"
    assert queue.num_left_out == 0


def test_rows_take_nothing_new_while_an_aged_call_finds_no_room() -> None:
    aged = waiting("aged", tokens=199, ttft_s=1.0, waited_s=AGED_BOUNDS + 5.0)
    begun = prefilling_call("begun", left=9, prompt=19)
    calls = [aged, waiting("small", tokens=99, ttft_s=5.0)]
    engine = view(running=[begun], waiting=[*calls, row("row", prompt=20)], free_blocks=6)

    assert plan_with(OnTimeOrder(), engine).admit == ()


def test_a_long_line_for_room_that_others_hold_ages_nobody_early() -> None:
    queue = OnTimeOrder()
    policy = EchoPolicy(EchoOptions(), queue)
    line = [waiting(f"call {i}", tokens=99, ttft_s=1.0, waited_s=20 - i / 10) for i in range(200)]
    for step in range(40):
        engine = view(waiting=line, free_blocks=11 if step % 2 else 0, now_s=NOW_S + step)
        for call_let_in in policy.plan(engine).admit:
            line.remove(call_let_in)
    fresh = replace(waiting("fresh", tokens=99, ttft_s=5.0), arrival_at_s=NOW_S + 40)
    engine = view(waiting=[*line, fresh], free_blocks=11, now_s=NOW_S + 40)

    assert names(policy.plan(engine).admit) == ["fresh"]


def test_a_pause_in_which_no_step_is_planned_is_no_waiting_in_line() -> None:
    line = LinePace()
    for now_s in (0.0, 1.0, 3_600.0, 3_601.0):
        line.saw(now_s, 1, do_wait=True)

    assert line.seconds_each == pytest.approx(0.5, rel=0.1)


def test_calls_of_other_adapters_wait_for_an_aged_call_that_lacks_its_own() -> None:
    running = decoding_call("running", lora_id=1)
    aged = replace(waiting("aged", tokens=99, ttft_s=1.0, waited_s=AGED_BOUNDS + 5.0), lora_id=2)
    others = [
        replace(waiting("same", tokens=99, ttft_s=5.0), lora_id=1),
        waiting("plain", tokens=99, ttft_s=5.0),
    ]
    engine = view(running=[running], waiting=[aged, *others], max_loras=1)
    assert names(plan_with(OnTimeOrder(), engine).admit) == ["plain"]

    engine = view(waiting=[aged, *others], max_loras=1)
    assert "aged" in names(plan_with(OnTimeOrder(), engine).admit)


def test_an_aged_call_of_less_priority_holds_up_nobody() -> None:
    aged = replace(waiting("aged", tokens=199, ttft_s=1.0, waited_s=AGED_BOUNDS + 5.0), priority=5)
    engine = view(waiting=[waiting("first", tokens=99, ttft_s=5.0), aged], free_blocks=11)

    assert names(plan_with(OnTimeOrder(), engine).admit) == ["first"]


def test_late_calls_fit_no_better_than_calls_on_time() -> None:
    queue = SlackOrder(SlackOptions(is_euclid=True))
    late = waiting("late", tokens=1_999, ttft_s=0.1, waited_s=0.5)
    engine = view(waiting=[late, waiting("small", tokens=99, ttft_s=1.0)], token_budget=2_000)

    assert names(plan_with(queue, engine).admit)[0] == "small"


def test_none_is_weighed_where_all_wait_for_adapters_that_calls_hold() -> None:
    calls = [replace(waiting(f"call {i}", tokens=99, ttft_s=5.0), lora_id=2) for i in range(90)]
    engine = view(running=[decoding_call("holder", lora_id=1)], waiting=calls, max_loras=1)
    queue = SlackOrder(SlackOptions(is_euclid=True))
    num_looks = 0

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num_looks
        num_looks += event == "call" and frame.f_code is first_due_s.__code__

    sys.setprofile(count)
    try:
        plan = plan_with(queue, engine)
    finally:
        sys.setprofile(None)
    assert plan.admit == ()
    assert num_looks == len(calls), "each call is put in line once"


@pytest.mark.parametrize("tokens", [20, 99])
def test_a_call_that_needs_no_adapter_passes_those_that_wait_for_one(tokens: int) -> None:
    calls = [replace(waiting(f"call {i}", tokens=99, ttft_s=5.0), lora_id=2) for i in range(9)]
    plain, holder = waiting("plain", tokens=tokens, ttft_s=5.0), decoding_call("holder", lora_id=1)
    rows = [row("row", prompt=20)]
    engine = view(running=[holder], waiting=[*calls, plain, *rows], max_loras=1, token_budget=100)

    plan = plan_with(SlackOrder(SlackOptions(is_euclid=True)), engine)

    assert names(plan.admit) == (["plain", "row"] if tokens < 99 else ["plain"])


def test_vllms_priority_goes_before_slack() -> None:
    low = replace(waiting("low", tokens=100, ttft_s=0.2), priority=5)
    late = waiting("late", tokens=100, ttft_s=1.0, waited_s=1.2)

    assert order_by(SlackOrder(), view(waiting=[late, low])) == ["late", "low"]


def test_answers_are_expected_as_those_to_calls_with_the_same_promise() -> None:
    report, verdict = (1.0, 0.1, 60.0), (1.0, 0.1, 5.0)
    calls = CallHistory()
    assert calls.likely_tokens(30_000, report) == FIRST_LIKELY_TOKENS
    for _ in range(40):
        for _ in range(9):
            calls.ended(4, verdict)
        calls.ended(2_000, report)

    assert calls.likely_tokens(30_000, verdict) < 20
    assert 1_500 < calls.likely_tokens(30_000, report) < 3_000
    assert calls.likely_tokens(700, report) == 700
    assert (calls.num_judged, calls.num_longer) == (40, 40)


def test_an_answer_that_goes_on_takes_no_share_of_calls_that_wait_too_long() -> None:
    preempted = replace(
        waiting("preempted", tokens=9_000, ttft_s=1.0, waited_s=60.0),
        first_token_at_s=NOW_S - 50.0,
    )
    aged = waiting("aged", tokens=9_000, ttft_s=1.0, waited_s=AGED_BOUNDS + 9.0)
    decoding = decoding_call("decoding", due_in_s=0.06)
    engine = view(running=[decoding], waiting=[preempted, aged], free_blocks=3_000)

    caps = plan_with(OnTimeOrder(), engine).caps

    assert caps["aged"] == pytest.approx(caps["preempted"], rel=0.05)
