"""The capacity planner: known answers, what no engine can serve, jobs beside calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_call import Cli, cli_in, line_of
from estimator_builders import write_profile

from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobShape, JobTerms, OfflineJob, job_of_shape
from batchrun.simulator.planner import fleet
from batchrun.simulator.planner.capacity import (
    NUM_HARDEST,
    PlannedJob,
    PlanRequest,
    hardest,
    no_answer,
    paragraph,
    plan_capacity,
    record_of,
)
from batchrun.simulator.planner.fleet import (
    Fleet,
    alone,
    beside_jobs,
    context_tokens,
    size_fleet,
)
from batchrun.simulator.planner.kinds import EngineKind, SloTarget, parse_kind
from batchrun.simulator.planner.peak import peak_load
from batchrun.simulator.planner.search import first_guess, smallest
from batchrun.simulator.traces.reading import save_trace
from batchrun.simulator.traces.trace import PrefixBlocks, Trace
from batchrun.simulator.virtual.setup import A100Law, EngineShape

LAX = SloTarget(1_000.0, 1_000.0)
KIND = EngineKind("a100", EnginePlan(), 2.0)


def steady(*, num: int = 40, gap_s: float = 0.5, prompt_tokens: int = 300) -> Trace:
    ones = np.ones(num, np.int64)
    return Trace.of(np.arange(num) * gap_s, prompt_tokens * ones, 12 * ones, source="steady")


def sized(trace: Trace, slo: SloTarget, kind: EngineKind = KIND, most: int = 8) -> Fleet:
    return size_fleet([peak_load(trace, 10.0, slo)], kind, slo, most)


def with_call(trace: Trace, index: int, prompt_tokens: int) -> Trace:
    prompts = trace.num_prompt_tokens.copy()
    prompts[index] = prompt_tokens
    return Trace.of(trace.arrival_s, prompts, trace.num_output_tokens, source=trace.source)


def test_a_prompt_too_long_for_the_bound_is_impossible_and_named() -> None:
    trace = with_call(steady(), 17, 20_000)
    took_s = alone(KIND.engine, 20_000, 1)[0]
    fleet = sized(trace, SloTarget(took_s / 2, 1.0))

    assert fleet.is_impossible and fleet.num_engines is None and fleet.tried == ()
    (infeasible,) = fleet.infeasible
    assert (infeasible.bound, infeasible.number, infeasible.num_prompt_tokens) == (
        "TTFT",
        18,
        20_000,
    )
    assert infeasible.num_calls == 1 and infeasible.took_s == pytest.approx(took_s)
    assert "Impossible on a100, however many engines: 1 of " in no_answer(fleet)
    assert "such as call 18 of the trace with 20,000 prompt" in no_answer(fleet)
    # With time enough for it, one engine serves it; another spares the others its prefill.
    assert sized(trace, SloTarget(took_s * 1.01, 1.0)).num_engines == 2


def test_an_infeasible_call_within_the_target_is_told_and_others_are_served() -> None:
    trace = with_call(steady(), 17, 20_000)
    fleet = sized(trace, SloTarget(1.0, 1.0, target=0.6))

    assert fleet.num_engines == 1
    assert [each.is_too_many for each in fleet.infeasible] == [False]


def test_a_tpot_below_that_of_an_idle_engine_is_impossible() -> None:
    fleet = sized(steady(), SloTarget(1.0, 0.9 * alone(KIND.engine, 300, 12)[1]))

    assert fleet.is_impossible
    assert [(each.bound, each.num_calls) for each in fleet.infeasible] == [("TPOT", 20)]


def test_a_call_longer_than_the_context_is_impossible() -> None:
    engine = EnginePlan(EngineShape(num_blocks=101))
    assert context_tokens(engine) == 1_600
    fleet = sized(with_call(steady(), 3, 1_590), LAX, EngineKind("small", engine))

    assert [(each.bound, each.number) for each in fleet.infeasible] == [("context", 4)]
    assert "longer than the context of 1,600, such as call 4 of" in no_answer(fleet)


def test_calls_that_are_refused_or_late_alone_are_too_many_together() -> None:
    engine = EnginePlan(EngineShape(num_blocks=101))
    trace = steady()
    for index, num_tokens in enumerate((1_590, 1_590, 1_500), 3):
        trace = with_call(trace, index, num_tokens)
    slo = SloTarget(alone(engine, 1_500, 1)[0] / 2, 1.0, target=0.9)
    fleet = sized(trace, slo, EngineKind("small", engine))

    assert fleet.is_impossible
    assert [(each.bound, each.num_calls) for each in fleet.infeasible] == [
        ("context", 2), ("TTFT", 1),
    ]  # fmt: skip
    line = "20 calls (5.0 %, more than the target allows with the 2 too long for an engine) miss"
    assert line in no_answer(fleet)


def test_blocks_that_may_be_cached_make_no_call_infeasible() -> None:
    trace = steady(num=10, gap_s=3.0, prompt_tokens=20_000)
    blocks = PrefixBlocks.of([[*range(39)]] * len(trace), 512)
    shared = replace(trace, prefix=blocks)
    slo = SloTarget(alone(KIND.engine, 20_000, 1)[0] / 2, 1.0, target=0.6)

    assert sized(trace, slo).is_impossible
    assert sized(shared, slo).num_as_given == 1


def test_the_cap_is_told_when_it_does_not_hold() -> None:
    burst = Trace.of(np.repeat([0.0, 5.0], 20), np.full(40, 3_000), np.full(40, 8))
    slo = SloTarget(2 * alone(KIND.engine, 3_000, 1)[0], 1.0)
    fleet = sized(burst, slo, most=3)

    assert (fleet.num_engines, fleet.is_impossible) == (None, False)
    assert [each.num_engines for each in fleet.tried] == [2, 3]
    assert "3 engines of a100 do not hold" in no_answer(fleet)


def bursts(num_calls: int) -> Trace:
    """The same burst three times, engines idle in between."""
    ones = np.ones(3 * num_calls, np.int64)
    return Trace.of(np.repeat([0.0, 5.0, 10.0], num_calls), 2_000 * ones, 8 * ones)


def held_at_once(slo: SloTarget) -> int:
    """How large a burst one engine serves within the bounds, all of it."""
    most = smallest(lambda num: sized(bursts(num), slo, most=1).num_engines is None, 64)
    assert most is not None
    return most - 1


def test_engines_share_a_burst_as_one_engine_tells() -> None:
    slo = SloTarget(3.5 * alone(KIND.engine, 2_000, 1)[0], 1.0)
    held = held_at_once(slo)

    assert held > 1
    for num_calls in (2 * held, 2 * held + 1, 4 * held):
        assert sized(bursts(num_calls), slo).num_engines == -(-num_calls // held)


def test_the_hardest_draws_have_the_most_tokens_in_the_peak_or_in_a_burst() -> None:
    steady_loads = [peak_load(steady(num=10 + n, gap_s=1.0), 200.0, LAX, n) for n in range(6)]
    burst = Trace.of([0.0] * 9, np.full(9, 1_000), np.full(9, 8))
    loads = [*steady_loads, peak_load(burst, 200.0, LAX, 6)]

    found = [load.draw for load in hardest(loads)]

    assert len(found) == NUM_HARDEST and set(found) == {6, 5, 4, 3}
    assert loads[6].num_burst_tokens == 9 * 1_008
    assert [load.draw for load in hardest(loads[:2])] == [1, 0]


def test_engines_are_added_until_every_draw_holds() -> None:
    slo = SloTarget(3.5 * alone(KIND.engine, 2_000, 1)[0], 1.0)
    held = held_at_once(slo)
    loads = [
        peak_load(bursts(num_calls), 10.0, slo, draw)
        for draw, num_calls in enumerate([held, 1, 3 * held, 2 * held])
    ]
    fleet = size_fleet(loads, KIND, slo)

    assert (fleet.num_as_given, fleet.num_for_calls, fleet.num_engines) == (1, 3, 3)
    assert fleet.num_draws == 4
    assert [each.draw for each in fleet.tried_on(3)] == [0, 1, 2, 3]
    assert all(each.holds(slo) for each in fleet.tried_on(3))
    assert not all(each.holds(slo) for each in fleet.tried_on(2))


def test_a_draw_that_no_number_serves_is_left_out_and_counted() -> None:
    trace = steady()
    slo = SloTarget(2 * alone(KIND.engine, 300, 1)[0], 1.0)
    loads = [peak_load(trace, 10.0, slo), peak_load(with_call(trace, 17, 20_000), 10.0, slo, 1)]
    fleet = size_fleet(loads, KIND, slo)

    assert (fleet.num_engines, fleet.num_draws) == (1, 1)


def docs(name: str, seed: int, deadline_s: float) -> OfflineJob:
    shape = JobShape(200, (1_000, 2_000), (2, 3), (15, 60), (4, 16))
    return job_of_shape(name, shape, seed, JobTerms(deadline_s=deadline_s))


def test_the_cheapest_kind_runs_the_jobs_and_their_figures_agree() -> None:
    slow = EnginePlan(law=A100Law(flop_per_s=50e12, bytes_per_s=0.5e12))
    kinds = [EngineKind("dear", EnginePlan(), 9.0), EngineKind("cheap", slow, 1.0, gpus=2)]
    jobs = [docs("first", 1, 3_600.0), docs("late", 2, 1.0)]
    request = PlanRequest(
        steady(num=120), kinds, SloTarget(2.0, 0.1), jobs, peak_s=10.0, num_windows=2, window_s=8.0
    )
    plan = plan_capacity(request)
    text = paragraph(plan)

    assert plan.chosen is not None and plan.day is not None
    assert (plan.chosen.kind.name, plan.chosen.num_engines) == ("cheap", 1)
    assert plan.chosen.price_per_hour == 2.0
    first, late = plan.jobs
    assert (first.is_deadline_kept, late.is_deadline_kept) == (True, False)
    for job in plan.jobs:
        check_job(job, plan.day.pace.tokens_per_s)
    work = sum(job.computed_tokens for job in plan.jobs)
    assert late.takes_s == pytest.approx(work / plan.day.pace.tokens_per_s, rel=0.1)
    assert "1 engine of cheap (2 GPUs) keeps a TTFT of 2 s" in text
    assert "late misses its deadline by" in text and "first misses" not in text
    assert json.loads(json.dumps(record_of(plan)))["jobs"][0]["name"] == "first"


SMALL = EngineShape(num_blocks=1_200, max_num_seqs=24)


BESIDE = SloTarget(1.0, 0.05, target=0.9)


def beside(policy: str, *gaps_s: float, begin_with: int | None = None) -> tuple[Fleet, Fleet]:
    """A fleet for prompts of 1,500 tokens, a draw for each gap, before and after it is simulated
    beside a job; `begin_with` so many engines instead of those that the calls need."""
    settings = {"slo": {"ttft_s": BESIDE.ttft_s, "tpot_s": BESIDE.tpot_s}}
    kind = EngineKind("small", EnginePlan(SMALL, policy, settings))
    loads = [
        peak_load(steady(num=80, gap_s=gap_s, prompt_tokens=1_500), 8.0, BESIDE, draw)
        for draw, gap_s in enumerate(gaps_s)
    ]
    fleet = size_fleet(loads, kind, BESIDE, 8)
    begun = replace(fleet, num_engines=begin_with or fleet.num_engines)
    return fleet, beside_jobs(begun, loads, [docs("docs", 1, 3_600.0)], BESIDE)


def test_a_policy_that_keeps_the_bounds_beside_jobs_needs_no_engine_more() -> None:
    before, after = beside("echo", 0.3, 0.25)

    assert before.num_engines is not None and before.is_beside_kept is None
    assert (after.num_engines, after.is_beside_kept) == (before.num_engines, True)
    assert [each.draw for each in after.tried_on(before.num_engines, has_jobs=True)] == [0, 1]


def test_jobs_that_cost_calls_their_bounds_are_told_and_never_paid_for_in_vain() -> None:
    before, after = beside("vllm", 0.3)

    assert (after.num_engines, after.is_beside_kept) == (before.num_engines, False)
    assert any(each.has_jobs for each in after.tried)
    assert not any(each.holds(BESIDE) for each in after.tried if each.has_jobs)


def test_engines_are_added_until_calls_keep_their_bounds_beside_jobs() -> None:
    before, after = beside("echo", 0.08, begin_with=1)

    assert before.num_engines == 2
    assert (after.num_engines, after.is_beside_kept, after.num_for_calls) == (2, True, 2)
    assert not after.tried_on(1, has_jobs=True)[0].holds(BESIDE)


def check_job(job: PlannedJob, tokens_per_s: float) -> None:
    """Beside calls a job takes at least as long as alone, and pays for both GPUs of its engine."""
    assert job.takes_s is not None and job.cost_alone is not None
    assert 0 < job.computed_tokens <= job.served_tokens
    assert job.takes_s >= 0.9 * job.computed_tokens / tokens_per_s
    assert job.cost_alone == pytest.approx(job.gpu_hours_alone)
    assert job.gpu_hours_alone * 3_600 / 2 < job.takes_s


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command in a folder with a trace."""
    save_trace(steady(), tmp_path / "calls.parquet")
    return cli_in(tmp_path, monkeypatch, capsys)


