"""Calls with bounds of their own, and calls that run as offline work, on the virtual engine."""

from __future__ import annotations

import json
import math

import pytest
from engine_pairs import engine_of, ours

from batchrun.hints import HINT_VERSION
from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.virtual.engine import Arrival, RequestRecord, VirtualEngine
from batchrun.simulator.virtual.setup import NONCE
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.wire import Orders, encode
from benchmarks.row_feeds import RowSource
from benchmarks.scenarios import Order, draw_job

JOB_SHAPE = JobShape(250, (3_000, 6_000), (3, 6), (15, 60), (4, 16))
OUTPUT_TOKENS = 60
NUM_CALLS = 3


def slo_hint(ttft_s: float = 1.0, tpot_s: float = 0.05, jct_s: float | None = None) -> str:
    slo = {"ttft_s": ttft_s, "tpot_s": tpot_s, "jct_s": jct_s}
    return json.dumps({"v": HINT_VERSION, "nonce": NONCE, "class": "online", "slo": slo})


def flex_hint() -> str:
    return json.dumps({"v": HINT_VERSION, "nonce": NONCE, "class": "offline", "job": None})


def busy_engine() -> VirtualEngine:
    """An engine that has more offline work than it can do, and has learned how long steps take."""
    feeder = RowSource(draw_job(JOB_SHAPE, 1, Order.GROUPED), 256)
    engine = engine_of(ColocatedScheduler, [feeder], num_blocks=4_000, token_budget=2_048)
    engine.run_until(5.0)
    return engine


def call(engine: VirtualEngine, name: str, hint: str | None, *, at_s: float) -> RequestRecord:
    """Let a call arrive."""
    engine.run_until(at_s)
    first = sum(name.encode())
    prompt = [5 + (first + i) % 1_990 for i in range(200)]
    engine.add(Arrival(name, True, engine.now_s, prompt, OUTPUT_TOKENS, hint))
    return engine.records[name]


def mean_tpot_s(record: RequestRecord) -> float:
    times_s = record.token_times_s
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def completion_s(record: RequestRecord) -> float:
    return record.token_times_s[-1] - record.arrival_at_s


def ttft_s(record: RequestRecord) -> float:
    return record.token_times_s[0] - record.arrival_at_s


HINTS = {
    "default": None,
    "quick": slo_hint(tpot_s=0.025),
    "whole": slo_hint(jct_s=2.0),
    "soon": slo_hint(ttft_s=0.15),
}


@pytest.fixture(scope="module")
def calls() -> dict[str, list[RequestRecord]]:
    """Calls of each class, one after the other, beside more offline work than the engine can do.
    The first calls are no measure: the engine has yet to learn how long steps with calls take."""
    engine = busy_engine()
    for i in range(3):
        call(engine, f"first-{i}", None, at_s=5.0 + 4 * i)
    by_class = {}
    for name, hint in HINTS.items():
        start_s = engine.now_s + 4
        made = [call(engine, f"{name}-{i}", hint, at_s=start_s + 4 * i) for i in range(3)]
        by_class[name] = made
    engine.run_until(engine.now_s + 4)
    scheduler = ours(engine)
    assert len(scheduler.waiting) > 20 and scheduler.state.num_policy_errors == 0
    assert scheduler.state.num_malformed_hints == 0
    return by_class


def test_a_tighter_bound_is_kept_where_the_default_one_would_break_it(
    calls: dict[str, list[RequestRecord]],
) -> None:
    default = calls["default"]

    assert max(mean_tpot_s(record) for record in calls["quick"]) <= 0.025
    assert min(mean_tpot_s(record) for record in default) > 0.04
    assert max(completion_s(record) for record in calls["whole"]) <= 2.0
    assert min(completion_s(record) for record in default) > 2.5
    # The first call of a class for a minute meets a step that was made for the others.
    assert max(ttft_s(record) for record in calls["soon"][1:]) <= 0.15
    assert max(mean_tpot_s(record) for record in default) <= 0.05


