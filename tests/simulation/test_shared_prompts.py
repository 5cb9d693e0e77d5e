"""Calls that begin with one system prompt, beside offline work: its KV counts once."""

from __future__ import annotations

from dataclasses import replace

import scheduler_rig as rig
from engine_pairs import engine_of, ours

from batchrun.scheduling.policies import Policy
from batchrun.scheduling.view import EngineView, Plan
from batchrun.simulator.virtual.engine import TrafficSource, VirtualEngine
from batchrun.simulator.virtual.feeder import DAEMON_WINDOW, JobFeeder, OnlineSource
from batchrun.simulator.virtual.run import Slo, summarize
from batchrun.simulator.virtual.scenarios import (
    OnlineTraffic,
    Order,
    a100_8b,
    draw_calls,
    draw_job,
    planned_order,
)
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

DURATION_S = 24.0


class Recount:
    """A policy that counts anew, block by block, what online requests hold before each plan."""

    def __init__(self, inner: Policy, engine: VirtualEngine) -> None:
        self._inner = inner
        self._manager = engine.scheduler.kv_cache_manager
        self.num_plans = self.num_shared = 0

    def plan(self, view: EngineView) -> Plan:
        held = [self._manager.get_block_ids(r.request_id)[0] for r in view.online_running]
        num_distinct = len({block for blocks in held for block in blocks})
        assert view.online_blocks == num_distinct
        assert view.total_blocks - 1 - view.free_blocks >= view.online_blocks
        self.num_plans += 1
        self.num_shared += sum(map(len, held)) > num_distinct
        return self._inner.plan(view)


def engine_with_system_prompt(num_blocks: int = 8_600) -> VirtualEngine:
    scenario = a100_8b()
    assert isinstance(scenario.online, OnlineTraffic)
    online = replace(scenario.online, rate_per_s=3.0, system_tokens=2_000)
    calls = draw_calls(replace(scenario, duration_s=DURATION_S, online=online), seed=0)
    job = planned_order(draw_job(scenario.job, 0, Order.SHUFFLED))
    sources: list[TrafficSource] = [OnlineSource(calls, 0), JobFeeder(job, window=DAEMON_WINDOW)]
    return engine_of(ColocatedScheduler, sources, num_blocks=num_blocks)


def test_calls_that_share_a_system_prompt_keep_their_promise_beside_documents() -> None:
    engine = engine_with_system_prompt()
    planner = ours(engine).planner
    assert planner.policy is not None
    recount = planner.policy = Recount(planner.policy, engine)
    engine.run_until(DURATION_S)

    figures = summarize(engine, Slo(1.0, 0.05))
    assert figures["slo_ttft"] == 1.0
    assert ours(engine).state.num_policy_errors == 0
    assert recount.num_shared > recount.num_plans / 2


def test_a_call_takes_no_room_for_what_another_call_holds_already() -> None:
    scheduler = rig.build(num_blocks=100)
    scheduler.add_request(rig.make_request("ab", 640, max_tokens=60))
    scheduler.add_request(rig.make_request("row", 640, row=0, max_tokens=60))
    while rig.step(scheduler) != {"ab": 1, "row": 1}:
        pass
    # The names give both calls one text: the second adds 2 blocks to 40, and 17 are free.
    scheduler.add_request(rig.make_request("ba", 660))

    assert rig.step(scheduler) == {"ab": 1, "row": 1, "ba": 20}
