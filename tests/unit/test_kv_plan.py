"""Steps beside calls leave room for the KV that these will want."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from echo_views import BLOCK_TOKENS, NOW_S, call, decoding_call, decoding_row, prefilling_row, view

from batchrun.estimator.call_history import (
    EDGES_TOKENS,
    FIRST_LIKELY_TOKENS,
    REMEMBERED_CALLS,
    CallHistory,
)
from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.kv_plan import PLAN_EVERY_S, KvPlan, longest_step_s
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.view import BlockKind, BlockLaw, EngineView


def history(answer_tokens: int, *, rate_per_s: float = 1.0) -> CallHistory:
    """Ten minutes of calls at one rate, whose answers have one length."""
    calls = CallHistory()
    num_calls = round(600 * rate_per_s)
    for i in range(num_calls):
        calls.begun(NOW_S - 600 + i / rate_per_s)
        calls.ended(answer_tokens)
    return calls


def engine(calls: CallHistory, *, total_blocks: int = 1_000, **fields: Any) -> EngineView:
    """An engine with one call that generates, and this past."""
    running = [decoding_call()]
    return view(running=running, total_blocks=total_blocks, calls=calls, **fields)


def test_short_answers_leave_steps_as_they_are() -> None:
    assert longest_step_s(engine(history(50))) == math.inf


def test_the_longer_answers_are_the_shorter_are_steps() -> None:
    steps_s = [longest_step_s(engine(history(tokens))) for tokens in (400, 600, 800)]

    assert 0.1 > steps_s[0] > steps_s[1] > steps_s[2] > 0


def test_more_calls_and_fewer_blocks_shorten_steps() -> None:
    usual_s = longest_step_s(engine(history(400)))

    assert longest_step_s(engine(history(400, rate_per_s=2.0))) < usual_s
    assert longest_step_s(engine(history(400), total_blocks=700)) < usual_s
    assert longest_step_s(engine(history(400), total_blocks=3_000)) == math.inf


@pytest.mark.parametrize(
    "law",
    [
        BlockLaw(BlockKind(BLOCK_TOKENS, num_groups=6)),
        BlockLaw(BlockKind(BLOCK_TOKENS, num_groups=6), BlockKind(BLOCK_TOKENS, kept_blocks=1)),
        BlockLaw(BlockKind(BLOCK_TOKENS), BlockKind(BLOCK_TOKENS, num_groups=5, kept_blocks=400)),
    ],
)
def test_answers_grow_in_all_groups_of_a_model(law: BlockLaw) -> None:
    calls = history(600)
    plain_s = longest_step_s(engine(calls))
    (held,) = law.kept([decoding_call().num_computed_tokens])

    hybrid = engine(calls, total_blocks=6_000, law=law, online_blocks=held)
    assert longest_step_s(hybrid) == pytest.approx(plain_s, rel=0.05)


def test_steps_are_shorter_while_the_rate_is_known_from_few_calls() -> None:
    many, few = history(400), CallHistory()
    for i in range(600):
        few.ended(400)
        if i < 8:
            few.begun(NOW_S - 6 + i * 0.75)

    assert few.rate_per_s(NOW_S) == pytest.approx(many.rate_per_s(NOW_S), rel=0.05)
    assert longest_step_s(engine(few)) < longest_step_s(engine(many))


def test_calls_that_fill_the_kv_by_themselves_leave_rows_nothing() -> None:
    calls = history(2_000, rate_per_s=10.0)
    policy = EchoPolicy(EchoOptions(), ArrivalOrder())
    running = [decoding_call(), decoding_row("answer"), prefilling_row("document", left=5_000)]

    assert longest_step_s(engine(calls)) == 0.0
    assert policy.plan(view(running=running, calls=calls)).caps == {"answer": 0, "document": 0}


def test_chance_in_some_minutes_keeps_no_row_from_short_steps_now() -> None:
    """Forty calls may come to hold too much in minutes; with fewer blocks, within one. Calls with
    longer answers are expected to."""

    def longest_s(answer_tokens: int, num_running: int, total_blocks: int) -> float:
        running = [decoding_call(f"{i}", prompt=400) for i in range(num_running)]
        past = history(answer_tokens)
        return longest_step_s(view(running=running, total_blocks=total_blocks, calls=past))

    assert 0.0 < longest_s(2_000, 40, 24_000) < 0.1
    assert longest_s(2_000, 40, 16_000) == 0.0
    assert longest_s(6_000, 1, 20_000) == 0.0


def test_calls_that_wait_will_want_room_too() -> None:
    calls = history(400)
    waiting = [call(f"call {i}") for i in range(10)]

    assert longest_step_s(engine(calls, waiting=waiting)) < longest_step_s(engine(calls))


@pytest.mark.parametrize("num_calls", [1, 2])
def test_calls_are_not_taken_to_hold_more_than_they_can(num_calls: int) -> None:
    """They hold 0.8 of the KV, and no answer so far had 700 tokens."""
    calls, blocks = CallHistory(), 8_600
    for tokens in range(100, 700):
        calls.ended(tokens)
    prompt = round(0.8 * blocks * BLOCK_TOKENS / num_calls)
    running = [decoding_call(f"{number}", prompt=prompt) for number in range(num_calls)]

    assert longest_step_s(view(running=running, total_blocks=blocks, calls=calls)) == math.inf


def test_rows_keep_to_the_length_of_the_plan() -> None:
    calls = history(600)
    most_s = longest_step_s(view(running=[decoding_call()], total_blocks=1_000, calls=calls))
    policy = EchoPolicy(EchoOptions(), ArrivalOrder())

    running = [decoding_call(), prefilling_row(left=5_000)]
    plan = policy.plan(view(running=running, total_blocks=1_000, calls=calls))

    assert most_s - 0.001 < plan.predicted_s <= most_s < 0.045


def test_a_plan_holds_for_a_while_and_only_while_calls_generate() -> None:
    plan = KvPlan()
    short, long = history(50), history(2_000, rate_per_s=10.0)

    assert plan.most_s(view(calls=long)) == math.inf
    assert plan.most_s(engine(short)) == math.inf
    assert plan.most_s(engine(long, now_s=NOW_S + PLAN_EVERY_S / 2)) == math.inf
    assert plan.most_s(engine(long, now_s=NOW_S + PLAN_EVERY_S)) == 0.0


def test_answers_that_ended_tell_how_long_others_become() -> None:
    longer = history(300).longer_shares([])

    assert longer[0] == 1.0
    assert longer[EDGES_TOKENS < 250].min() > 0.98
    assert longer[EDGES_TOKENS > 400].max() < 0.01


def test_answers_in_flight_tell_that_they_are_longer() -> None:
    calls = CallHistory()
    place = int(np.searchsorted(EDGES_TOKENS, 1_000.0))

    assert calls.longer_shares([])[place] < 0.005
    assert calls.longer_shares([1_000] * 20)[place - 1] > 0.5


def test_what_is_beyond_all_answers_seen_is_feared_less_the_more_have_ended() -> None:
    far = int(np.searchsorted(EDGES_TOKENS, 6_000.0))
    feared: list[float] = []
    for num_ended in (0, 20, 60):
        calls = CallHistory()
        for _ in range(num_ended):
            calls.ended(900)
        shares = calls.longer_shares([900] * 10)
        feared.append(float(shares[far] / shares[far - 8]))

    assert feared == sorted(feared, reverse=True)
    assert feared[0] > 2 * feared[-1] > 0.0


def test_old_answers_fade() -> None:
    calls = history(2_000)
    for _ in range(4 * REMEMBERED_CALLS):
        calls.ended(100)

    assert calls.longer_shares([])[int(np.searchsorted(EDGES_TOKENS, 1_500.0))] < 0.15


def test_the_rate_is_that_of_the_last_minute() -> None:
    calls = history(100, rate_per_s=5.0)

    assert calls.rate_per_s(NOW_S) == pytest.approx(5.0, rel=0.05)
    assert calls.rate_per_s(NOW_S + 120.0) < 1.0
    assert calls.rate_per_s(NOW_S) < 1.0


def test_the_more_calls_a_rate_is_of_the_surer_it_is() -> None:
    errors = [history(100, rate_per_s=rate).rate_error() for rate in (1.0, 4.0)]

    assert errors == pytest.approx([60**-0.5, 240**-0.5], rel=0.05)
    assert CallHistory().rate_error() == 1.0


def test_how_often_answers_are_longer_than_likely_is_counted_once_somebody_asked() -> None:
    calls = history(100)
    assert (calls.num_judged, calls.num_longer) == (0, 0)
    assert 80 < calls.likely_tokens(10_000) < 200
    for tokens in (50, 80, 5_000):
        calls.ended(tokens)

    assert (calls.num_judged, calls.num_longer) == (3, 1)


def test_what_answers_taught_is_kept_for_an_engine_that_serves_the_same() -> None:
    calls, promise = history(300), (1.0, 0.1, 60.0)
    for _ in range(40):
        calls.ended(2_000, promise)
    kept = calls.keep("tiny")
    again = CallHistory()
    again.recall(kept, "tiny")

    assert again.likely_tokens(9_000, promise) == calls.likely_tokens(9_000, promise) > 1_500
    assert again.likely_tokens(9_000) == calls.likely_tokens(9_000) < 500
    assert again.longer_shares([]) == pytest.approx(calls.longer_shares([]), abs=0.01)
    fresh = CallHistory()
    for text, served_by in ((kept, "other"), (kept[:-9], "tiny"), (b"\x00" * 99, "tiny")):
        with pytest.raises(ValueError, match="history of answers"):
            fresh.recall(text, served_by)
    assert fresh.likely_tokens(9_000) == FIRST_LIKELY_TOKENS
