"""What of vLLM works beside a plan, seen on the scheduler class itself."""

from __future__ import annotations

from types import MappingProxyType

from scheduler_rig import answer, build, make_request, ours, run, step
from vllm.config import LoRAConfig, VllmConfig
from vllm.v1.request import RequestStatus


def test_rows_in_the_pool_are_deferred_and_leave_the_waiting_gauge_to_online_calls() -> None:
    scheduler = build(log_stats=True, num_blocks=40)
    for row in range(10):
        scheduler.add_request(make_request(f"row-{row}", 200 + row, row=row, max_tokens=20))
    scheduler.add_request(make_request("call"))

    def gauges() -> tuple[int, int, int]:
        stats = scheduler.make_stats()
        assert stats is not None
        running, waiting = stats.num_running_reqs, stats.num_waiting_reqs
        return running, waiting, stats.num_skipped_waiting_reqs

    assert gauges() == (0, 1, 10)
    # The first step is the call's alone, so that its first token comes soon.
    step(scheduler)
    step(scheduler)
    running, waiting, deferred = gauges()
    assert waiting == 0 and running + deferred == 11 and deferred > 0
    victim = next(request for request in scheduler.running if request.request_id != "call")
    scheduler.running.remove(victim)
    scheduler._preempt_request(victim, 0.0)
    assert gauges() == (running - 1, 0, deferred + 1)
    run(scheduler)
    assert gauges() == (0, 0, 0)


def one_lora(config: VllmConfig) -> None:
    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1, max_cpu_loras=4)


def test_no_step_and_no_moment_has_more_adapters_than_vllm_allows() -> None:
    scheduler = build(change=one_lora)
    requests = MappingProxyType(scheduler.requests)
    for row in range(6):
        scheduler.add_request(make_request(f"row-{row}", row=row, lora=1 + row % 3, max_tokens=5))
    scheduler.add_request(make_request("base"))
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        adapters = {requests[name].lora_request for name in output.num_scheduled_tokens} - {None}
        assert len(adapters) <= 1
        held = {request.lora_request for request in scheduler.running} - {None}
        assert len(held) <= 1, "0.32 fails when one of them sits out"
        answer(scheduler, output)


def test_a_streaming_session_is_online_and_goes_on_after_its_first_turn() -> None:
    scheduler = ours(build())
    session = make_request("session", row=3, max_tokens=2, resumable=True)
    scheduler.add_request(session)
    scheduler.add_request(make_request("row", row=1, max_tokens=30))
    assert [view.request_id for view in scheduler.state.queue.online] == ["session"]
    for _ in range(4):
        step(scheduler)
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    turn = make_request("session", 10, max_tokens=2, resumable=True)
    turn.arrival_time = 77.0
    scheduler.add_request(turn)
    (view,) = (view for view in scheduler.state.views.values() if view.request_id == "session")
    assert view.arrival_at_s == 77.0 - scheduler.state.wall_offset_s
    assert view.num_prompt_tokens == session.num_prompt_tokens == 51
    assert view.first_token_at_s is None
    assert step(scheduler)["session"] == 10
    assert session.num_output_tokens == 1
    step(scheduler)
    scheduler.add_request(make_request("session", max_tokens=2))
    run(scheduler)
    assert not scheduler.requests and not scheduler.state.views


def test_the_last_token_of_a_turn_is_not_the_first_of_one_that_waits_already() -> None:
    scheduler = ours(build())
    session = make_request("session", max_tokens=2, resumable=True)
    scheduler.add_request(session)
    scheduler.add_request(make_request("row", row=1, max_tokens=30))
    scheduler.add_request(make_request("session", 300, max_tokens=2, resumable=True))
    view = scheduler.state.views["session"]
    while view.num_prompt_tokens < 300:
        step(scheduler)
    assert view.first_token_at_s is None
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        step(scheduler)
    assert view.first_token_at_s is not None


def test_an_answer_that_ends_on_a_stop_string_teaches_as_much_as_another() -> None:
    """The front end finds the string, and aborts: the scheduler sees no end."""
    scheduler = ours(build())
    scheduler.add_request(make_request("row", row=1, max_tokens=30))
    before, taught = scheduler.state.calls.keep("a model"), {}
    for name, stop in (("given up", None), ("at its string", ["\n"])):
        scheduler.add_request(make_request(name, max_tokens=30, stop=stop))
        for _ in range(5):
            step(scheduler)
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        is_counted = scheduler.state.calls.keep("a model") != before
        taught[name] = is_counted, len(scheduler.daemon_link.meter.costs.tpot)
    assert taught == {"given up": (False, 0), "at its string": (True, 1)}


