"""Calls with bounds of their own, and calls that run as offline work, on the virtual engine."""

from __future__ import annotations

import json
import math

import pytest
from engine_pairs import engine_of, ours

from batchrun.types import HINT_KEY, HINT_VERSION
from batchrun.vllm_plugin import ColocatedScheduler
from batchrun.vllm_plugin.virtual import DAEMON_WINDOW, JobFeeder, Order, VirtualEngine, draw_job
from batchrun.vllm_plugin.virtual.requests import Arrival, RequestRecord
from batchrun.vllm_plugin.virtual.setup import NONCE
from batchrun.vllm_plugin.virtual.workload import JobShape
from batchrun.wire import Orders, encode

JOB_SHAPE = JobShape(90, (3_000, 6_000), (3, 6), (15, 60), (4, 16))
OUTPUT_TOKENS = 60
NUM_CALLS = 3


def slo_hint(ttft_s: float = 1.0, tpot_s: float = 0.05, jct_s: float | None = None) -> str:
    slo = {"ttft_s": ttft_s, "tpot_s": tpot_s, "jct_s": jct_s}
    return json.dumps({"v": HINT_VERSION, "nonce": NONCE, "class": "online", "slo": slo})


def flex_hint() -> str:
    return json.dumps({"v": HINT_VERSION, "nonce": NONCE, "class": "offline", "job": None})


def busy_engine() -> VirtualEngine:
    """An engine that has more offline work than it can do, and has learned how long steps take."""
    feeder = JobFeeder(draw_job(JOB_SHAPE, 1, Order.GROUPED), window=DAEMON_WINDOW)
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


def made_calls(hint: str | None) -> tuple[VirtualEngine, list[RequestRecord]]:
    """The same calls beside offline work, one after the other, with this hint."""
    engine = busy_engine()
    records = [call(engine, f"call-{i}", hint, at_s=5.0 + 4 * i) for i in range(NUM_CALLS)]
    engine.run_until(5.0 + 4 * NUM_CALLS)
    assert len(ours(engine).waiting) and ours(engine).planner.num_errors == 0
    return engine, records


def mean_tpot_s(record: RequestRecord) -> float:
    times_s = record.token_times_s
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def completion_s(record: RequestRecord) -> float:
    return record.token_times_s[-1] - record.arrival_at_s


def ttft_s(record: RequestRecord) -> float:
    return record.token_times_s[0] - record.arrival_at_s


def test_tighter_bounds_are_kept_where_the_default_ones_would_break_them() -> None:
    _, default = made_calls(None)
    _, quick = made_calls(slo_hint(tpot_s=0.025))
    _, soon = made_calls(slo_hint(ttft_s=0.12))
    _, whole = made_calls(slo_hint(jct_s=2.0))
    for r in (default, quick, soon, whole):
        print(
            [round(mean_tpot_s(x), 4) for x in r],
            [round(ttft_s(x), 3) for x in r],
            [round(completion_s(x), 2) for x in r],
        )
    assert 0
