"""`ColocatedScheduler` beside stock vLLM, and what it promises to both classes of requests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast

import pytest
from engine_pairs import engine_of, online_source, ours, record, until_step

from batchrun.hints import HINT_VERSION, RowHint, read_hint
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.policies import POLICIES, QUEUES, Policy
from batchrun.scheduling.view import EngineView, Plan, RequestView
from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.virtual.engine import Arrival, TrafficSource, VirtualEngine, begin
from batchrun.simulator.virtual.setup import NONCE
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.row_feeds import RowSource
from benchmarks.scenarios import Order, draw_job

SMALL_JOB_SHAPE = JobShape(8, (300, 1_500), (3, 6), (15, 60), (4, 32))


PLANNED = [name for name in POLICIES if name != "bs"]


class Auditor:
    """A policy whose every plan is checked against what its engine showed."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.num_plans = self.num_admitted = self.num_preempted = 0

    def plan(self, view: EngineView) -> Plan:
        plan = self._inner.plan(view)
        offline = {request.request_id for request in view.offline_running}
        running = [*view.online_running, *view.offline_running]
        waiting = {r.request_id for r in (*view.online_waiting, *view.offline_waiting)}
        admitted = [request.request_id for request in plan.admit]
        preempted = [request.request_id for request in plan.preempt]
        staying = [request for request in running if request.request_id not in preempted]

        assert len(set(admitted)) == len(admitted) and waiting.issuperset(admitted)
        assert len(set(preempted)) == len(preempted) and offline.issuperset(preempted)
        assert all(plan.caps[name] >= 1 for name in admitted)
        assert all(view.is_ready(request) for request in plan.admit)
        classes = [request.request_class.value for request in plan.admit]
        assert classes == sorted(classes, key=["online", "offline"].index)
        assert len(staying) + len(admitted) <= view.max_running
        tokens = sum(planned_tokens(plan, request) for request in (*staying, *plan.admit))
        assert tokens <= view.token_budget
        self.num_plans += 1
        self.num_admitted += len(admitted)
        self.num_preempted += len(preempted)
        return plan


def planned_tokens(plan: Plan, request: RequestView) -> int:
    """The tokens that a plan grants; without a cap vLLM gives a request all that it has left."""
    return plan.caps.get(request.request_id, request.work_left_tokens)


@pytest.mark.parametrize("policy", PLANNED)
def test_plans_keep_budget_and_slots_and_everybody_finishes(policy: str) -> None:
    job = draw_job(SMALL_JOB_SHAPE, 2, Order.SHUFFLED)
    sources: list[TrafficSource] = [online_source(25.0, 2), RowSource(job)]
    shape: dict[str, Any] = {"num_blocks": 260, "token_budget": 256, "max_num_seqs": 12}
    engine = engine_of(ColocatedScheduler, sources, policy=policy, **shape)
    scheduler = ours(engine)
    assert scheduler.step_policy is not None
    auditor = scheduler.step_policy = Auditor(scheduler.step_policy)
    engine.run_until(math.inf)

    assert scheduler.state.num_policy_errors == 0
    assert auditor.num_preempted > 0
    assert auditor.num_admitted >= len(engine.records) > len(job.rows) + 20
    assert_all_served(engine)


def assert_all_served(engine: VirtualEngine) -> None:
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert {record.finish_reason for record in engine.records.values()} <= {"length", "stop"}
    assert not engine.scheduler.requests
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


class FailingPolicy:
    """A policy that raises whenever `is_broken`, and in every third plan otherwise."""

    def __init__(self, inner: Policy, *, is_broken: bool) -> None:
        self._inner = inner
        self.is_broken = is_broken
        self.num_plans = self.num_failures = 0

    def plan(self, view: EngineView) -> Plan:
        self.num_plans += 1
        if self.is_broken or self.num_plans % 3 == 0:
            self.num_failures += 1
            raise RuntimeError("a bug in a policy")
        return self._inner.plan(view)


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_policy_that_raises_leaves_online_work_running(*, is_broken: bool) -> None:
    job = draw_job(SMALL_JOB_SHAPE, 4, Order.SHUFFLED)
    sources: list[TrafficSource] = [online_source(10.0, 4), RowSource(job)]
    engine = engine_of(ColocatedScheduler, sources, num_blocks=400)
    scheduler = ours(engine)
    assert scheduler.step_policy is not None
    failing = scheduler.step_policy = FailingPolicy(scheduler.step_policy, is_broken=is_broken)
    engine.run_until(40.0)

    online = [record for record in engine.records.values() if record.is_online]
    assert len(online) > 20
    assert {record.finish_reason for record in online} == {"stop"}
    assert scheduler.state.num_policy_errors == failing.num_failures > 100
    failing.is_broken = False
    engine.run_until(math.inf)
    assert_all_served(engine)


def hint(**changes: object) -> str:
    fields = {
        "v": HINT_VERSION, "nonce": NONCE, "epoch": 1, "job": "job", "row": 1,
        "class": "offline", "rank": 1, "nodes": [],
    }  # fmt: skip
    return json.dumps(fields | changes)


def arrival(name: str, prompt_tokens: int, output_tokens: int, hint_text: str | None) -> Arrival:
    first = sum(name.encode())
    prompt = [5 + (first + i) % 1_990 for i in range(prompt_tokens)]
    return Arrival(name, hint_text is None, 0.0, prompt, output_tokens, hint_text)


