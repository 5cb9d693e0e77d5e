"""A dry run that simulates: the ETA beside a trace, the cost on an engine of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_call import Cli, cli_in, dry_run_of, line_of
from estimator_builders import write_profile

from batchrun.config import load_deployment
from batchrun.home import Home
from batchrun.simulator.planner.colocation import simulation_of
from batchrun.simulator.traces.reading import save_trace
from batchrun.simulator.traces.trace import Trace

NUM_ROWS = 30
JOB = """\
name: asked
endpoint: /v1/completions
input: {path: in.jsonl, prompt: '{{q}}'}
request: {max_tokens: 7}
output: {path: out.jsonl}
deadline: 10m
"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command in a folder with a job and a trace that is busy in its second half."""
    arrivals = np.concatenate([np.arange(10) * 1.0, 10 + np.arange(100) * 0.1])
    prompts, outputs = np.full(110, 1_000), np.full(110, 20)
    save_trace(Trace.of(arrivals, prompts, outputs, source="busy"), tmp_path / "calls.parquet")
    rows = "".join(f'{{"q": "{i} {"word " * 800}"}}\n' for i in range(NUM_ROWS))
    (tmp_path / "in.jsonl").write_text(rows)
    (tmp_path / "job.yaml").write_text(JOB)
    return cli_in(tmp_path, monkeypatch, capsys)


def test_beside_a_trace_the_job_takes_longer_than_alone_and_the_range_is_that_of_the_trace(
    cli: Cli,
) -> None:
    Path("job.yaml").write_text(JOB.replace("10m", "0.1s"))
    found = dry_run_of(cli, "--trace", "calls.parquet", "--profile", "a100-8b@1.5x2")

    assert found["eta_source"] == found["engine_hours_source"] == "simulation"
    assert found["engine_hours"] * 3_600 < found["eta_low_s"] < found["eta_s"]
    assert found["eta_s"] < found["eta_high_s"]
    assert found["is_deadline_kept"] is False
    assert found["kv_tokens_source"] == "--profile a100-8b"
    assert found["cost_alone"] == pytest.approx(1.5 * 2 * found["engine_hours"])
    assert not Path("home").exists()


def test_a_calibrated_deployment_needs_no_profile_named(cli: Cli) -> None:
    write_profile(Path("engine.json"), block_tokens=64)
    Path("batchrun.yaml").write_text("engines: [{profile: engine.json}]\n")
    found = dry_run_of(cli, "--price", "3")
    beside = dry_run_of(cli, "--trace", "calls.parquet")

    assert (found["eta_s"], found["kv_tokens"]) == (None, 6_400)
    assert found["engine_hours_rest_on"] == "simulated on one engine of engine"
    assert found["cost_alone"] == pytest.approx(3 * found["engine_hours"])
    assert beside["eta_s"] > 0
    assert beside["engine_hours"] == found["engine_hours"]


def test_engines_of_the_jobs_model_count_and_a_cheap_start_is_told(cli: Cli) -> None:
    for name in ("engine", "big"):
        write_profile(Path(f"{name}.json"), block_tokens=64)
    big = "model: org/big, profile: big.json"
    Path("batchrun.yaml").write_text(
        f"engines: [{{profile: engine.json}}, {{name: b, {big}}}, {{name: c, {big}}}]\n"
    )
    Path("job.yaml").write_text(JOB + "model: org/big\nstart: cheap\n")
    rests_on = dry_run_of(cli, "--trace", "calls.parquet")["eta_rests_on"]

    assert "on 2 engines of big, with no other job; counted from a start that may" in rests_on


LARGE, SMALL = "{name: a, profile: large.json}", "{name: b, profile: small.json}"


