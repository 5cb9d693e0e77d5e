"""Quick steps change nothing: every step, block, instant and estimate is as vLLM makes it."""

from __future__ import annotations

from typing import Any

import pytest
from engine_pairs import engine_of, online_source, ours
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.virtual.engine import Arrival, TrafficSource, VirtualEngine
from batchrun.simulator.virtual.quick_decode import QuickDecode, quick
from batchrun.simulator.virtual.setup import EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.row_feeds import RowSource
from benchmarks.scenarios import Order, draw_job

JOB = JobShape(20, (300, 3_000), (3, 8), (15, 60), (4, 32))
LONG_S = 90.0
SHAPES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"num_blocks": 420, "token_budget": 256, "max_num_seqs": 24},
    "one-step-in-flight": {"steps_in_flight": 1},
    "short-context": {"num_blocks": 900, "max_model_len": 900},
}


def sources(*, has_job: bool) -> list[TrafficSource]:
    online = online_source(LONG_S, 3, num_systems=3)
    job = RowSource(draw_job(JOB, 3, Order.SHUFFLED), 256)
    return [online, job] if has_job else [online]


def state(engine: VirtualEngine) -> tuple[Any, ...]:
    """All that the next step could depend on."""
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    requests = [
        (
            name,
            request.status,
            request.num_computed_tokens,
            request.num_in_flight_tokens,
            request.num_output_placeholders,
            list(request.all_token_ids)[-40:],
            request.block_hashes[-3:],
            request.is_prefill_chunk,
        )
        for name, request in scheduler.requests.items()
    ]
    held = [
        [block.block_id for group in scheduler.kv_cache_manager.get_blocks(name).blocks
         for block in group]
        for name in scheduler.requests
    ]  # fmt: skip
    free = [(block.block_id, block.block_hash) for block in _free(pool)]
    return (
        engine.now_s,
        scheduler.current_step,
        [request.request_id for request in scheduler.running],
        requests,
        held,
        free,
        sorted(scheduler.finished_req_ids),
        sorted(scheduler.prev_step_scheduled_req_ids),
    )


def _free(pool: Any) -> list[Any]:
    blocks: list[Any] = pool.free_block_queue.get_all_free_blocks()
    return blocks


@pytest.mark.parametrize(
    ("scheduler_cls", "shape", "has_job", "least_quick"),
    [
        (AsyncScheduler, "roomy", False, 500),
        (ColocatedScheduler, "roomy", False, 500),
        (ColocatedScheduler, "roomy", True, 20),
        (ColocatedScheduler, "tight", False, 1),
        (ColocatedScheduler, "short-context", False, 500),
        (ColocatedScheduler, "one-step-in-flight", False, 500),
    ],
)
def test_a_quick_engine_is_in_the_same_state_at_every_look(
    scheduler_cls: type[Scheduler], shape: str, *, has_job: bool, least_quick: int
) -> None:
    whole = engine_of(scheduler_cls, sources(has_job=has_job), **SHAPES[shape])
    short = engine_of(quick(scheduler_cls), sources(has_job=has_job), **SHAPES[shape])

    for looks in range(1, 81):
        for engine in (whole, short):
            engine.run_until(looks * 0.25)
        assert state(whole) == state(short), looks

    assert isinstance(short.scheduler, QuickDecode)
    assert short.scheduler.num_quick_steps >= least_quick
    assert {n: r.token_times_s for n, r in whole.records.items()} == {
        n: r.token_times_s for n, r in short.records.items()
    }


def test_a_quick_scheduler_learns_what_the_other_learns() -> None:
    whole = engine_of(ColocatedScheduler, sources(has_job=False))
    short = engine_of(quick(ColocatedScheduler), sources(has_job=False))
    for engine in (whole, short):
        engine.run_until(40.0)
    theirs, mine = ours(whole), ours(short)

    assert mine.state.estimates.model == theirs.state.estimates.model
    assert mine.state.estimates.error_share == theirs.state.estimates.error_share
    mine_told, theirs_told = mine.daemon_link.telemetry(40.0), theirs.daemon_link.telemetry(40.0)
    assert mine_told.online == theirs_told.online
    assert mine_told.slo == theirs_told.slo


def test_what_is_aborted_between_quick_steps_is_gone_in_both() -> None:
    whole = engine_of(ColocatedScheduler, sources(has_job=False))
    short = engine_of(quick(ColocatedScheduler), sources(has_job=False))
    for looks in range(1, 41):
        for engine in (whole, short):
            engine.run_until(looks * 0.4)
            running = engine.scheduler.running
            if running:
                engine.abort(running[looks % len(running)].request_id)
        assert state(whole) == state(short)


def test_a_prompt_of_which_one_token_is_left_is_no_decode() -> None:
    """Its token count is that of a decode whose output is there; it has none yet."""
    engines = [engine_of(cls, []) for cls in (AsyncScheduler, quick(AsyncScheduler))]
    for engine in engines:
        engine.add(Arrival("call", True, 0.0, [7] * (EngineShape().token_budget + 1), 5))
        engine.run_until(60.0)

    whole, short = (engine.records["call"].token_times_s for engine in engines)
    assert len(short) == 5 and short == whole
