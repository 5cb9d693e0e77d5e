"""The fault harness sees what it is there to see; the manual lists every fault that it makes."""

from __future__ import annotations

import random
import re
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_faults import ENGINE_FAULTS
from job_faults import JOB_FAULTS
from store_faults import STORE_FAULTS

from batchrun.failpoints import NAMES
from benchmarks.crash import TARGETS, plan_targets
from benchmarks.crash_account import (
    COMMIT_TYPES,
    Kill,
    check_executions,
    check_output,
    expected_answer,
    measure_reach,
)
from benchmarks.crash_fleet import check_runs
from benchmarks.deployment import prompt

FAULTS = (*STORE_FAULTS, *ENGINE_FAULTS, *JOB_FAULTS)
DOCS = Path(__file__).parents[2] / "docs"
LATENCY_S = 1.0

Run = dict[str, object]


def run_of(row: int, at: float, epoch: int = 1) -> Run:
    """An execution of a row of job j."""
    return {"job": "j", "row": row, "epoch": epoch, "at": float(at)}


def daemon_kill(at: float) -> Kill:
    """The daemon dies, and is told to go on a second later."""
    return Kill("daemon", at, ended_at=at + 1)


def problems(executions: list[Run], commits: dict[int, float], *kills: Kill) -> list[str]:
    """What the account finds wrong; notes what the kills met."""
    done = [{"job": "j", "row": row, "committed_at": float(at)} for row, at in commits.items()]
    runs, results = pl.DataFrame(executions), pl.DataFrame(done, schema=COMMIT_TYPES)
    measure_reach(kills, runs, results, LATENCY_S)
    return list(check_executions(kills, runs, results))


def test_a_row_that_runs_again_because_of_a_kill_is_in_order() -> None:
    assert problems([run_of(0, 1), run_of(0, 3, epoch=2)], {0: 4}, daemon_kill(1.5)) == []


def test_what_a_dead_daemon_sent_may_begin_after_the_next_one_was_started() -> None:
    runs = [run_of(1, 1), run_of(0, 2.8), run_of(0, 3, epoch=2)]

    assert problems(runs, {0: 4, 1: 1.4}, daemon_kill(1.5)) == []


def test_a_row_that_runs_after_its_commit_is_found() -> None:
    (first, *_) = problems([run_of(0, 1), run_of(0, 3, epoch=2)], {0: 2}, daemon_kill(1.5))

    assert "began after its result was committed" in first


def test_a_row_that_is_lost_is_found() -> None:
    assert "has no result" in problems([run_of(0, 1)], {})[0]


def test_a_row_that_runs_twice_without_a_kill_is_found() -> None:
    assert "ran 2 times, cut 0 times" in problems([run_of(0, 1), run_of(0, 2)], {0: 3})[0]


def test_a_kill_before_a_row_began_does_not_explain_its_second_run() -> None:
    found = problems([run_of(0, 5), run_of(0, 6)], {0: 7}, daemon_kill(1))

    assert "ran 2 times, cut 0 times" in found[0]


def test_a_row_that_runs_twice_for_one_daemon_is_found_where_another_daemon_was_killed() -> None:
    found = problems([run_of(0, 1), run_of(0, 1.2)], {0: 4}, daemon_kill(1.5))

    assert "ran 2 times, cut 1 times" in found[0]


def test_a_kill_meets_the_rows_that_run_and_those_not_yet_committed() -> None:
    kill = daemon_kill(3)
    problems([run_of(0, 1), run_of(1, 2.5), run_of(2, 2.5)], {0: 3.1, 1: 3.6, 2: 2.9}, kill)

    assert (kill.num_in_flight, kill.num_uncommitted) == (1, 2)


def test_what_came_after_an_engine_had_ended_is_not_explained_by_its_kill() -> None:
    kill = Kill("agent 0", 3.0, ended_at=4.0)
    problems([run_of(0, 2), run_of(1, 5), run_of(2, 6)], {0: 7, 1: 7, 2: 7}, kill)

    assert kill.num_uncommitted == 1


@pytest.mark.parametrize(
    ("target", "num_found"), [("core 0", 0), ("core 1", 1), ("daemon", 1), ("gateway", 1)]
)
def test_a_row_may_run_again_where_a_kill_cut_it_at_its_engine(target: str, num_found: int) -> None:
    runs = pl.DataFrame([run_of(0, 1) | {"engine": "0"}, run_of(0, 3) | {"engine": "1"}])
    commits = pl.DataFrame([{"job": "j", "row": 0, "committed_at": 4.0}], schema=COMMIT_TYPES)

    assert len(list(check_runs([Kill(target, 2.0, 2.5)], runs, commits))) == num_found


def write_output(path: Path, rows: list[int]) -> None:
    """An output with the right answers to these rows."""
    table = {
        "id": [f"a-{row}" for row in rows],
        "error": pa.array([None] * len(rows), pa.string()),
        "response": [expected_answer(prompt("a", row)) for row in rows],
    }
    pq.write_table(pa.table(table), path)


def test_a_whole_output_is_in_order(tmp_path: Path) -> None:
    write_output(tmp_path / "out.parquet", [0, 1, 2])

    assert list(check_output(tmp_path / "out.parquet", "a", 3)) == []


@pytest.mark.parametrize("rows", [[0, 2], [0, 1, 1, 2], [1, 0, 2]], ids=["lost", "twice", "order"])
def test_an_output_with_wrong_rows_is_found(tmp_path: Path, rows: list[int]) -> None:
    write_output(tmp_path / "out.parquet", rows)

    assert "not every row once" in next(check_output(tmp_path / "out.parquet", "a", 3))


def test_an_answer_to_another_prompt_is_found(tmp_path: Path) -> None:
    table = {
        "id": ["a-0"],
        "error": pa.array([None], pa.string()),
        "response": [expected_answer(prompt("a", 1))],
    }
    pq.write_table(pa.table(table), tmp_path / "out.parquet")

    assert "row 0: error None" in next(check_output(tmp_path / "out.parquet", "a", 1))


def test_a_plan_has_the_shares_that_are_asked_for() -> None:
    plan = plan_targets(random.Random(3), 100)

    assert all(plan.count(name) == target.share for name, target in TARGETS.items())


def test_the_manual_lists_every_fault_and_every_failpoint() -> None:
    page = (DOCS / "reliability.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    listed = {(name.strip(), made.strip(), seen.strip()) for name, made, seen in rows}

    assert {(fault.name, fault.made, fault.seen) for fault in FAULTS} <= listed
    assert all(f"`{name}`" in page for name in NAMES)
