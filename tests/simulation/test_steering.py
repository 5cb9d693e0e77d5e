"""Orders of the daemon at run time, on the virtual engine: policy, budget, switch, leases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from echo_views import NOW_S, call
from vllm.v1.core.sched.output import SchedulerOutput

from batchrun.cache.free_queue import TieredFreeQueue
from batchrun.scheduling.policies import POLICIES
from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.virtual.engine import (
    Arrival,
    Timing,
    TrafficSource,
    VirtualEngine,
    token_id,
)
from batchrun.simulator.virtual.setup import NONCE, A100Law, EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.vllm_plugin.telemetry import Meter
from batchrun.wire import Answer, Orders, Telemetry, encode, read_message
from benchmarks.row_feeds import RowSource, callers
from benchmarks.scenarios import Order, Scenario, a100_8b, draw_calls, draw_job

JOB_SHAPE = JobShape(12, (300, 2_500), (3, 6), (15, 60), (4, 32))
SMALL_ENGINE = {"num_blocks": 600, "token_budget": 512, "max_num_seqs": 64}


class Rig:
    """An engine with both classes of work, and a daemon that sends it orders."""

    def __init__(self, policy: str, *, seed: int = 0, online_s: float = 20.0, **shape: int) -> None:
        additional = {"batchrun": {"policy": policy}}
        calls = draw_calls(Scenario("online", online_s, a100_8b().online), seed)
        self.job = draw_job(JOB_SHAPE, seed, Order.SHUFFLED)
        sources: list[TrafficSource] = [callers(calls, seed), RowSource(self.job)]
        shape = {**SMALL_ENGINE, **shape}
        engine_shape = EngineShape(additional_config=additional, **shape)  # type: ignore[arg-type]
        # Empty steps are many here; a millisecond each, as in vLLM, would take long to simulate.
        timing = Timing(idle_poll_s=0.02)
        self.engine = VirtualEngine(ColocatedScheduler, engine_shape, A100Law(), sources, timing)
        assert isinstance(self.engine.scheduler, ColocatedScheduler)
        self.scheduler = self.engine.scheduler
        self._numbers = itertools.count()

    def order(self, **changes: object) -> Answer:
        orders = Orders(NONCE, 1, next(self._numbers), **changes)  # type: ignore[arg-type]
        return read_message(self.scheduler.daemon_link.control.receive(encode(orders)), Answer)

    def telemetry(self) -> Telemetry:
        told = self.scheduler.daemon_link.telemetry(self.engine.now_s)
        return read_message(encode(told), Telemetry)

    def run_until(self, at_s: float) -> None:
        self.engine.run_until(at_s)

    def watch(self, see: Callable[[SchedulerOutput], None]) -> None:
        """Call `see` with every step from now on."""
        schedule = self.scheduler.schedule

        def seen(*args: bool) -> SchedulerOutput:
            output = schedule(*args)
            see(output)
            return output

        self.scheduler.schedule = seen  # type: ignore[method-assign, assignment]

    def offline_tokens(self, output: SchedulerOutput) -> int:
        records = self.engine.records
        tokens = output.num_scheduled_tokens.items()
        return sum(num for name, num in tokens if not records[name].is_online)

    def assert_all_served_with_their_own_tokens(self) -> None:
        self.run_until(math.inf)
        pool = self.scheduler.kv_cache_manager.block_pool
        records = self.engine.records.values()
        assert {record.finish_reason for record in records} <= {"length", "stop"}
        for record in records:
            first = record.num_prompt_tokens
            wanted = [token_id(record, first + i) for i in range(len(record.output_token_ids))]
            assert record.output_token_ids == wanted
        assert not self.scheduler.requests and not self.scheduler.state.views
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        if isinstance(pool.free_block_queue, TieredFreeQueue):
            pool.free_block_queue.check()
        assert self.scheduler.state.num_policy_errors == 0


@pytest.mark.parametrize("started_as", ["bs", "echo"])
def test_a_policy_changes_under_way_and_everybody_finishes(started_as: str) -> None:
    rig = Rig(started_as)
    for number, policy in enumerate([*POLICIES, "bs", "echo", "bs"], start=1):
        rig.run_until(1.5 * number)
        assert rig.scheduler.running and len(rig.scheduler.waiting)
        answer = rig.order(policy=policy)
        assert (answer.error, answer.policy) == (None, policy)
        rig.engine.step()
        assert (rig.scheduler.waiting is rig.scheduler.state.queue) == (policy != "bs")
        rig.scheduler.state.queue.check()

    rig.assert_all_served_with_their_own_tokens()


def test_a_switch_keeps_all_that_waits() -> None:
    rig = Rig("echo")
    rig.run_until(2.0)
    for policy in ("bs", "echo", "bs"):
        before = sorted(request.request_id for request in rig.scheduler.waiting)
        rig.order(policy=policy)
        rig.scheduler.obey()
        assert sorted(request.request_id for request in rig.scheduler.waiting) == before
        assert len(before) > 5


def test_what_plans_said_is_told_no_more_under_vllms_own_order() -> None:
    rig = Rig("echo", online_s=0.0)
    rig.run_until(1.0)
    rig.scheduler.daemon_link.meter.num_left_out = 3
    rig.scheduler.state.estimates.forecast.sample(1_000.0, 5)
    before = rig.telemetry()
    rig.order(policy="bs")
    rig.run_until(2.0)
    after = rig.telemetry()

    assert before.slo.num_left_out == 3 and before.kv.forecast_blocks is not None
    assert (after.slo.num_left_out, after.kv.forecast_blocks) == (0, None)


@pytest.mark.parametrize("policy", ["bs", "bs+e", "echo"])
def test_a_lower_budget_holds_from_the_next_step_on(policy: str) -> None:
    rig = Rig(policy)
    rig.run_until(2.0)
    sizes: list[int] = []
    rig.watch(lambda output: sizes.append(output.total_num_scheduled_tokens))
    assert rig.order(token_budget=80).token_budget == 80
    rig.run_until(8.0)
    lowered, sizes[:] = max(sizes), []
    assert rig.order().token_budget == 512
    rig.run_until(14.0)

    assert 60 < lowered <= 80 < 100 < max(sizes) <= 512
    rig.assert_all_served_with_their_own_tokens()


def test_a_policy_that_this_engine_lacks_is_refused_and_changes_nothing() -> None:
    rig = Rig("echo")
    answer = rig.order(policy="ecko", token_budget=80)

    names = ", ".join(POLICIES)
    assert answer.error == f"policy must be one of {names}, not 'ecko' (did you mean 'echo'?)"
    assert (answer.policy, answer.token_budget) == ("echo", 512)
    assert rig.scheduler.daemon_link.control.take() is None


@pytest.mark.parametrize("budget", [-1, 63, 513])
def test_a_budget_out_of_reach_is_refused_and_changes_nothing(budget: int) -> None:
    rig = Rig("echo")
    answer = rig.order(token_budget=budget, policy="bs")

    assert answer.error == f"the token budget can be 64 to 512 here, not {budget}"
    assert (answer.policy, answer.token_budget) == ("echo", 512)
    assert rig.scheduler.daemon_link.control.take() is None


@pytest.mark.parametrize("policy", POLICIES)
def test_offline_off_holds_within_one_step_and_on_goes_on(policy: str) -> None:
    rig = Rig(policy)
    rig.run_until(3.0)
    tokens: list[int] = []
    rig.watch(lambda output: tokens.append(rig.offline_tokens(output)))
    rig.order(is_offline_on=False)
    rig.run_until(9.0)
    assert len(tokens) > 50 and not any(tokens)
    online = [record for record in rig.engine.records.values() if record.is_online]
    assert sum(record.finished_at_s is not None for record in online) > 10

    # As long as calls come, they leave rows no room.
    rig.order()
    rig.run_until(30.0)
    assert any(tokens)
    rig.assert_all_served_with_their_own_tokens()


def test_online_work_takes_the_blocks_of_rows_that_sit_out() -> None:
    rig = Rig("echo", online_s=0.0, num_blocks=200)
    rig.run_until(1.0)
    rig.order(is_offline_on=False)
    rig.run_until(1.5)
    held = rig.telemetry().kv.offline_blocks
    need_tokens = 16 * (200 - 10)
    rig.engine.add(Arrival("call", True, rig.engine.now_s, [7] * need_tokens, 4, None))
    rig.run_until(4.0)

    assert held > 50
    assert rig.engine.records["call"].finish_reason == "length"
    assert rig.telemetry().offline.num_preemptions > 0
    rig.order()
    rig.assert_all_served_with_their_own_tokens()


def test_a_lease_is_renewed_and_a_forgotten_job_counts_no_more() -> None:
    rig = Rig("echo", online_s=0.0, num_blocks=1_000)
    rig.run_until(2.0)
    rig.order(is_offline_on=False, renew=("job",))
    rig.run_until(25.0)
    wanted = [_num_wanted(rig)]
    for until_s in (45.0, 70.0):
        rig.order(is_offline_on=False, renew=("job",))
        rig.run_until(until_s)
        wanted.append(_num_wanted(rig))
    rig.run_until(110.0)
    run_out = _num_wanted(rig)
    rig.order(is_offline_on=False, renew=("job",))
    rig.run_until(111.0)
    wanted.append(_num_wanted(rig))
    rig.order(is_offline_on=False, forget=("job",))
    rig.run_until(112.0)

    assert min(wanted) > 0
    assert (run_out, _num_wanted(rig)) == (0, 0)


def _num_wanted(rig: Rig) -> int:
    """Blocks that planned rows will read, as the hints that count now have it."""
    assert rig.scheduler.state.kv is not None
    return len(rig.scheduler.state.kv._reuse.blocks)


def _num_cached_twice(rig: Rig) -> int:
    """Blocks whose content another block holds too."""
    pool = rig.scheduler.kv_cache_manager.block_pool
    num_hashed = sum(block.block_hash is not None for block in pool.blocks)
    return num_hashed - len(pool.cached_block_hash_to_block)


def test_every_block_is_told_once() -> None:
    rig = Rig("echo", num_blocks=300)
    pool = rig.scheduler.kv_cache_manager.block_pool
    for i in range(60):
        rig.run_until(0.5 * i)
        told = rig.telemetry()
        kv = told.kv
        tiers = (
            kv.empty_blocks, kv.unneeded_blocks, kv.finished_online_blocks,
            kv.wanted_blocks, kv.online_prefix_blocks,
        )  # fmt: skip
        assert all(num is not None and num >= 0 for num in tiers)
        assert sum(num or 0 for num in tiers) == kv.free_blocks == pool.get_num_free_blocks()
        assert kv.online_blocks + kv.offline_blocks + kv.free_blocks == kv.total_blocks == 299
        free = pool.free_block_queue.get_all_free_blocks()
        num_empty = sum(block.block_hash is None for block in free)
        more = _num_cached_twice(rig) + len(rig.scheduler.running)
        assert num_empty <= (kv.empty_blocks or 0) <= num_empty + more
        assert told.offline.num_running + told.online.num_running == len(rig.scheduler.running)
        assert told.offline.num_waiting + told.online.num_waiting == len(rig.scheduler.waiting)


def test_what_is_counted_is_what_the_clients_saw() -> None:
    rig = Rig("echo", num_blocks=300)
    rig.run_until(10.0)
    assert rig.telemetry().slo.slack_s is not None
    rig.assert_all_served_with_their_own_tokens()
    end = rig.telemetry()
    records = list(rig.engine.records.values())
    online = [record for record in records if record.is_online]
    offline = [record for record in records if not record.is_online]

    for told, own in ((end.online, online), (end.offline, offline)):
        assert told.num_admissions == len(own) > 0
        assert told.num_hit_tokens == sum(record.num_hit_tokens for record in own)
        assert told.num_prompt_tokens == sum(record.num_prompt_tokens for record in own)
        assert told.num_preemptions == sum(record.num_ended_preemptions for record in own)
        assert told.num_computed_tokens > 0
    assert end.slo.num_tokens == sum(len(record.output_token_ids) for record in online)
    num_first = end.shared.num_first_tokens + end.alone.num_first_tokens
    assert num_first == len(online)
    assert num_first + end.shared.num_gaps + end.alone.num_gaps == end.slo.num_tokens
    ttft_s = sum(record.token_times_s[0] - record.arrival_at_s for record in online)
    assert end.shared.ttft_s + end.alone.ttft_s == pytest.approx(ttft_s)
    gaps_s = sum(record.token_times_s[-1] - record.token_times_s[0] for record in online)
    assert end.shared.gaps_s + end.alone.gaps_s == pytest.approx(gaps_s)
    late = [record for record in online if record.token_times_s[0] > record.arrival_at_s + 1.0]
    assert end.slo.num_late_first_tokens == len(late)


def test_tokens_that_come_in_one_step_count_each() -> None:
    meter, request = Meter(), SimpleNamespace(num_output_tokens=1)
    answered = call(handle=request)
    meter.tokens(answered, NOW_S + 0.5, 1)
    answered.first_token_at_s, request.num_output_tokens = NOW_S + 0.5, 5
    meter.tokens(answered, NOW_S + 1.12, 4)

    slo, latency = meter.slo(math.inf, 0), meter.alone
    assert (slo.num_tokens, slo.num_late_tokens, slo.num_late_first_tokens) == (5, 2, 0)
    assert slo.slack_s == pytest.approx(-0.07)
    assert (latency.num_first_tokens, latency.num_gaps) == (1, 4)
    assert latency.gaps_s == pytest.approx(0.62)


def test_step_times_are_summed_beside_their_predictions() -> None:
    rig = Rig("echo")
    rig.run_until(20.0)
    step = rig.telemetry().step

    assert 500 < step.num_timed_steps <= step.num_steps
    assert step.predicted_s == pytest.approx(step.measured_s, rel=0.1)
    assert step.measured_s <= rig.engine.now_s


@pytest.mark.parametrize("message", [b"", b"\xc1", b"x" * 70_000, encode(Orders("guess", 1, 0))])
def test_malformed_orders_are_counted_and_hurt_nobody(message: bytes) -> None:
    rig = Rig("echo")
    rig.run_until(1.0)
    answer = read_message(rig.scheduler.daemon_link.control.receive(message), Answer)
    rig.run_until(2.0)

    assert answer.error is not None and "\n" not in answer.error
    assert rig.telemetry().num_malformed_orders == 1
    assert rig.telemetry().policy == "echo"