def test_the_command_ends_in_a_paragraph_and_has_json(
    cli: Cli, tmp_path: Path, tiny_model: Path
) -> None:
    lines = "".join(f'{{"q": "{"word " * 60}{i}"}}\n' for i in range(20))
    (tmp_path / "in.jsonl").write_text(lines + f'{{"q": "{"word " * 40_000}"}}\n')
    (tmp_path / "job.yaml").write_text(
        "name: asked\nendpoint: /v1/completions\ninput: {path: in.jsonl, prompt: '{{q}}'}\n"
        "request: {max_tokens: 7}\noutput: {path: out.jsonl}\ndeadline: 10m\n"
    )
    arguments = "--trace", "calls.parquet", "--peak", "10s", "--profile", "a100-8b@1.5"
    more = "--job", "job.yaml", "--windows", "2", "--window", "5s"
    code, out, err = cli("plan", *arguments, *more)
    _, shown, _ = cli("plan", *arguments, *more, "--json")
    found = json.loads(shown)

    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == found["paragraph"]
    assert out.splitlines()[-1].startswith("1 engine of a100-8b (1 GPU) keeps a TTFT")
    assert found["chosen"] == {
        "name": "a100-8b", "num_engines": 1, "num_engines_for_calls": 1, "num_engines_as_given": 1,
        "num_draws": 5, "has_room_for_chance": True, "is_kept_beside_jobs": True, "num_gpus": 1,
        "price_per_hour": 1.5,
    }  # fmt: skip
    assert len(found["draws"]) == 5 and found["draws"][0] == found["peak"]
    assert (
        "% of the calls beside the jobs in the busiest 10 s of the trace and of the 4 hard" in out
    )
    assert "0 missed a bound: with room for chance. In a peak of 20 calls 0 may miss" in out
    assert "That costs 1.50 an hour, 36.00 a day." in out
    assert [(job["is_deadline_kept"], job["num_rows"]) for job in found["jobs"]] == [(True, 20)]
    assert len(found["windows"]) == 2
    assert "asked are estimated at four bytes a token. asked runs without 1 row too long" in out
    assert "The answers of asked have 7 tokens a row, from the limit in the job file. The" in out
    (tmp_path / "batchrun.yaml").write_text(f"model: {tiny_model}\n")
    counted = json.loads(cli("plan", *arguments, *more, "--json")[1])
    assert "estimated" not in counted["paragraph"]
    assert counted["jobs"][0]["served_tokens"] != found["jobs"][0]["served_tokens"]
    line = line_of(cli("plan", *arguments, *more, "--max-model-len", "20"), 2)
    assert line.startswith("--job job.yaml: no row can run on a100-8b with its context of 20;")


