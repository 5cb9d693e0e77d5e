"""The parts of `benchmarks.cpu_online_queue` that decide what its figures mean."""

from __future__ import annotations

import pytest

from batchrun.config import SloConfig
from batchrun.errors import EngineError
from batchrun.simulator.replay import OnlineResult
from benchmarks.cpu_online_queue import bars
from benchmarks.cpu_online_queue_calls import (
    CLASSES,
    TPOT_MARGIN,
    TTFT_TIMES_ALONE,
    Bursts,
    Results,
    alone_calls,
    bounds_of,
    capacity_per_s,
    judge,
    num_different,
)
from benchmarks.records import Record

BOUNDS = {
    "interactive": SloConfig(ttft_s=0.5, tpot_s=0.1),
    "documents": SloConfig(ttft_s=4.0, tpot_s=0.2),
}


def answered(ttft_s: float, gap_s: float = 0.05, at_s: float = 0.0) -> OnlineResult:
    """A call that got three tokens."""
    return OnlineResult(at_s, ttft_s, ttft_s + 2 * gap_s, (gap_s,) * 2, 3, token_ids=(1, 2, 3))


def window(server: str, seed: int, wait_s: float, failed: int = 0) -> Record:
    """What `bars` reads of a window."""
    waits = {"longest_wait_s": wait_s, "longest_wait_bounds": 2 * wait_s}
    return {"kind": "window", "server": server, "seed": seed, "failed": failed, **waits}


def pair(ratio: float, *, is_kept: bool = True, different: int = 0) -> Record:
    """What `bars` reads of a pair."""
    kind = {"kind": "pair", "goodput_ratio": ratio, "is_kept": is_kept}
    return {**kind, "different_answers": different}


def test_calls_come_as_fast_as_asked_in_bursts_and_between() -> None:
    bursts = Bursts(number=20, burst_s=8.0, quiet_s=5.0)
    calls = [call for each in bursts.draw(10.0, seed=0).values() for call in each]
    in_bursts = [call for call in calls if call.at_s % 13.0 < 8.0]

    assert bursts.span_s == 260.0
    assert len(in_bursts) / 160.0 == pytest.approx(13.0, rel=0.1)
    assert (len(calls) - len(in_bursts)) / 100.0 == pytest.approx(2.0, rel=0.3)
    assert bursts.draw(10.0, seed=0) == bursts.draw(10.0, seed=0) != bursts.draw(10.0, seed=1)


def test_calls_alone_come_one_class_after_the_other() -> None:
    first, second = (alone_calls()[each.name] for each in CLASSES)

    assert max(call.at_s for call in first) < min(call.at_s for call in second)


def test_bounds_are_multiples_of_what_the_machine_does() -> None:
    alone = {"interactive": [answered(0.04), answered(0.05), answered(9.0)]}
    alone["documents"] = [answered(0.5)]
    full = {each.name: [answered(3.0, gap_s=0.3)] for each in CLASSES}

    bounds = bounds_of(alone, full)

    assert bounds["interactive"].ttft_s == pytest.approx(TTFT_TIMES_ALONE * 0.05)
    assert bounds["documents"].ttft_s == pytest.approx(TTFT_TIMES_ALONE * 0.5)
    assert bounds["interactive"].tpot_s == pytest.approx(TPOT_MARGIN * 0.3)
    assert bounds["documents"].tpot_s == pytest.approx(TPOT_MARGIN * 0.6)


def test_capacity_is_what_ended_until_the_last_did_and_needs_all_of_it() -> None:
    full: Results = {"interactive": [answered(0.9), answered(1.9)], "documents": [answered(0.4)]}
    lost = OnlineResult(0.0, None, 20.0, (), 0, error="HTTP 500")

    assert capacity_per_s(full) == pytest.approx(3 / 2.0)
    with pytest.raises(EngineError, match="HTTP 500"):
        capacity_per_s({**full, "documents": [lost]})


def test_goodput_counts_calls_whose_first_token_and_pace_are_in_the_bounds_of_their_class() -> None:
    results = {
        "interactive": [answered(0.4), answered(0.6), answered(0.4, gap_s=0.15)],
        "documents": [answered(3.9, gap_s=0.15), OnlineResult(0.0, None, 6.0, (), 0, error="late")],
    }

    found = judge(results, BOUNDS, span_s=4.0)

    assert (found["arrived"], found["failed"]) == (5, 1)
    assert found["goodput_per_s"] == pytest.approx(2 / 4.0)
    assert found["longest_wait_s"] == found["documents_longest_wait_s"] == 6.0
    assert found["longest_wait_bounds"] == pytest.approx(1.5)


def test_answers_differ_by_a_token_and_where_there_is_none() -> None:
    one, other = answered(0.1), OnlineResult(0.0, 0.1, 0.2, (0.1,), 2, token_ids=(1, 9))
    nothing = OnlineResult(0.0, None, 9.0, (), 0, error="gone")

    assert num_different({"a": [one, one]}, {"a": [answered(2.0), other]}) == 1
    assert num_different({"a": [nothing]}, {"a": [nothing]}) == 1


def test_a_pair_with_a_disturbed_worker_is_dropped_whatever_its_ratio() -> None:
    windows = [window("vllm", 0, 4.0), window("on-time", 0, 6.0)]

    found = {bar.name: bar for bar in bars([*windows, pair(1.5), pair(9.0, is_kept=False)])}

    assert found["goodput of on-time over vLLM's, median"].value == 1.5
    assert found["longest wait of on-time over vLLM's"].value == 1.5
    assert all(bar.is_met for bar in found.values())


def test_a_call_that_never_ends_or_says_something_else_is_a_miss() -> None:
    windows = [window("vllm", 0, 4.0), window("on-time", 0, 9.0, failed=1)]

    missed = {bar.name for bar in bars([*windows, pair(1.5, different=2)]) if not bar.is_met}

    assert missed == {
        "calls that on-time did not end",
        "answers with other tokens than vLLM's",
        "longest wait of on-time over vLLM's",
    }
