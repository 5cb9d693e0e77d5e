"""The simulator: exact, repeatable, and nothing is lost in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import (
    JobShape,
    JobTerms,
    OfflineJob,
    in_order,
    job_of_file,
    job_of_shape,
)
from batchrun.simulator.online import Calls, OnlineCall, windows_of
from batchrun.simulator.records import Slo, Tables
from batchrun.simulator.simulation import Simulated, Simulation, SimulationPlan, simulate
from batchrun.simulator.virtual.engine import Timing, VirtualEngine
from batchrun.simulator.virtual.setup import A100Law, EngineShape, StepItem
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.row_feeds import callers
from benchmarks.scenarios import a100_8b, draw_calls


@dataclass(frozen=True, slots=True)
class EvenLaw:
    """Every step takes the same time."""

    seconds: float

    @property
    def expected(self) -> EvenLaw:
        return self

    def step_s(self, items: Sequence[StepItem]) -> float:
        return self.seconds


SHORT = replace(a100_8b(), duration_s=20.0)
SMALL_JOB = JobShape(12, (1_000, 6_000), (4, 9), (15, 60), (4, 32))


def calls(seed: int = 0) -> Calls:
    return Calls.of(draw_calls(SHORT, seed))


def docs(seed: int = 0, **terms: float) -> OfflineJob:
    return job_of_shape(f"docs-{seed}", SMALL_JOB, seed, JobTerms(**terms))


def recorded(plan: SimulationPlan, folder: Path) -> tuple[Simulated, dict[str, Any]]:
    with Tables(folder) as tables:
        figures = simulate(plan, tables)
    names = ("requests", "steps", "seconds")
    return figures, {name: pq.read_table(folder / f"{name}.parquet") for name in names}


def test_online_calls_alone_are_a_virtual_engines_run_to_the_last_figure() -> None:
    shape = EngineShape(num_blocks=2_000)
    mine = Simulation(SimulationPlan(20.0, calls(), engine=EnginePlan(shape)))
    mine.engines.run_until(20.0)
    settings = {"batchrun": {"policy": "echo"}}
    theirs = VirtualEngine(
        ColocatedScheduler,
        replace(shape, additional_config=settings),
        A100Law(),
        [callers(draw_calls(SHORT, 0), 0)],
    )
    theirs.run_until(20.0)
    ended = [record for record in theirs.records.values() if record.finished_at_s is not None]
    times = [record.token_times_s for record in ended if len(record.token_times_s) > 1]
    tpot = [(each[-1] - each[0]) / (len(each) - 1) for each in times]
    figures = mine.figures()

    assert figures.duration_s == theirs.now_s
    assert figures.num_steps == theirs.totals.num_steps
    assert figures.num_quick_steps > 100
    assert figures.online.num_arrived == len(theirs.records)
    assert figures.online.num_ended == len(ended) > 20
    assert set(tpot) <= set(mine.watch.online.tpot_s)


def stock_plan(duration_s: float, step_s: float, calls: Calls, **shape: Any) -> SimulationPlan:
    """vLLM with one step in flight, and steps that all take the same time."""
    timing = Timing(1, planning_s=0.0)
    engine = EnginePlan(
        EngineShape(num_blocks=200, **shape), "vllm", law=EvenLaw(step_s), timing=timing
    )
    return SimulationPlan(duration_s, calls, engine=engine, slo=Slo(ttft_s=1.0, tpot_s=0.6))


def test_figures_count_every_call_and_judge_each_token() -> None:
    prompt, slow, unheard = OnlineCall(0.0, 20, 3), OnlineCall(0.1, 30, 2), OnlineCall(1.3, 10, 1)
    simulation = Simulation(stock_plan(1.7, 0.6, Calls.of([prompt, slow, unheard])))
    simulation.engines.run_until(1.7)
    figures = simulation.figures()

    # Tokens of "prompt" at 0.6, 1.2, 1.8; of "slow" at 1.2 (1.1 s after it came) and 1.8.
    assert figures.online.num_judged == 2
    assert figures.online.ttft_kept == 0.5
    assert figures.online.tpot_kept == 1.0
    assert figures.online.deadline_kept == 0.5
    assert figures.online.ttft_p50_s == pytest.approx(0.85)
    assert simulation.watch.online.longest_wait_s == pytest.approx(0.5)
    assert figures.num_steps == 3


def test_a_call_without_its_first_token_is_a_miss() -> None:
    served, starved = OnlineCall(0.0, 20, 50), OnlineCall(0.0, 20, 1)
    plan = stock_plan(2.0, 0.1, Calls.of([served, starved]), max_num_seqs=1)
    simulation = Simulation(plan)
    simulation.engines.run_until(2.0)

    assert simulation.figures().online.ttft_kept == 0.5
    assert simulation.watch.online.longest_wait_s == pytest.approx(2.0)


def test_calls_end_after_their_tokens_and_nobody_knows_before() -> None:
    plan = stock_plan(math.inf, 0.1, Calls.of([OnlineCall(0.0, 20, 7)]), max_model_len=90)
    simulation = Simulation(plan)
    (engine,) = simulation.engines.engines
    simulation.engines.run_until(0.15)
    (record,) = engine.records.values()
    assert record.request is not None
    assert record.request.max_tokens == 70
    simulation.engines.run_until(math.inf)

    assert len(record.output_token_ids) == 7
    assert simulation.figures().online.num_ended == 1


def test_a_prompt_that_leaves_one_token_behind_a_full_step_is_answered() -> None:
    whole, short = (
        simulate(
            SimulationPlan(
                math.inf,
                Calls.of([OnlineCall(0.0, 2_049, 5)]),
                engine=EnginePlan(policy="vllm", steps_one_by_one=is_slow),
            )
        )
        for is_slow in (True, False)
    )

    assert short.online == whole.online
    assert (short.online.num_ended, short.num_steps) == (1, whole.num_steps)


def test_rows_in_a_given_order_are_admitted_in_it(tmp_path: Path) -> None:
    job = docs()
    order = np.random.default_rng(1).permutation(job.num_rows)
    given = in_order(job, order)
    engine = EnginePlan(EngineShape(num_blocks=800), "vllm")
    plan = SimulationPlan(float("inf"), Calls.of([]), [given], engine=engine)
    figures, tables = recorded(plan, tmp_path)
    planned = simulate(replace(plan, jobs=[job]))

    admitted_s = {row["number"]: row["admitted_s"] for row in tables["requests"].to_pylist()}
    assert figures.jobs[0].num_done == job.num_rows
    assert (np.diff([admitted_s[row] for row in order.tolist()]) >= 0).all()
    assert len(set(admitted_s.values())) > 20
    assert figures.offline.hit_rate is not None
    assert planned.offline.hit_rate is not None
    assert figures.offline.hit_rate < planned.offline.hit_rate / 2


def test_the_same_plan_gives_the_same_figures_and_the_same_bytes(tmp_path: Path) -> None:
    plan = SimulationPlan(12.0, calls(), [docs(0), docs(1, weight=2.0)], num_engines=2)
    first, _ = recorded(plan, tmp_path / "a")
    again, _ = recorded(plan, tmp_path / "b")

    assert first == again
    for name in ("requests", "steps", "seconds"):
        file = f"{name}.parquet"
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("policy", ["echo", "vllm"])
def test_every_call_and_every_row_is_accounted_for(policy: str, tmp_path: Path) -> None:
    engine = EnginePlan(EngineShape(num_blocks=1_500), policy)
    plan = SimulationPlan(15.0, calls(), [docs()], num_engines=3, engine=engine)
    figures, tables = recorded(plan, tmp_path)
    rows = tables["requests"].to_pylist()
    arrived = int(np.searchsorted(plan.calls.arrival_s, figures.duration_s, side="right"))

    online, offline = figures.online, figures.offline
    assert arrived <= online.num_arrived <= arrived + 2
    assert online.num_ended + online.num_unfinished == online.num_arrived
    assert offline.num_ended + offline.num_in_engines + offline.num_to_come == offline.num_rows
    of_calls = [row for row in rows if row["is_online"]]
    assert sorted(row["number"] for row in of_calls) == list(range(len(of_calls)))
    ended = [row for row in rows if not row["is_online"] and row["is_finished"]]
    assert len({row["number"] for row in ended}) == len(ended) == offline.num_ended > 5
    assert {row["engine"] for row in rows} == {0, 1, 2}
    finished = [row for row in of_calls if row["is_finished"]]
    assert len(finished) == online.num_ended
    for row in finished:
        assert row["num_output_tokens"] == plan.calls.num_output_tokens[row["number"]]
    steps = tables["steps"]
    assert steps.num_rows == figures.num_steps
    computed = sum(steps["num_offline_tokens"].to_pylist())
    assert computed == sum(tables["seconds"]["offline_computed_tokens"].to_pylist())
    blocks = [
        sum(second[key] for key in second if key.endswith(("running_blocks", "cached_blocks")))
        for second in tables["seconds"].to_pylist()
        if second["online_cached_blocks"] is not None
    ]
    assert 0 < max(blocks) <= 1_499


def test_without_calls_a_job_runs_to_its_end_and_computes_each_document_once() -> None:
    job = docs()
    none = Calls.of([])
    figures = simulate(SimulationPlan(float("inf"), none, [job]))
    done = figures.jobs[0]

    assert done.num_done == done.num_rows == job.num_rows
    assert done.finished_at_s is not None
    assert done.served_tokens == int((job.num_prompt_tokens + job.num_output_tokens).sum())
    best = 1 - int(job.expected_tokens().sum()) / done.served_tokens
    assert figures.offline.hit_rate == pytest.approx(best, abs=0.05)
    assert figures.online.num_arrived == 0
    assert figures.online.ttft_p50_s is None


def test_more_engines_serve_more() -> None:
    job = job_of_shape("docs", JobShape(40, (4_000, 8_000)), 0, JobTerms())
    rates = [
        simulate(SimulationPlan(15.0, calls(), [job], num_engines=num)).offline.served_tokens_per_s
        for num in (1, 2)
    ]

    assert rates[1] > 1.7 * rates[0]


@pytest.mark.nightly
def test_two_engines_serve_twice_what_one_does_however_full_their_windows_are() -> None:
    job = job_of_shape("docs", JobShape(), 0, JobTerms())
    traffic = Calls.of(draw_calls(replace(a100_8b(), duration_s=60.0), 0))
    one, two = (
        simulate(SimulationPlan(60.0, traffic, [job], num_engines=num)).offline for num in (1, 2)
    )

    assert two.served_tokens_per_s > 2 * one.served_tokens_per_s
    assert one.hit_rate is not None and two.hit_rate is not None
    assert two.hit_rate > one.hit_rate - 0.01


def test_a_weight_and_a_late_job_count() -> None:
    big = JobShape(150, (2_000, 4_000))
    jobs = [
        job_of_shape("light", big, 0, JobTerms()),
        job_of_shape("heavy", big, 1, JobTerms(weight=4.0)),
        job_of_shape("late", big, 2, JobTerms(submit_s=1e6)),
    ]
    light, heavy, late = simulate(SimulationPlan(20.0, Calls.of([]), jobs)).jobs

    assert heavy.computed_tokens > 2 * light.computed_tokens > 0
    assert late.num_done == 0


def test_windows_follow_one_another_and_each_is_from_its_part() -> None:
    at_s = np.arange(0, 2_400, 0.5, dtype=np.float64)
    whole = Calls(at_s, np.arange(1, len(at_s) + 1), np.ones(len(at_s), np.int64))
    part = windows_of(whole, 2_400.0, 8, 60.0, seed=1)

    assert len(part.arrival_s) == 8 * 120
    assert (np.diff(part.arrival_s) >= 0).all()
    assert part.arrival_s[-1] < 480
    first_of_window = part.num_prompt_tokens[::120]
    assert [int(number) // 600 for number in first_of_window] == list(range(8))
    with pytest.raises(ValueError, match="do not fit"):
        windows_of(whole, 2_400.0, 8, 301.0, seed=1)


def test_a_request_that_fits_no_engine_is_named() -> None:
    engine = EnginePlan(EngineShape(max_model_len=3_000))
    long_call = Calls(np.array([0.0]), np.array([2_990]), np.array([11]))

    with pytest.raises(DataError, match="online call 1 has more tokens than the context of 3,000"):
        simulate(SimulationPlan(1.0, long_call, engine=engine))
    with pytest.raises(DataError, match=r"job docs-0: row \d+ has"):
        simulate(SimulationPlan(1.0, calls(), [docs()], engine=engine))


def test_answers_of_a_job_file_are_as_long_as_the_good_ones_that_it_keeps(tmp_path: Path) -> None:
    lines = "".join(f'{{"q": "{row}", "answer": "{"x" * 799}"}}\n' for row in range(3))
    (tmp_path / "in.jsonl").write_text(lines)
    (tmp_path / "job.yaml").write_text(
        "name: asked\nendpoint: /v1/completions\ninput: {path: in.jsonl, prompt: '{{q}}'}\n"
        "output: {path: out.jsonl, keep: [answer]}\n"
    )
    job = job_of_file(tmp_path / "job.yaml", JobTerms())

    assert (job.expected_output_tokens, job.answers_source) == (201, "the column 'answer'")
    assert job.num_output_tokens.tolist() == [201] * 3


def test_a_job_file_is_read_ordered_and_estimated_as_the_daemon_does(tmp_path: Path) -> None:
    texts = [f"{'abcd' * 600}{d}{'wxyz' * 200} question {q}" for q in range(5) for d in range(4)]
    lines = "".join(f'{{"q": "{text}"}}\n' for text in texts)
    (tmp_path / "in.jsonl").write_text(lines)
    (tmp_path / "job.yaml").write_text(
        "name: asked\nendpoint: /v1/completions\ninput: {path: in.jsonl, prompt: '{{q}}'}\n"
        "request: {max_tokens: 7}\noutput: {path: out.jsonl}\nweight: 3\n"
    )
    job = job_of_file(tmp_path / "job.yaml", JobTerms(submit_s=1.0))

    assert (job.name, job.weight, job.num_rows, job.submit_s) == ("asked", 3.0, 20, 1.0)
    assert set(job.num_output_tokens) == {7}
    assert int(job.num_prompt_tokens[0]) == pytest.approx(len(texts[0]) / 4, abs=1)
    # Rows about one text stand together, whatever their place in the file.
    assert [row % 4 for row in job.order.rows.tolist()] == sorted([0, 1, 2, 3] * 5)
    figures = simulate(SimulationPlan(float("inf"), Calls.of([]), [job]))
    assert figures.jobs[0].num_done == 20
    assert figures.offline.hit_rate is not None
    assert figures.offline.hit_rate > 0.7