def test_a_kind_that_takes_no_row_is_left_out_and_other_models_are_estimated(
    cli: Cli, tmp_path: Path, tiny_model: Path
) -> None:
    job = (
        "name: asked\nendpoint: /v1/completions\ninput: {path: in.jsonl, prompt: '{{q}}'}\n"
        "request: {max_tokens: 7}\noutput: {path: out.jsonl}\nmodel: org/other\n"
    )
    (tmp_path / "in.jsonl").write_text(f'{{"q": "{"word " * 100}"}}\n')
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "batchrun.yaml").write_text(f"model: {tiny_model}\n")
    write_profile(tmp_path / "small.json", block_tokens=1)
    arguments = "plan --trace calls.parquet --peak 10s --job job.yaml --windows 2 --window 5s"
    kinds = "--profile small.json@0.1 --profile a100-8b@1.5"
    code, out, err = cli(*arguments.split(), *kinds.split(), "--json")
    found = json.loads(out)

    assert (code, [kind["name"] for kind in found["kinds"]]) == (0, ["a100-8b"])
    assert "left out: --job job.yaml: no row can run on small with its context of 99;" in err
    assert "The prompts of asked are estimated at four bytes" in found["paragraph"]
    (tmp_path / "job.yaml").write_text(job.replace("{{q}}", "{{q and 1 // 0}}"))
    line = line_of(cli(*arguments.split()), 2)
    assert line == "--job job.yaml: no row can run; `batchrun submit --dry-run` says why"