def test_a_session_whose_turn_ends_while_it_is_preempted_has_a_next_turn() -> None:
    scheduler = ours(build())
    session = make_request("session", max_tokens=1, resumable=True)
    scheduler.add_request(session)
    scheduler.add_request(make_request("row", row=1, max_tokens=30))
    output = scheduler.schedule()
    assert "session" in output.num_scheduled_tokens
    scheduler.running.remove(session)
    scheduler._preempt_request(session, 0.0)
    answer(scheduler, output)
    scheduler.state.queue.check()
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    scheduler.add_request(make_request("session", 10, max_tokens=1, resumable=True))
    steps = [step(scheduler) for _ in range(3)]
    assert any("session" in tokens for tokens in steps)
    scheduler.state.queue.check()


def test_a_turn_alone_counts_from_its_own_begin() -> None:
    scheduler = ours(build())
    scheduler.state.clock = lambda: now_s
    scheduler.state.wall = None
    now_s = 0.0
    session = make_request("session", max_tokens=2, resumable=True)
    scheduler.add_request(session)
    scheduler.add_request(make_request("row", row=1, max_tokens=30))
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        now_s += 0.01
        step(scheduler)
    now_s = 600.0
    assert (scheduler.daemon_link.telemetry(now_s).slo.slack_s or 0.0) >= 0.0
    turn = make_request("session", 10, max_tokens=2, resumable=True)
    turn.arrival_time = now_s
    scheduler.add_request(turn)
    while len(scheduler.daemon_link.meter.costs.ttft) < 2:
        now_s += 0.01
        step(scheduler)
    assert scheduler.daemon_link.meter.costs.ttft[-1].alone_s < 1.0


def test_the_least_important_call_gives_way_first() -> None:
    scheduler = ours(build())
    scheduler.add_request(make_request("row", row=1, max_tokens=30))
    for name, priority in (("batch", 5), ("important", 0), ("usual", 1)):
        scheduler.add_request(make_request(name, max_tokens=30, priority=priority))
        step(scheduler)
    step(scheduler)
    order = [each.request_id for each in scheduler.running if each.request_id != "row"]
    assert order == ["important", "usual", "batch"]


def test_without_prefix_caching_everybody_finishes() -> None:
    def uncached(config: VllmConfig) -> None:
        config.cache_config.enable_prefix_caching = False

    scheduler = ours(build(change=uncached))
    assert scheduler.state.kv is None
    for row in range(8):
        scheduler.add_request(make_request(f"row-{row}", 200 + row, row=row, max_tokens=20))
    scheduler.add_request(make_request("call"))
    run(scheduler)
    assert scheduler.state.num_policy_errors == 0
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 99


def test_rows_give_their_slots_to_calls_where_fewer_may_be_active_than_run() -> None:
    def two_active(config: VllmConfig) -> None:
        config.scheduler_config.max_num_active_seqs = 2

    scheduler = build(change=two_active)
    for row in range(4):
        scheduler.add_request(make_request(f"row-{row}", row=row, max_tokens=60))
    assert set(step(scheduler)) == {"row-0", "row-1"}
    scheduler.add_request(make_request("call", max_tokens=60))
    scheduled = step(scheduler)
    assert scheduled["call"] == 40 and len(scheduler.running) == 2
    run(scheduler)


def test_calls_go_by_priority_and_arrival_and_before_all_rows() -> None:
    scheduler = build()
    for number, priority in enumerate((5, -5, -5)):
        row = make_request(f"row-{number}", row=number)
        row.priority = -9
        scheduler.add_request(row)
        call = make_request(f"call-{number}")
        call.priority, call.arrival_time = priority, float(number)
        scheduler.add_request(call)
    assert list(step(scheduler))[:3] == ["call-1", "call-2", "call-0"]


def test_a_row_of_the_least_rank_starts_with_the_next_room_before_all_that_wait() -> None:
    scheduler = build(num_blocks=200, max_num_seqs=4)
    first = 1_000
    for row in range(first, first + 256):
        scheduler.add_request(make_request(f"row-{row}", 200, row=row, max_tokens=8))
    ran = set(step(scheduler))
    scheduler.add_request(make_request("urgent", 200, row=0, max_tokens=2))

    began: set[str] = set()
    while not began:
        began = set(step(scheduler)) - ran

    assert "urgent" in began
    assert not any(request.num_preemptions for request in scheduler.requests.values())
