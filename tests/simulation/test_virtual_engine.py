"""The virtual engine: exact times, repeatable runs, balanced accounts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.virtual.engine import (
    Arrival,
    RequestRecord,
    StepTotals,
    Timing,
    TrafficSource,
    VirtualEngine,
    begin,
    token_id,
)
from batchrun.simulator.virtual.setup import (
    A100Law,
    EngineShape,
    StepItem,
    build_scheduler,
    stock_scheduler,
)
from benchmarks.laws import NoisyLaw
from benchmarks.row_feeds import RowSource, callers
from benchmarks.scenarios import Job, Order, Scenario, a100_8b, draw_calls, draw_job

SMALL_JOB = JobShape(12, (1000, 3000), (3, 6), (15, 60), (4, 32))
SMALL = Scenario("small", 15.0, a100_8b().online, SMALL_JOB)
EXACT = {1: Timing(1, planning_s=0.0), 2: Timing(2, planning_s=0.0)}


@dataclass(frozen=True, slots=True)
class EvenLaw:
    """Every step takes the same time."""

    seconds: float

    @property
    def expected(self) -> EvenLaw:
        return self

    def step_s(self, items: Sequence[StepItem]) -> float:
        return self.seconds


def arrival(name: str, at_s: float, prompt_tokens: int, output_tokens: int) -> Arrival:
    return Arrival(name, True, at_s, [7] * prompt_tokens, output_tokens)


class Arrivals:
    """A source of given requests."""

    def __init__(self, *arrivals: Arrival) -> None:
        self._left = list(arrivals)

    @property
    def next_due_s(self) -> float:
        return self._left[0].arrival_at_s if self._left else math.inf

    def take_due(self, now_s: float) -> list[Arrival]:
        due = [item for item in self._left if item.arrival_at_s <= now_s]
        self._left = self._left[len(due) :]
        return due

    def on_finished(self, request_id: str) -> None:
        """Nothing waits for an end."""


def engine_for(
    depth: int, law: A100Law | EvenLaw, *arrivals: Arrival, shape: EngineShape | None = None
) -> VirtualEngine:
    shape = shape or EngineShape(num_blocks=200)
    scheduler_cls = stock_scheduler(depth)
    return VirtualEngine(scheduler_cls, shape, law, [Arrivals(*arrivals)], EXACT[depth])


def small_traffic(job: Job) -> list[TrafficSource]:
    return [callers(draw_calls(SMALL, 3), 3), RowSource(job, 256)]


def small_engine(depth: int, num_blocks: int, job: Job) -> VirtualEngine:
    shape = EngineShape(num_blocks=num_blocks, token_budget=512)
    return VirtualEngine(stock_scheduler(depth), shape, A100Law(), small_traffic(job), EXACT[depth])


@pytest.mark.parametrize("depth", [1, 2])
def test_one_request_takes_the_sum_of_its_steps(depth: int) -> None:
    law = A100Law()
    engine = engine_for(depth, law, arrival("a", 2.0, 100, 3))
    engine.run_until(math.inf)

    first_s = 2.0 + law.step_s([(100, 100, False)])
    second_s = first_s + law.step_s([(1, 101, True)])
    third_s = second_s + law.step_s([(1, 102, True)])
    expected_s = [first_s, second_s, third_s]
    assert engine.records["a"].token_times_s == pytest.approx(expected_s, abs=1e-12)


@pytest.mark.parametrize(("depth", "first_token_s"), [(1, 0.3), (2, 0.4)])
def test_an_arrival_during_a_step_waits_for_the_steps_in_flight(
    depth: int, first_token_s: float
) -> None:
    running, late = arrival("running", 0.0, 20, 50), arrival("late", 0.15, 20, 1)
    engine = engine_for(depth, EvenLaw(0.1), running, late)
    engine.run_until(math.inf)

    assert engine.records["late"].token_times_s == pytest.approx([first_token_s])
    assert engine.records["running"].token_times_s[0] == pytest.approx(0.1)


def test_planning_is_hidden_behind_a_step_in_flight_and_shows_without_one() -> None:
    timings = {depth: Timing(depth, planning_s=0.01) for depth in (1, 2)}
    ends_s = []
    for depth, timing in timings.items():
        source = Arrivals(arrival("a", 0.0, 20, 10))
        shape = EngineShape(num_blocks=50)
        engine = VirtualEngine(stock_scheduler(depth), shape, EvenLaw(0.1), [source], timing)
        engine.run_until(math.inf)
        ends_s.append(engine.records["a"].token_times_s[-1])

    assert ends_s == pytest.approx([10 * 0.11, 0.01 + 10 * 0.1])


def test_one_step_in_flight_is_the_plain_loop_around_vllm() -> None:
    job = draw_job(SMALL_JOB, 3, Order.SHUFFLED)
    arrivals = RowSource(job).take_due(0.0)
    engine = small_engine(1, 700, Job(job.documents, []))
    for row in arrivals:
        engine.add(row)
    engine.run_until(10.0)
    plain = plain_loop(arrivals, 700, 10.0)

    served = {r.request_id: r.token_times_s for r in engine.records.values() if r.token_times_s}
    assert served == plain
    assert len(served) > 20


def plain_loop(rows: Sequence[Arrival], num_blocks: int, end_s: float) -> dict[str, list[float]]:
    """When each output token appears: schedule, wait, update, with nothing of our engine."""
    shape = EngineShape(num_blocks=num_blocks, token_budget=512)
    scheduler = build_scheduler(Scheduler, shape, is_async=False)
    calls = callers(draw_calls(SMALL, 3), 3)
    prompt_tokens: dict[str, int] = {}
    records: dict[str, RequestRecord] = {}
    times: dict[str, list[float]] = {}
    now_s = 0.0
    while now_s < end_s:
        for item in [*(rows if not times else ()), *calls.take_due(now_s)]:
            prompt_tokens[item.request_id] = len(item.prompt_token_ids)
            times[item.request_id] = []
            record = records[item.request_id] = begin(item, 16)
            assert record.request is not None
            scheduler.add_request(record.request)
        output = scheduler.schedule()
        items, sampled, ids = [], [], list(output.num_scheduled_tokens)
        for name, new in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            items.append((new, request.num_computed_tokens, False))
            is_done = request.num_computed_tokens >= request.num_tokens
            computed = request.num_computed_tokens
            sampled.append([token_id(records[name], computed)] if is_done else [])
        now_s += A100Law().step_s(items)
        for name, tokens in zip(ids, sampled, strict=True):
            times[name] += [now_s] * len(tokens)
        index = {name: i for i, name in enumerate(ids)}
        scheduler.update_from_output(output, ModelRunnerOutput(ids, index, sampled))
    return {name: seen for name, seen in times.items() if seen}


def test_a_step_without_time_has_no_online_share() -> None:
    totals, decode = StepTotals(), (1, 100, True)

    assert totals.charge(EvenLaw(0.0), [decode], [decode]) == 0.0
    assert totals.online_share_sum == 0.0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_repeats_to_the_last_token(depth: int) -> None:
    def figures() -> tuple[StepTotals, list[tuple[str, list[int], list[float]]]]:
        job = draw_job(SMALL_JOB, 3, Order.SHUFFLED)
        law = NoisyLaw(A100Law(), random.Random(9))
        shape = EngineShape(num_blocks=500, token_budget=512)
        engine = VirtualEngine(stock_scheduler(depth), shape, law, small_traffic(job))
        engine.run_until(SMALL.duration_s)
        lives = engine.records.values()
        return engine.totals, [
            (r.request_id, r.output_token_ids, r.token_times_s) for r in lives if r.finished_at_s
        ]

    totals, tokens = figures()
    assert (totals, tokens) == figures()
    assert len({name.split("-")[0] for name, _, _ in tokens}) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_ends_with_its_own_tokens_and_no_block_is_lost(depth: int) -> None:
    job = draw_job(SMALL_JOB, 5, Order.SHUFFLED)
    roomy, tight = small_engine(depth, 8000, job), small_engine(depth, 230, job)
    for engine in (roomy, tight):
        engine.run_until(math.inf)
        assert_at_rest(engine)

    assert sum(r.num_preemptions for r in tight.records.values()) > 10
    assert len(tight.records) == len(job.rows) + len(draw_calls(SMALL, 3))
    assert tokens_of(tight) == tokens_of(roomy)


def test_aborted_requests_give_everything_back() -> None:
    engine = small_engine(2, 500, draw_job(SMALL_JOB, 6, Order.SHUFFLED))
    for turn in range(120):
        engine.step()
        live = [r.request_id for r in engine.records.values() if r.finished_at_s is None]
        if turn % 7 == 0:
            engine.abort(live[turn % len(live)])
    engine.run_until(math.inf)

    assert_at_rest(engine)
    reasons = [r.finish_reason for r in engine.records.values()]
    assert reasons.count("abort") == 18
    assert set(reasons) == {"abort", "length", "stop"}


def assert_at_rest(engine: VirtualEngine) -> None:
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert all(r.finished_at_s is not None for r in engine.records.values())
    assert not engine.scheduler.requests
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)


def tokens_of(engine: VirtualEngine) -> dict[str, list[int]]:
    return {name: record.output_token_ids for name, record in engine.records.items()}


def test_hits_are_counted_at_the_first_admission() -> None:
    rows = [Arrival(f"row-{i}", False, 0.0, [9] * 160 + [i] * 16, 1, hint="{}") for i in range(3)]
    engine = engine_for(1, EvenLaw(0.1), shape=EngineShape(num_blocks=200, max_num_seqs=1))
    for row in rows:
        engine.add(row)
    engine.run_until(math.inf)

    assert [hits(engine.records[row.request_id]) for row in rows] == [0, 160, 160]


def hits(record: RequestRecord) -> int:
    return record.num_hit_tokens


def test_offline_work_costs_online_calls_their_share_of_the_steps() -> None:
    job = draw_job(SMALL_JOB, 3, Order.SHUFFLED)
    alone = VirtualEngine(stock_scheduler(2), EngineShape(), A100Law(), small_traffic(job)[:1])
    both = VirtualEngine(stock_scheduler(2), EngineShape(), A100Law(), small_traffic(job))
    for engine in (alone, both):
        engine.run_until(5.0)

    assert alone.totals.online_share_sum == alone.totals.num_steps > 0
    assert 0 < both.totals.online_share_sum < 0.9 * both.totals.num_steps