def test_rates_are_drawn_with_a_seed_for_each_draw(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("time_s,rate_per_s\n0,3\n20,3\n")
    arguments = "plan", "--trace", "rates.csv", "--peak", "10s", "--draws", "3", "--json"
    draws, again, others = (
        json.loads(cli(*arguments, "--seed", seed)[1])["draws"] for seed in ("4", "4", "5")
    )

    assert draws == again
    assert len({json.dumps(each) for each in draws}) == 3
    # Draw 1 of a seed is draw 0 of the next.
    assert others[0] in draws[1:]


def test_a_load_that_nothing_serves_ends_with_its_own_code(cli: Cli) -> None:
    more = "--ttft", "0.001", "--submit-at", "0"
    code, out, err = cli("plan", "--trace", "calls.parquet", "--peak", "10s", *more)

    assert (code, err) == (1, "")
    assert "Impossible on a100-8b, however many engines: 20 of 20 calls (100.0 %, more" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--ttft", "soon"), "--ttft: must be a duration such as"),
        (("--target", "1.2"), "--target: must be above 0 and at most 1"),
        (("--profile", "a100-8b@"), "--profile 'a100-8b@': must be PROFILE"),
        (("--profile", "a100-8b", "--profile", "b=a100-8b@1"), "'a100-8b' has no price"),
    ],
)
def test_a_wrong_option_is_one_line(cli: Cli, arguments: tuple[str, ...], problem: str) -> None:
    code, out, err = cli("plan", "--trace", "calls.parquet", *arguments)

    assert (code, out) == (2, "")
    assert problem in err and len(err.splitlines()) == 1


