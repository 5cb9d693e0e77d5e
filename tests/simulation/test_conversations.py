"""Calls whose turns share and grow, and runs that go on to the end of several jobs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from batchrun.routing.engine_book import EngineTraits
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.online import Calls, OnlineCall, OnlineRouter
from batchrun.simulator.simulation import Simulation, SimulationPlan
from benchmarks.ablation import Trial, measure
from benchmarks.ablation_configs import Config, judge, with_costs
from benchmarks.scenarios import AGENTS, CHATS, Order, Scenario, draw_calls, draw_jobs

TWO_JOBS = Scenario(
    "two",
    600.0,
    CHATS,
    JobShape(2, (900, 1_000), (3, 3), (20, 30), (4, 8)),
    (500,),
    (JobShape(20, (40, 60), (1, 1), (1, 1), (4, 8)),),
    is_to_end=True,
)


def measured(config: Config, scenario: Scenario = TWO_JOBS) -> dict[str, Any]:
    return dict(measure(Trial(scenario, "a100", config, 0, scenario.blocks[0], 0.0)))


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    calls = Calls.of([
        OnlineCall(0.0, 40, 8, 64),
        OnlineCall(1.0, 30, 5, 64),
        OnlineCall(2.0, 20, 6, 0, previous=0),
        OnlineCall(3.0, 10, 4, 0, previous=2),
    ])
    router = OnlineRouter(calls, [EngineTraits()], 7, 1_000)
    prompts = [arrival.prompt_token_ids for arrival in router.ports[0].take_due(9.0)]

    assert calls.num_prompt_tokens.tolist() == [104, 94, 132, 148] == [len(p) for p in prompts]
    assert prompts[1][:64] == prompts[0][:64]
    assert prompts[1][64:] != prompts[0][64:94]
    assert prompts[2][:104] == prompts[0]
    assert prompts[3][:132] == prompts[2]


def test_an_answer_is_found_in_the_cache_by_the_next_turn() -> None:
    calls = Calls.of([OnlineCall(0.0, 64, 65), OnlineCall(9.0, 16, 2, 0, previous=0)])
    simulation = Simulation(SimulationPlan(12.0, calls, engine=EnginePlan()))
    simulation.engines.run_until(12.0)

    # The last token of an answer is never computed, so 128 of 64 + 65 tokens have KV.
    assert simulation.watch.online.hit_tokens == 128


def test_agents_talk_on_when_their_answers_are_there() -> None:
    calls = draw_calls(AGENTS, 3)
    turns = [(calls[call.previous], call) for call in calls if call.previous is not None]

    assert draw_calls(AGENTS, 3) == calls != draw_calls(AGENTS, 4)
    assert all(a.arrival_at_s <= b.arrival_at_s for a, b in pairwise(calls))
    assert 250 < len(calls) < 450
    assert 0.5 < len(turns) / len(calls) < 0.85
    assert all(
        after.arrival_at_s >= before.arrival_at_s + 1 + 0.05 * before.num_output_tokens
        for before, after in turns
    )
    assert {call.num_system_tokens for call in calls if call.previous is None} == {2_000}


def test_jobs_beside_one_another_share_no_text_and_run_to_the_end_of_the_last() -> None:
    jobs = draw_jobs(TWO_JOBS, 0, Order.GROUPED)
    texts = {document[:16].tobytes() for job in jobs for document in job.documents}
    echo = measured(Config("echo"))
    orders = (Order.SHUFFLED, Order.GROUPED)
    stock = [measured(Config(o, "stock", o, is_planned=False)) for o in orders]

    assert len(texts) == 22
    assert {each["offline_rows"] for each in (echo, *stock)} == {26}
    assert 0 < echo["job_s"] <= echo["duration_s"] < echo["job_s"] + 1.5
    assert echo["prefix_hit_rate"] > 0.5


def test_a_run_that_is_cut_off_has_no_end_of_the_job() -> None:
    assert (
        measured(Config("echo"), replace(TWO_JOBS, is_to_end=False, duration_s=0.1))["job_s"]
        is None
    )
    assert measured(Config("alone", order=None))["job_s"] is None


def test_flex_calls_end_as_rows_do_and_hit_what_is_there() -> None:
    flex = measured(Config("flex", is_planned=False, is_flex=True))

    assert flex["offline_rows"] == 26
    assert flex["prefix_hit_rate"] > 0
    assert flex["is_flex"]


def test_what_rows_cost_calls_is_told_beside_calls_alone() -> None:
    row = {"seed": 0, "blocks": 9, "ttft_p50_s": 0.1, "ttft_p99_s": 0.2}
    alone = {**row, "config": "online-only-2048", "job_s": None}
    echo = {**row, "config": "echo", "ttft_p99_s": 0.5, "job_s": 20.0}
    other = {**echo, "seed": 1}
    costs = with_costs([echo, alone, other])

    assert costs[0]["online_cost_p50"] == 1.0
    assert costs[0]["online_cost_p99"] == 2.5
    assert "online_cost_p50" not in costs[2]


def test_ends_of_jobs_are_compared_with_the_best_of_each_form() -> None:
    row = {"offline_tokens_per_s": 1.0, "slo_ttft": 1.0, "slo_tpot": 1.0, "slo_deadline": 1.0}
    ends = {"echo": 10.0, "bs": 40.0, "stock-grouped-512": 12.0, "stock-grouped-2048": 9.0}
    means = {name: {**row, "job_s": job_s} for name, job_s in ends.items()}
    bars = {b.name: b.value for b in judge("many-jobs", 8600, means) if "job_s" in b.name}

    assert bars == {"job_s of bs / echo": 4.0, "job_s of stock-grouped-2048 / echo": 0.9}