@pytest.mark.parametrize(
    ("engines", "has_hours"),
    [(f"{LARGE}, {SMALL}", True), (f"{SMALL}, {LARGE}", False), ("{name: a}, " + SMALL, False)],
)
def test_a_row_that_any_engine_of_the_model_holds_can_run(
    cli: Cli, engines: str, *, has_hours: bool
) -> None:
    write_profile(Path("small.json"), block_tokens=2)
    write_profile(Path("large.json"), block_tokens=64)
    Path("batchrun.yaml").write_text(f"engines: [{engines}]\n")
    found = dry_run_of(cli)

    assert (found["kv_tokens"], found["rows_larger_than_kv"]) == (200, NUM_ROWS)
    assert found["computed_tokens"] > NUM_ROWS * 900
    assert found["eta_rests_on"] != "no row can run"
    assert (found["engine_hours"] is not None) is has_hours


def test_rows_that_no_simulated_engine_can_run_are_left_out_and_told(cli: Cli) -> None:
    write_profile(Path("small.json"), block_tokens=16)
    tokens = dry_run_of(cli, "--profile", "small.json")["computed_tokens"]
    rows = Path("in.jsonl").read_text().splitlines()
    rows.insert(1, json.dumps({"q": "word " * 4_000}))
    Path("in.jsonl").write_text("\n".join(rows))
    found = dry_run_of(cli, "--profile", "small.json")
    assert found["rows_larger_than_kv"] == 1
    assert found["computed_tokens"] == pytest.approx(tokens, rel=0.01)
    assert found["engine_hours_rest_on"].endswith("without 1 row that it cannot run")

    Path("in.jsonl").write_text(json.dumps({"q": "word " * 4_000}) + "\n")
    found = dry_run_of(cli, "--profile", "small.json")
    assert (found["engine_hours"], found["eta_rests_on"]) == (None, "no row can run")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--trace calls.parquet", "--trace: engine 0 has no profile yet; run `batchrun calibrate`"),
        ("--trace a.csv --profile a100-8b", "a.csv"),
        ("--profile a.json", "a.json: the profile cannot be read"),
        ("--profile a100-8b@2 --price 3", "--price 3: --profile has a price already"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(cli: Cli, options: str, line: str) -> None:
    assert line in line_of(cli("submit", "job.yaml", "--dry-run", *options.split()), 2)


def test_the_eta_goes_by_the_deployments_scheduler_and_names_what_it_leaves_out(cli: Cli) -> None:
    options = ("--trace", "calls.parquet", "--profile", "a100-8b")
    plain = dry_run_of(cli, *options)
    Path("batchrun.yaml").write_text(
        "online_cost: 1.01\nlate_calls: refuse\nengines: [{vllm_args: [--max-num-seqs, 8]}]\n"
    )
    bounded = dry_run_of(cli, *options)

    assert bounded["eta_s"] > 1.2 * plain["eta_s"]
    assert plain["eta_rests_on"].endswith("with no other job")
    assert bounded["eta_rests_on"].endswith("; not counted: late_calls, vllm_args")


@pytest.mark.parametrize(
    ("engine", "policy", "order"),
    [
        ("{}", "bs+e", "priority"),
        ("{attach: 'http://127.0.0.1:9'}", "vllm", "fcfs"),
        ("{agent: 'https://127.0.0.1:9'}", "bs+e", "priority"),
        ("{command: [x]}", "vllm", "priority"),
    ],
)
def test_simulated_engines_are_set_as_those_of_the_deployment(
    tmp_path: Path, engine: str, policy: str, order: str
) -> None:
    path = tmp_path / "batchrun.yaml"
    path.write_text(
        "{policy: bs+e, eviction: lru, reserve: 0.25, online_cost: 1.5, router: rr, "
        f"online_queue: arrival, slo: {{ttft_s: 2, jct_s: 9}}, engines: [{engine}]}}"
    )
    found = simulation_of(None, "a100-8b", load_deployment(path), Home(tmp_path), "default")

    assert found is not None
    kind, settings = found.kind, found.kind.engine.settings
    assert (kind.router, kind.engine.policy, kind.engine.shape.policy) == ("rr", policy, order)
    assert settings["slo"] == {"ttft_s": 2.0, "tpot_s": 0.05, "jct_s": 9.0}
    given = ("eviction", "reserve", "forecast_rule", "online_cost", "online_queue")
    assert [settings[key] for key in given] == ["lru", 0.25, "growth", 1.5, "arrival"]
