"""Plans for random engines: within every budget, never against online work, never idle."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_builders import Engine, blocks_for, engines

from batchrun.estimator.step_load import StepLoad
from batchrun.scheduling.policies import POLICIES, make_policy
from batchrun.scheduling.slack import step_limits
from batchrun.scheduling.view import Plan, RequestView
from batchrun.types import RequestClass

policies = st.sampled_from([name for name in POLICIES if name != "bs"])
many = settings(max_examples=300, deadline=None)


def plan_of(name: str, engine: Engine) -> Plan:
    policy = make_policy(name)
    assert policy is not None
    return policy.plan(engine.view)


def in_the_step(engine: Engine, plan: Plan) -> list[RequestView]:
    both = (*engine.staying(plan), *plan.admit)
    return [request for request in both if engine.granted_tokens(plan, request)]


def is_offline(request: RequestView) -> bool:
    return request.request_class is RequestClass.OFFLINE


@given(engines(), policies)
@many
def test_a_plan_names_whom_it_may_and_keeps_its_budgets(engine: Engine, name: str) -> None:
    view, plan = engine.view, plan_of(name, engine)

    check_names(engine, plan)
    check_caps(engine, plan)
    tokens = sum(engine.granted_tokens(plan, request) for request in in_the_step(engine, plan))
    assert tokens <= view.token_budget
    assert len(engine.staying(plan)) + len(plan.admit) <= view.max_running
    loras = {r.lora_id for r in (*engine.staying(plan), *plan.admit) if r.lora_id}
    assert len(loras) <= view.max_loras
    assert plan == plan_of(name, engine)


def check_names(engine: Engine, plan: Plan) -> None:
    """Waiting and ready ones are admitted, online first; running offline ones are preempted."""
    view = engine.view
    waiting = [*view.online_waiting, *view.offline_waiting]
    admitted = [request.request_id for request in plan.admit]
    preempted = [request.request_id for request in plan.preempt]
    assert len(set(admitted)) == len(admitted)
    assert all(request in waiting and view.is_ready(request) for request in plan.admit)
    assert list(map(is_offline, plan.admit)) == sorted(map(is_offline, plan.admit))
    assert len(set(preempted)) == len(preempted)
    assert all(request in view.offline_running for request in plan.preempt)
    known = {request.request_id for request in (*engine.running, *plan.admit)}
    assert known.issuperset(plan.caps)


def check_caps(engine: Engine, plan: Plan) -> None:
    """At most what is left; whole decodes, and online ones always; no empty admission."""
    view = engine.view
    for request in engine.staying(plan):
        cap = plan.caps.get(request.request_id)
        assert cap is None or 0 <= cap <= request.work_left_tokens
        if not is_offline(request) and request.is_decode and request.work_left_tokens:
            assert cap is None or cap == 1
    for request in plan.admit:
        left = request.num_tokens - view.look_up(request).num_tokens
        assert 1 <= plan.caps[request.request_id] <= left


@given(engines(), policies)
@many
def test_a_plan_with_admissions_takes_no_more_blocks_than_there_are(
    engine: Engine, name: str
) -> None:
    plan = plan_of(name, engine)
    freed = sum(engine.private_blocks[request.request_id] for request in plan.preempt)
    taken = engine.new_blocks(plan) + engine.revived_blocks(plan)

    if plan.admit:
        assert taken <= engine.view.free_blocks + freed


@given(engines(), policies)
@many
def test_offline_work_never_makes_a_step_longer_than_online_promises_allow(
    engine: Engine, name: str
) -> None:
    view, plan = engine.view, plan_of(name, engine)
    requests = in_the_step(engine, plan)
    load = StepLoad()
    for request in requests:
        tokens, is_new = engine.granted_tokens(plan, request), request in plan.admit
        done = view.look_up(request).num_tokens if is_new else request.num_computed_tokens
        load.add(tokens, done + tokens, is_decode=request.is_decode and not is_new)
    is_online = bool(view.online_running or view.online_waiting)
    limit_s = step_limits(view, was_online_lately=is_online).offline_s

    if len(requests) > 1 and any(map(is_offline, requests)):
        assert plan.predicted_s == pytest.approx(view.model.predict_s(load))
        assert plan.predicted_s <= limit_s * (1 + 1e-9)


@given(engines(), policies)
@many
def test_offline_work_gives_way_where_that_helps_and_only_there(engine: Engine, name: str) -> None:
    view, plan = engine.view, plan_of(name, engine)
    left_out = [r for r in view.online_waiting if r not in plan.admit and not lacks_lora(engine, r)]
    held = sum(blocks_for(request.num_computed_tokens) for request in view.offline_running)

    if left_out:
        assert not any(map(is_offline, plan.admit))
    if plan.preempt and not plan.admit:
        waiting = view.online_waiting
        needs = [view.free_blocks_for(r.num_tokens + 1, view.look_up(r)) for r in waiting]
        least = min(needs, default=math.inf)
        growth = sum(
            blocks_for(r.num_computed_tokens + engine.granted_tokens(plan, r))
            - blocks_for(r.num_computed_tokens)
            for r in view.online_running
        )
        needs_block = [
            blocks_for(row.num_computed_tokens + 1) > blocks_for(row.num_computed_tokens)
            for row in view.offline_running
        ]
        are_stuck = growth + view.watermark_blocks >= view.free_blocks and all(needs_block)
        assert growth > view.free_blocks or least <= view.free_blocks + held or are_stuck


def lacks_lora(engine: Engine, request: RequestView) -> bool:
    """Whether vLLM may have no room for the adapter of a waiting request."""
    others = [r.lora_id for r in (*engine.running, *engine.view.online_waiting) if r.lora_id]
    return len({request.lora_id, *others}) > engine.view.max_loras and request.lora_id > 0


@given(engines(), policies)
@many
def test_something_moves_whenever_something_can(engine: Engine, name: str) -> None:
    view, plan = engine.view, plan_of(name, engine)
    can_go_on = any(request.work_left_tokens for request in engine.running)
    waiting = [*view.online_waiting, *filter(view.is_ready, view.offline_waiting)]
    can_begin = not engine.running and any(
        blocks_for(request.num_tokens + 1) <= view.free_blocks for request in waiting
    )

    if can_go_on or can_begin:
        assert in_the_step(engine, plan) or plan.preempt


@given(engines(is_offline_on=False), policies)
@many
def test_offline_work_that_is_off_gets_nothing(engine: Engine, name: str) -> None:
    assert not any(map(is_offline, in_the_step(engine, plan_of(name, engine))))