def test_the_reference_is_a_kind_with_the_target_as_its_slo() -> None:
    kind = parse_kind("a100-8b", SloTarget(2.0, 0.1), Path())

    assert kind.engine.settings["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1}


def test_of_many_engines_a_part_is_simulated_and_needs_no_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slo = SloTarget(ttft_s=2.0)
    arrival_s = np.sort(np.random.default_rng(0).uniform(0, 40, 400))
    ones = np.ones(len(arrival_s), np.int64)
    trace = Trace.of(arrival_s, 6_000 * ones, 40 * ones)
    whole = sized(trace, slo, most=32).num_engines
    monkeypatch.setattr(fleet, "num_simulated", lambda num: min(num, 4))

    part = sized(trace, slo, most=32)

    assert whole is not None and part.num_engines is not None
    assert 4 < whole <= part.num_engines <= 1.6 * whole
    (found,) = part.tried_on(part.num_engines)
    assert found.num_calls < 1.5 * len(trace) * 4 / part.num_engines


@pytest.mark.nightly
def test_draws_of_many_engines_are_simulated_side_by_side_with_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, loads = np.random.default_rng(0), []
    for draw in range(3):
        arrival_s = np.sort(rng.uniform(0, 40, 300 + 100 * draw))
        ones = np.ones(len(arrival_s), np.int64)
        trace = Trace.of(arrival_s, 6_000 * ones, 40 * ones)
        loads.append(peak_load(trace, 300.0, SloTarget(ttft_s=2.0), draw))
    monkeypatch.setattr(fleet, "num_simulated", lambda num: min(num, 2))
    side_by_side = size_fleet(loads, KIND, SloTarget(ttft_s=2.0), 32)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    one_by_one = size_fleet(loads, KIND, SloTarget(ttft_s=2.0), 32)

    assert side_by_side.num_engines is not None and side_by_side.num_engines > 2
    assert side_by_side == one_by_one


def test_the_search_begins_near_its_answer(tmp_path: Path) -> None:
    arrival_s = np.sort(np.random.default_rng(0).uniform(0, 60, 600))
    ones = np.ones(len(arrival_s), np.int64)
    trace = Trace.of(arrival_s, 2_000 * ones, 100 * ones)
    guess = first_guess(peak_load(trace, 60.0, SloTarget()), KIND.engine)
    found = sized(trace, SloTarget()).num_engines

    assert found is not None
    assert found / 2 <= guess <= 2 * found
    assert first_guess(peak_load(trace.take(np.arange(1)), 60.0, SloTarget()), KIND.engine) == 1
