"""Where there is nothing to co-locate, every step of our scheduler is stock vLLM's own."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from engine_pairs import engine_of, first_difference, online_source
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.virtual.engine import TrafficSource, VirtualEngine
from batchrun.simulator.virtual.setup import stock_scheduler
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.row_feeds import RowSource
from benchmarks.scenarios import KV_PRESSURE, Order, Scenario, a100_8b, draw_job

FEW_STEPS, MANY_STEPS = 3_000, 10_000
LONG_ENOUGH_S = 2_000.0
JOB_SHAPE = JobShape(200, (300, 3_000), (3, 8), (15, 60), (4, 32))

TIGHT = {"num_blocks": 260, "token_budget": 256, "max_num_seqs": 12}
ONLINE_ONLY: dict[str, tuple[dict[str, Any], Scenario]] = {
    "roomy": ({}, a100_8b()),
    "tight": (TIGHT, a100_8b()),
    "long-prompts": ({"num_blocks": 900}, KV_PRESSURE),
    "one-step-in-flight": ({**TIGHT, "steps_in_flight": 1}, a100_8b()),
    "first-come": ({**TIGHT, "order": "fcfs"}, a100_8b()),
}

slow = pytest.mark.slow


def mixed_sources(seed: int) -> list[TrafficSource]:
    job = draw_job(JOB_SHAPE, seed, Order.SHUFFLED)
    return [online_source(LONG_ENOUGH_S, seed, num_systems=3), RowSource(job)]


@pytest.mark.parametrize(
    ("num_blocks", "num_steps"),
    [(500, FEW_STEPS), pytest.param(500, MANY_STEPS, marks=slow),
     pytest.param(8_600, MANY_STEPS, marks=slow)],
)  # fmt: skip
def test_policy_bs_is_stock_vllm_step_by_step(num_blocks: int, num_steps: int) -> None:
    stock = engine_of(AsyncScheduler, mixed_sources(0), num_blocks=num_blocks)
    bs = engine_of(ColocatedScheduler, mixed_sources(0), num_blocks=num_blocks, policy="bs")

    assert first_difference(stock, bs, num_steps) is None


def online_only_pair(kind: str, seed: int) -> tuple[VirtualEngine, VirtualEngine]:
    """Stock vLLM and policy `echo` with the usual promises, under the same calls."""
    shape, scenario = ONLINE_ONLY[kind]
    stock_cls = stock_scheduler(shape.get("steps_in_flight", 2))

    def engine(scheduler_cls: type[Scheduler]) -> VirtualEngine:
        calls = online_source(LONG_ENOUGH_S, seed, scenario, num_systems=3)
        return engine_of(scheduler_cls, [calls], **shape)

    return engine(stock_cls), engine(ColocatedScheduler)


@pytest.mark.parametrize("kind", ["roomy", "tight"])
def test_without_offline_work_the_first_steps_are_stock_vllms(kind: str) -> None:
    assert first_difference(*online_only_pair(kind, 0), FEW_STEPS // 2) is None


@pytest.mark.nightly
@slow
@pytest.mark.parametrize("kind", ONLINE_ONLY)
def test_without_offline_work_ten_thousand_steps_are_stock_vllms(kind: str) -> None:
    stock, echo = online_only_pair(kind, 1)

    assert first_difference(stock, echo, MANY_STEPS) is None
    preempted = sum(record.num_preemptions for record in stock.records.values())
    assert kind == "roomy" or preempted > 10


def test_without_offline_work_the_priorities_of_callers_count_as_in_stock_vllm() -> None:
    stock, echo = online_only_pair("tight", 0)
    for engine in (stock, echo):
        rank_callers(engine)

    assert first_difference(stock, echo, FEW_STEPS // 2) is None


def rank_callers(engine: VirtualEngine) -> None:
    """Give each call one of three priorities, as a client may."""
    add_request = engine.scheduler.add_request

    def add(request: Request) -> None:
        request.priority = crc32(request.request_id.encode()) % 3
        add_request(request)

    engine.scheduler.add_request = add  # type: ignore[method-assign]