@pytest.mark.parametrize(
    ("text", "num_malformed"),
    [
        (hint(rank="soon"), 1),
        (hint(nodes=[[1, 2]]), 1),
        (hint(nodes=7), 1),
        (hint(nonce="guessed"), 0),
        (hint(v=99), 0),
        ("{", 0),
        ("[]", 0),
    ],
)
def test_a_malformed_hint_makes_an_online_request(text: str, num_malformed: int) -> None:
    engine = engine_of(ColocatedScheduler, num_blocks=100)
    engine.add(arrival("odd", 40, 3, text))
    engine.add(arrival("row", 40, 3, hint()))
    scheduler = ours(engine)

    assert [view.request_id for view in scheduler.state.queue.online] == ["odd"]
    assert [view.request_id for view in scheduler.state.queue.offline] == ["row"]
    assert scheduler.state.num_malformed_hints == num_malformed
    engine.run_until(math.inf)
    assert_all_served(engine)


@pytest.mark.parametrize("policy", PLANNED)
@pytest.mark.parametrize("shape", [{"num_blocks": 80}, {"num_blocks": 2_000, "max_num_seqs": 4}])
def test_offline_work_gives_way_in_the_step_after_an_arrival(
    policy: str, shape: dict[str, Any]
) -> None:
    settings = {"reserve": 0.0}
    engine = engine_of(ColocatedScheduler, policy=policy, settings=settings, **shape)
    for row in range(6):
        engine.add(arrival(f"row-{row}", 100 + row, 150, hint(row=row, rank=row)))
    while len(engine.scheduler.running) < 4 or engine.now_s < 0.5:
        assert engine.step()
    engine.add(arrival("call", 900, 5, None))
    steps = record(engine)
    until_step(engine, steps, 1)

    assert dict(steps[0][0])["call"] > 0
    assert steps[0][5], "nobody had to give way"
    engine.run_until(math.inf)
    assert_all_served(engine)


@pytest.mark.parametrize("policy", PLANNED)
def test_rows_of_one_document_do_not_keep_a_call_out(policy: str) -> None:
    """No single row's preemption frees the document's blocks; all of them together do."""
    settings = {"reserve": 0.0}
    engine = engine_of(ColocatedScheduler, policy=policy, settings=settings, num_blocks=100)
    document = list(range(5, 965))
    for row in range(60):
        text = hint(row=row, rank=row, nodes=[[1, 59 - row, min(row + 1, 59)]])
        prompt = [*document, *[1_000 + row] * 20]
        engine.add(Arrival(f"row-{row}", False, 0.0, prompt, 30, text))
    while engine.now_s < 0.6:
        assert engine.step()
    engine.add(arrival("call", 990, 5, None))
    steps = record(engine)
    until_step(engine, steps, 3)

    assert any("call" in dict(step[0]) for step in steps)
    engine.run_until(math.inf)
    assert_all_served(engine)


def test_no_block_is_wanted_when_the_rows_that_share_it_have_ended() -> None:
    """Not even one computed twice, which vLLM keeps two blocks for."""
    engine = engine_of(ColocatedScheduler, num_blocks=100)
    scheduler = ours(engine)
    kv, manager = scheduler.state.kv, scheduler.kv_cache_manager
    assert kv is not None
    prompt = list(range(5, 165))
    rows, wanted = [], []
    for row in range(2):
        text = hint(row=row, rank=row, nodes=[[1, 1 - row, 1]])
        request = begin(Arrival(f"row-{row}", False, 0.0, prompt, 9, text), 16).request
        assert request is not None
        parsed = read_hint(text, NONCE)
        assert isinstance(parsed, RowHint)
        kv.announce(request, parsed, 0.0)
        assert manager.allocate_slots(request, len(prompt)) is not None
        request.num_computed_tokens = len(prompt)
        rows.append(request)
    for request in rows:
        kv.finished(request)
        manager.free(request)
        wanted.append(kv.num_wanted_blocks(rank=1))

    assert wanted == [10, 0]


@pytest.mark.parametrize("policy", PLANNED)
def test_a_candidate_larger_than_free_less_reserve_runs_alone(policy: str) -> None:
    engine = engine_of(ColocatedScheduler, policy=policy, settings={"reserve": 0.9}, num_blocks=100)
    engine.add(arrival("row", 600, 20, hint()))
    steps = record(engine)
    until_step(engine, steps, 1)

    assert dict(steps[0][0]) == {"row": 600}
    engine.run_until(math.inf)
    assert_all_served(engine)


class LongestFirst(ArrivalOrder):
    """The longest call first."""

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """By falling length."""
        return [*begun, *sorted(view.online_waiting, key=attrgetter("num_tokens"), reverse=True)]


@pytest.mark.parametrize("order", ["arrival", "longest-first"])
def test_an_order_of_calls_rules_without_offline_work_too(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = cast(dict[str, object], QUEUES)
    monkeypatch.setitem(queues, "longest-first", lambda options: LongestFirst())
    engine = engine_of(ColocatedScheduler, settings={"online_queue": order}, max_num_seqs=1)
    for name, num_tokens in (("a", 20), ("b", 10), ("c", 30)):
        engine.add(Arrival(name, True, 0.0, [7] * num_tokens, 3))
    engine.run_until(math.inf)

    served = sorted(engine.records, key=lambda name: engine.records[name].finished_at_s or 0.0)
    assert served == (["a", "b", "c"] if order == "arrival" else ["c", "a", "b"])
    assert ours(engine).state.num_policy_errors == 0
