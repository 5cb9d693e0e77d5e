"""Scenario files: strict, and what they say is what is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_call import cli_in, line_of

from batchrun.errors import ConfigError, DataError, InputError
from batchrun.simulator.planner.kinds import SloTarget, parse_kind
from batchrun.simulator.scenario_file import load_scenario, plan_of
from batchrun.simulator.simulation import simulate
from batchrun.simulator.traces.reading import save_trace
from batchrun.simulator.traces.trace import Trace

ROOT = Path(__file__).parents[2]
HEAD = "name: x\nduration: 20s\n"
RATE = "online: {generator: {rate: 2}}\n"
GENERATOR = HEAD + "online: {generator: {rate: 2, "
SHAPE = "    shape: {documents: 2, document_tokens: [3, 9]}\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD + "engine: {}\n" + RATE, ":3: engine: unknown key (did you mean 'engines'?)"),
        (HEAD + RATE + "engines:\n  cuont: 2\n", ":5: engines.cuont: unknown key (did you mean"),
        (
            HEAD + RATE + "engines: {policy: ecko}\n",
            ":4: engines.policy: must be one of vllm, bs, ",
        ),
        (HEAD + RATE + "router: leest\n", ":4: router: must be one of cost, least, rr"),
        (HEAD + RATE + "engines: []\n", ":4: engines: must not be empty"),
        (HEAD + RATE + "engines:\n  - {cuont: 2}\n", ":5: engines[0].cuont: unknown key (did you"),
        (
            HEAD + RATE + "engines:\n  - {count: 1000}\n  - {count: 25}\n",
            ":4: engines: 1,025 in all, more than 1,024",
        ),
        (HEAD, ":1: nothing to simulate"),
        (HEAD + "online: {}\n", ":3: online: needs one of 'trace' and 'generator'"),
        (HEAD + RATE + "windows: {count: 3, length: 10s}\n", ":4: windows: its windows are longer"),
        (
            HEAD + "jobs:\n  - after: 20s\n" + SHAPE,
            ":4: jobs[0].after: must be less than the 20 s simulated",
        ),
        (
            HEAD + RATE + "windows: {count: 2, length: 4s}\njobs:\n  - after: 10s\n" + SHAPE,
            ":6: jobs[0].after: must be less than the 8 s simulated",
        ),
        (
            GENERATOR + "prompt_tokens: {median: 7, sigma: 1, least: 10, most: 5}}}\n",
            ":3: online.generator.prompt_tokens: least is above most (10 > 5)",
        ),
        (
            GENERATOR + "burst_length: 100s, burst_period: 10s}}\n",
            ":3: online.generator: burst_length is more than burst_period",
        ),
        (HEAD + "jobs:\n  - name: a\n", ":4: jobs[0]: needs one of 'file' and 'shape'"),
        (
            HEAD + "jobs:\n  - shape: {documents: 2, document_tokens: [9, 3]}\n",
            ":4: jobs[0].shape.document_tokens: the first bound is above the second",
        ),
        ("duration: -1\nname: x\n", ":1: duration: must be longer than 0"),
    ],
)
def test_a_wrong_scenario_file_is_one_line_with_its_place(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_scenario(path)

    assert str(caught.value).startswith(f"{path}{problem}")


@pytest.mark.parametrize(
    "keys",
    ["online: {trace: ./~x}\n", "jobs: [{file: ./~x}]\n", RATE + "engines: {steps: ./~x}\n"],
)
def test_names_of_files_may_begin_with_a_tilde(tmp_path: Path, keys: str) -> None:
    with pytest.raises(InputError, match=f"{tmp_path}/~x: "):
        plan_of(load_scenario(written(tmp_path, HEAD + keys)), tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path}/~x: "):
        parse_kind("./~x", SloTarget(1.0, 0.1), tmp_path)


def test_a_trace_and_windows_are_read_as_written(tmp_path: Path) -> None:
    at_s = np.arange(0, 100, 0.25)
    ones = np.ones(len(at_s), np.int64)
    save_trace(Trace.of(at_s, 9 * ones, 3 * ones), tmp_path / "trace.parquet")
    text = "name: x\nduration: 80s\nonline: {trace: trace.parquet}\n"
    whole = plan_of(load_scenario(written(tmp_path, text)), tmp_path)
    short_text = text + "windows: {count: 4, length: 5s}\n"
    short = plan_of(load_scenario(written(tmp_path, short_text)), tmp_path)

    assert len(whole.calls.arrival_s) == 320
    assert (short.duration_s, len(short.calls.arrival_s)) == (20.0, 80)
    (tmp_path / "trace.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"trace\.parquet: "):
        plan_of(load_scenario(written(tmp_path, text)), tmp_path)


def test_a_trace_that_ends_long_before_the_duration_is_refused(tmp_path: Path) -> None:
    ones = np.ones(81, np.int64)
    save_trace(Trace.of(np.arange(81), ones, ones), tmp_path / "trace.parquet")
    text = "name: x\nonline: {trace: trace.parquet}\nduration: "

    within = plan_of(load_scenario(written(tmp_path, text + "81.5s\n")), tmp_path)
    assert len(within.calls.arrival_s) == 81
    with pytest.raises(DataError, match=r"^trace\.parquet: lasts 81 s, less than .* 3,600 s$"):
        plan_of(load_scenario(written(tmp_path, text + "1h\nwindows: {count: 2}\n")), tmp_path)


def test_rates_are_drawn_with_the_seed_and_for_the_duration_alone(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("time_s,rate_per_s\n0,2\n600,1e6\n1200,1e6\n")
    text = HEAD + "online: {trace: rates.csv}\nseed: "
    paths = (written(tmp_path, text + seed) for seed in "112")
    first, same, other = (plan_of(load_scenario(path), tmp_path).calls for path in paths)

    assert first.arrival_s.tolist() == same.arrival_s.tolist() != other.arrival_s.tolist()


def test_the_example_is_the_manuals_and_can_be_planned() -> None:
    scenario = load_scenario(ROOT / "jobs" / "simulate-evening.yaml")
    plan = plan_of(scenario, ROOT / "jobs")

    assert plan.num_engines == 2
    assert len(plan.calls.arrival_s) > 300
    assert plan.jobs[0].deadline_s == 1800


def test_a_router_is_the_files_unless_the_command_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = cli_in(tmp_path, monkeypatch, capsys)
    text = "name: x\nduration: 5s\nengines: {count: 2}\nrouter: random\n" + RATE
    path = written(tmp_path, text)
    assert plan_of(load_scenario(path), tmp_path).router == "random"

    def online(*arguments: str) -> Any:
        return json.loads(cli("simulate", str(path), "--json", *arguments)[1])["online"]

    drawn, least = online(), online("--router", "least")
    assert drawn["num_arrived"] == least["num_arrived"]
    assert drawn != least
    line = line_of(cli("simulate", str(path), "--router", "leest"), 2)
    assert "must be one of cost, least, rr" in line


def test_engines_of_several_kinds_share_calls_and_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = cli_in(tmp_path, monkeypatch, capsys)
    job = "jobs:\n  - shape: {documents: 12, document_tokens: [900, 1200], questions: [4, 4]}\n"
    kinds = "engines:\n  - {count: 2, max_model_len: 4096}\n  - {policy: vllm, block_tokens: 32}\n"
    path = written(tmp_path, HEAD.replace("20s", "8s") + RATE + job + kinds)
    plan = plan_of(load_scenario(path), tmp_path)

    assert [each.policy for each in plan.engine_plans] == ["echo", "echo", "vllm"]
    assert (plan.num_engines, plan.max_model_len) == (3, 4096)
    code, text, _ = cli("simulate", str(path), "--json", "-o", str(tmp_path / "o"))
    figures = json.loads(text)
    assert (code, figures["jobs"][0]["num_done"]) == (0, 48)
    assert figures["offline"]["hit_rate"] > 0.5
    for engine in figures["engines"]:
        assert engine["online_computed_tokens"] > 0 and engine["offline_computed_tokens"] > 0
        assert 0 < engine["busy_share"] <= 1
    assert "tokens for calls" in cli("simulate", str(path))[1]


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("max_model_len: 600", r"the context of 600 \(max_model_len\) of one of the engines"),
        ("kv_blocks: 41", "the KV cache of 640 of one of the engines"),
    ],
)
def test_a_row_that_the_smallest_engine_cannot_hold_is_refused(
    kind: str, bound: str, tmp_path: Path
) -> None:
    job = "jobs:\n  - {name: a, shape: {documents: 1, document_tokens: [900, 900]}}\n"
    path = written(tmp_path, HEAD + job + f"engines:\n  - {{}}\n  - {{{kind}}}\n")

    with pytest.raises(DataError, match=f"job a: row 0 has 9[0-9]+ tokens, more than {bound}"):
        simulate(plan_of(load_scenario(path), tmp_path))


@pytest.mark.nightly
def test_the_command_prints_writes_and_draws(tmp_path: Path) -> None:
    job = "jobs:\n  - {name: docs, shape: {documents: 4, document_tokens: [900, 1200]}}\n"
    path = written(tmp_path, "name: x\nduration: 12s\n" + RATE + job)
    command = [sys.executable, "-m", "batchrun", "simulate", str(path), "-o", str(tmp_path / "o")]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["jobs"][0]["num_done"] == 4
    assert figures["online"]["num_arrived"] > 10
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert {"requests.parquet", "steps.parquet", "seconds.parquet"} < names
    assert {"02-tide.svg", "07-latencies.svg", "08-activity.svg", "10-memory.svg"} < names


def test_without_vllm_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD + RATE)
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "sys.argv = ['batchrun', 'simulate', sys.argv[1]]\n"
        "from batchrun.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 4
    assert len(done.stderr.strip().splitlines()) == 1
    assert "vLLM cannot be imported here" in done.stderr
