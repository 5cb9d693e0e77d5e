"""Calls that begin with one system prompt, beside offline work: its KV counts once."""

from __future__ import annotations

from dataclasses import replace

import scheduler_rig as rig
from engine_pairs import ours

from batchrun.scheduling.policies import Policy
from batchrun.scheduling.view import EngineView, Plan
from batchrun.simulator.online import Calls, OnlineTraffic
from batchrun.simulator.simulation import Simulation, SimulationPlan
from batchrun.simulator.virtual.engine import RequestRecord, VirtualEngine
from benchmarks.row_feeds import drawn_job
from benchmarks.scenarios import Order, a100_8b, draw_calls, draw_job

DURATION_S = 24.0


class Recount:
    """A policy that counts again, block by block, what online requests hold before each plan."""

    def __init__(self, inner: Policy, engine: VirtualEngine) -> None:
        self._inner = inner
        self._manager = engine.scheduler.kv_cache_manager
        self._daemon_link = ours(engine).daemon_link
        self.num_plans = self.num_shared = 0

    def plan(self, view: EngineView) -> Plan:
        held = [self._manager.get_block_ids(r.request_id)[0] for r in view.online_running]
        num_distinct = len({block for blocks in held for block in blocks})
        assert view.online_blocks == num_distinct
        assert view.total_blocks - 1 - view.free_blocks >= view.online_blocks
        telemetry = self._daemon_link.telemetry(view.now_s).kv
        assert telemetry.online_blocks == num_distinct
        self.num_plans += 1
        self.num_shared += sum(map(len, held)) > num_distinct
        return self._inner.plan(view)


def calls_with_a_system_prompt() -> Calls:
    scenario = a100_8b()
    assert isinstance(scenario.online, OnlineTraffic)
    online = replace(scenario.online, rate_per_s=3.0, system_tokens=2_000)
    return Calls.of(draw_calls(replace(scenario, duration_s=DURATION_S, online=online), seed=0))


def test_calls_that_share_a_system_prompt_keep_their_promise_beside_documents() -> None:
    job = drawn_job(draw_job(a100_8b().job, 0, Order.SHUFFLED))
    simulation = Simulation(SimulationPlan(DURATION_S, calls_with_a_system_prompt(), [job]))
    (engine,) = simulation.engines.engines
    scheduler = ours(engine)
    assert scheduler.step_policy is not None
    recount = scheduler.step_policy = Recount(scheduler.step_policy, engine)
    simulation.engines.run_until(DURATION_S)

    assert simulation.figures().online.ttft_kept == 1.0
    assert ours(engine).state.num_policy_errors == 0
    assert recount.num_shared > recount.num_plans / 2


def test_calls_find_their_system_prompt_and_nothing_more_in_the_cache() -> None:
    simulation = Simulation(SimulationPlan(DURATION_S, calls_with_a_system_prompt()))
    ended: list[RequestRecord] = []
    simulation.engines.engines[0].end_listeners.append(ended.append)
    simulation.engines.run_until(DURATION_S)
    ended.sort(key=lambda record: record.arrival_at_s)

    assert ended[0].num_hit_tokens == 0
    assert {record.num_hit_tokens for record in ended[8:]} == {2_000}
    assert min(record.num_prompt_tokens for record in ended) > 2_000


def test_a_call_takes_no_room_for_what_another_call_holds_already() -> None:
    scheduler = rig.build(num_blocks=100)
    scheduler.add_request(rig.make_request("ab", 640, max_tokens=60))
    scheduler.add_request(rig.make_request("row", 640, row=0, max_tokens=60))
    while rig.step(scheduler) != {"ab": 1, "row": 1}:
        pass
    # The names give both calls one text: the second adds 2 blocks to 40, and 17 are free.
    scheduler.add_request(rig.make_request("ba", 660))

    assert rig.step(scheduler) == {"ab": 1, "row": 1, "ba": 20}
