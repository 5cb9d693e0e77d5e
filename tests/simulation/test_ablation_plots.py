"""The figures drawn from results, and the cost of planning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.ablation import Trial, measure_watched, series_path
from benchmarks.ablation_configs import LADDER, configs
from benchmarks.planning_cost import measure
from benchmarks.plots import FIGURES, ResultsMissingError, save, windowed_hit_ratio
from benchmarks.records import write_records
from benchmarks.scenarios import a100_8b

DRAWN_SCENARIOS = (
    "echo-sharegpt",
    "echo-qa-short",
    "echo-qa-long",
    "loogle-azure",
    "echo-hit-rate",
)
POOL_RECORDS = [
    {"shape": shape, "rows": rows, "key_s": 1.0, "sort_s": 2.0, "nodes_s": 0.1, "peak_bytes": 2**28}
    for shape in ("toolbench", "short")
    for rows in (10_000, 1_000_000)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as the ablation writes them, all from one short run of a small job."""
    folder = tmp_path_factory.mktemp("results")
    scenario = replace(a100_8b(), duration_s=12.0, job=JobShape(30, (300, 900), (2, 6)))
    records, series = [], []
    for config in configs("echo-qa-short"):
        if config.name in LADDER:
            figures, columns = measure_watched(Trial(scenario, "a100", config, 0, 8600, 30.0))
            records += [figures, {**figures, "blocks": 4300}]
            series.append(columns)
    path = folder / "ablation.jsonl"
    for file, drawn in ((path, records), (series_path(path), series)):
        write_records(
            file, [{**each, "scenario": name} for name in DRAWN_SCENARIOS for each in drawn]
        )
    write_records(folder / "pool.jsonl", POOL_RECORDS)
    return folder


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_small_and_repeatable(
    name: str, results: Path, tmp_path: Path
) -> None:
    for path in (tmp_path / "one.svg", tmp_path / "two.svg"):
        save(FIGURES[name], results, path)
    drawn = (tmp_path / "one.svg").read_bytes()

    assert drawn == (tmp_path / "two.svg").read_bytes()
    assert drawn.rstrip().endswith(b"</svg>")
    assert 5_000 < len(drawn) < 100_000


def test_missing_results_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(ResultsMissingError, match=r"'echo-sharegpt'.*benchmarks\.ablation --json"):
        FIGURES["06-ladder"](tmp_path)


def test_the_hit_ratio_is_that_of_each_window() -> None:
    at_s = [float(second) for second in range(1, 41)]
    prompts = [100.0 * min(second, 20.0) for second in at_s]
    hits = [50.0 * max(0.0, min(second, 20.0) - 10) for second in at_s]
    series = {"at_s": at_s, "offline_hit_tokens": hits, "offline_prompt_tokens": prompts}

    assert windowed_hit_ratio(series) == ([10.0, 20.0], [0.0, 0.5])


def test_planning_is_what_our_schedule_takes_beside_vllms() -> None:
    scenario = replace(a100_8b(), duration_s=8.0, job=JobShape(40, (500, 2_000), (3, 8)))
    shape = EngineShape(num_blocks=20_000, max_num_seqs=48, additional_config={"batchrun": {}})
    record = measure(scenario, 120, shape, 100)

    assert record["steps"] == 100
    assert 1 < record["running"] <= 48 < record["candidates"]
    assert 0 < record["stock_ms"] < record["ours_ms"]
    assert record["planning_cpu_ms"] > 0