def test_each_request_is_judged_by_its_own_bounds() -> None:
    engine = engine_of(ColocatedScheduler, num_blocks=200)
    call(engine, "default", None, at_s=0.0)
    call(engine, "hasty", slo_hint(ttft_s=0.001, tpot_s=0.001), at_s=0.0)
    call(engine, "ending", slo_hint(jct_s=0.2), at_s=0.0)
    engine.run_until(math.inf)

    slo = ours(engine).daemon_link.telemetry(engine.now_s).slo
    ending = engine.records["ending"]
    late = [t for t in ending.token_times_s if t > ending.arrival_at_s + 0.2]
    assert slo.num_tokens == 3 * OUTPUT_TOKENS
    assert 0 < len(late) < OUTPUT_TOKENS
    assert slo.num_late_tokens == OUTPUT_TOKENS + len(late)
    assert slo.num_late_first_tokens == 1


def test_a_flex_call_is_offline_work_that_waits_while_that_is_off() -> None:
    engine = busy_engine()
    scheduler = ours(engine)
    online = scheduler.daemon_link.telemetry(engine.now_s).online
    flex = call(engine, "flex", flex_hint(), at_s=5.0)
    scheduler.daemon_link.control.receive(encode(Orders(NONCE, 1, 0, is_offline_on=False)))
    engine.run_until(12.0)
    told = scheduler.daemon_link.telemetry(engine.now_s)
    num_rows = len(scheduler.daemon_link._labels)
    waits = flex.finished_at_s is None and not flex.token_times_s
    scheduler.daemon_link.control.receive(encode(Orders(NONCE, 1, 1)))
    engine.run_until(40.0)

    assert waits
    assert told.online == online
    offline = told.offline.num_running + told.offline.num_waiting
    assert offline == num_rows + 1
    assert flex.finish_reason == "length"
    assert len(scheduler.waiting) and scheduler.state.num_policy_errors == 0


def test_neither_rows_nor_flex_calls_wait_for_ever_behind_the_others() -> None:
    engine = busy_engine()
    scheduler = ours(engine)
    flex = [call(engine, f"flex-{i}", flex_hint(), at_s=5.0) for i in range(2)]
    here = {name for name in engine.records if name.startswith("row")}
    waiting = [view.request_id for view in scheduler.state.queue.offline]
    engine.run_until(8.0)
    behind = [v.request_id for v in scheduler.state.queue.offline if v.request_id not in here]

    assert waiting[-2:] == ["flex-0", "flex-1"]
    assert behind and all(name.startswith("row") for name in behind)
    places = {view.request_id: i for i, view in enumerate(scheduler.state.queue.offline)}
    present = [place for name, place in places.items() if name in here or name.startswith("flex")]
    assert not present or max(present) < min(places[name] for name in behind)
    engine.run_until(60.0)
    assert {record.finish_reason for record in flex} == {"length"}


def test_flex_calls_of_before_a_new_daemon_go_before_its_rows() -> None:
    engine = engine_of(ColocatedScheduler, num_blocks=100, max_num_seqs=1)
    scheduler = ours(engine)
    for name, text in (
        ("old-row", row_hint(epoch=1, rank=5_000)),
        ("flex-b", flex_hint()),
        ("flex-a", flex_hint()),
        ("new-row", row_hint(epoch=2, rank=10)),
    ):
        call(engine, name, text, at_s=engine.now_s + 0.001)

    waiting = [view.request_id for view in scheduler.state.queue.offline]
    assert waiting == ["flex-b", "flex-a", "new-row"]


def row_hint(epoch: int, rank: int) -> str:
    fields = {"epoch": epoch, "job": "job", "row": rank, "rank": rank, "nodes": []}
    return json.dumps({"v": HINT_VERSION, "nonce": NONCE, "class": "offline", **fields})
