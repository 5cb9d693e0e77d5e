"""The hooks that the plug-in uses of vLLM, on whichever vLLM is imported.

`tests/integration/test_vllm_versions.py` runs this folder's tests on the sources of other versions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import vllm
from scheduler_rig import answer, build, make_request, ours, run, step
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

from batchrun.cache.free_queue import TieredFreeQueue
from batchrun.scheduling.view import EngineView, Plan
from batchrun.vllm_plugin.compat import awaits_stale_output, cached_prefix, missing_hook
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

ABORTED = RequestStatus.FINISHED_ABORTED


class Capped:
    """A policy that admits everybody and caps what it was told to."""

    def __init__(self, **caps: int) -> None:
        self.caps = caps

    def plan(self, view: EngineView) -> Plan:
        return Plan(admit=(*view.online_waiting, *view.offline_waiting), caps=dict(self.caps))


def test_the_version_is_the_one_that_is_meant() -> None:
    meant = os.environ.get("BATCHRUN_TEST_VLLM")
    if meant is not None:
        assert meant == vllm.__version__
        assert Path(vllm.__file__).parts[-3] == meant, "another vLLM is imported"


def test_every_hook_is_there() -> None:
    assert missing_hook(build(AsyncScheduler), make_request("any")) is None


def test_all_counts_and_aborts_go_through_the_waiting_queue() -> None:
    scheduler = build()
    scheduler.add_request(make_request("call"))
    scheduler.add_request(make_request("row", row=1))
    assert scheduler.get_request_counts() == (0, 2)
    assert scheduler.get_num_unfinished_requests() == 2
    scheduler.finish_requests("row", ABORTED)
    assert scheduler.get_request_counts() == (0, 1)
    assert list(scheduler.waiting) == [scheduler.requests["call"]]
    run(scheduler)
    assert not scheduler.has_unfinished_requests()


def test_a_request_that_is_not_exposed_is_not_admitted_and_not_lost() -> None:
    scheduler = ours(build())

    class Nobody:
        def plan(self, view: EngineView) -> Plan:
            return Plan()

    policy, scheduler.step_policy = scheduler.step_policy, Nobody()
    scheduler.add_request(make_request("row", row=1))
    assert step(scheduler) == step(scheduler) == {}
    assert scheduler.has_requests()
    scheduler.step_policy = policy
    assert step(scheduler) == {"row": 40}


def test_caps_bind_waiting_and_running_requests_and_a_cap_of_0_skips_only_its_own() -> None:
    scheduler = ours(build())
    scheduler.step_policy = Capped(a=20)
    scheduler.add_request(make_request("a", row=1))
    assert step(scheduler) == {"a": 20}
    scheduler.add_request(make_request("b", row=2))
    scheduler.step_policy = Capped(a=0, b=25)
    assert step(scheduler) == {"b": 25}
    scheduler.step_policy = Capped(a=5)
    assert step(scheduler) == {"a": 5, "b": 15}
    scheduler.step_policy = Capped()
    assert step(scheduler) == {"a": 15, "b": 1}


def test_the_cap_hook_runs_before_the_encoder_is_scheduled() -> None:
    asked: list[int] = []

    class Watched(ColocatedScheduler):
        def _try_schedule_encoder_inputs(
            self,
            request: Request,
            num_computed_tokens: int,
            num_new_tokens: int,
            encoder_compute_budget: int,
            shift_computed_tokens: int = 0,
        ) -> Any:
            asked.append(num_new_tokens)
            return [], num_new_tokens, encoder_compute_budget, [], []

    scheduler = ours(build(Watched))
    scheduler.step_policy = Capped(image=10)
    place = PlaceholderRange(offset=4, length=30)
    feature = MultiModalFeatureSpec(None, "image", "item", place, "hash")
    scheduler.add_request(make_request("image", row=1, features=[feature]))
    step(scheduler)
    step(scheduler)
    assert asked == [10, 10], "the encoder saw a chunk before it was capped"


def test_a_preempted_request_waits_for_its_output_in_flight_and_comes_back() -> None:
    scheduler = build()
    request = make_request("row", row=1, max_tokens=6)
    scheduler.add_request(request)
    step(scheduler)
    in_flight = [scheduler.schedule(), scheduler.schedule()]
    assert request.num_output_placeholders == 2
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    assert request.request_id not in scheduler.prev_step_scheduled_req_ids
    assert list(scheduler.waiting) == [request]
    assert awaits_stale_output(request)
    assert scheduler.schedule().total_num_scheduled_tokens == 0, "admitted with output in flight"
    delivered = [len(answer(scheduler, output)[0].new_token_ids) for output in in_flight]
    assert delivered == [1, 1]
    assert not awaits_stale_output(request)
    run(scheduler)
    assert request.num_output_tokens == 6


def test_a_preempted_request_that_ends_leaves_the_waiting_queue() -> None:
    scheduler = build()
    request = make_request("row", row=1, max_tokens=2)
    scheduler.add_request(request)
    step(scheduler)
    last = scheduler.schedule()
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    assert answer(scheduler, last)[0].finish_reason is not None
    assert len(scheduler.waiting) == 0 and not scheduler.requests
    assert not scheduler.deferred_waiting


def test_every_end_goes_through_free_request() -> None:
    ended: list[str] = []

    class Watched(ColocatedScheduler):
        def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            ended.append(request.request_id)
            return super()._free_request(request, *args, **kwargs)

    scheduler = ours(build(Watched))
    for name in ("finished", "waiting", "running"):
        scheduler.add_request(make_request(name))
    scheduler.finish_requests("waiting", ABORTED)
    step(scheduler)
    scheduler.finish_requests("running", ABORTED)
    run(scheduler)
    assert ended == ["waiting", "running", "finished"]
    assert not scheduler.state.views


def test_the_hit_that_is_looked_up_is_the_hit_that_is_given() -> None:
    scheduler = build()
    scheduler.add_request(make_request("first", 100))
    run(scheduler)
    again = make_request("first", 100)
    assert cached_prefix(scheduler.kv_cache_manager, again)[0] == 96
    scheduler.add_request(again)
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 96


def test_blocks_are_taken_from_and_given_back_to_the_tiers() -> None:
    scheduler = build()
    pool = scheduler.kv_cache_manager.block_pool
    queue: Any = pool.free_block_queue
    assert isinstance(queue, TieredFreeQueue)
    for row in range(12):
        scheduler.add_request(make_request(f"row-{row}", 200 + row, row=row))
    run(scheduler)
    queue.check()
    assert queue.num_free_blocks == pool.get_num_free_blocks() == 99
    assert scheduler.reset_prefix_cache()
    rebuilt: Any = pool.free_block_queue
    assert isinstance(rebuilt, TieredFreeQueue) and rebuilt is not queue
    assert rebuilt.num_free_blocks == 99
