"""The search that knows all calls: its engine is that of the law, and it finds what can be kept."""

from __future__ import annotations

from itertools import product

import pytest

from batchrun.simulator.virtual.setup import A100Law
from benchmarks.queue_calls import CHAT, VOICE, PromisedCall, classed_calls
from benchmarks.queue_oracle import ORDERS, SHARES, Calls, State, run, search


def test_a_prompt_alone_takes_as_long_as_the_law_says() -> None:
    calls = Calls.of([PromisedCall(0.0, 1_500, 1, CHAT)])

    after = run(State(), calls, 0.01, "due", 1.0)

    assert after.now_s == pytest.approx(A100Law().step_s([(1_500, 1_500, False)]))
    assert after.kept == 1


def test_a_call_is_kept_only_where_its_tokens_are_in_time_too() -> None:
    beside = [PromisedCall(0.0, 3_000, 400, CHAT) for _ in range(40)]
    calls = Calls.of([PromisedCall(0.0, 100, 50, VOICE), *beside])

    after = run(State(), calls, 60.0, "shortest", 1.0)

    assert 1 <= after.kept < len(beside)
    assert not (len(after.rows) or after.prompts or after.waiting)


def test_the_search_keeps_no_fewer_than_each_order_by_itself() -> None:
    calls = classed_calls(30.0, 4.0, 0)
    known = Calls.of(calls)
    alone = [
        run(State(), known, 20.0, order, share).kept for order, share in product(ORDERS, SHARES)
    ]

    assert search(calls, 2, end_s=20.0) >= max(alone)
    assert max(alone) > min(alone)
