"""Each call on files fails once, or from then on, the first, the second and so on, on every way by
which something becomes durable: nothing that was acknowledged is lost, all can be read, the way
can be gone to its end afterwards, and what is said is one line."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import file_calls
import pytest
from durable_paths import WAYS, DurableWay
from sqlalchemy import event

from batchrun.errors import BatchrunError

PROGRAM = Path(__file__).parents[1] / "call_faults.py"
QUICK = {"submit": 13}
"""Every so manieth call fails in the gate; every one of every way at night."""
needs_compiler = pytest.mark.skipif(not file_calls.HAS_COMPILER, reason="there is no C compiler")


def trials(folder: Path, way: str, step: int) -> dict[str, list[str]]:
    """What is wrong, by the name of each trial."""
    library, root = file_calls.build(folder), folder / "work"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "fail", str(root), way, str(step)],
        env=file_calls.environment(library, root=root),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = map(json.loads, done.stdout.splitlines())
    return {trial["trial"]: trial["problems"] for trial in found}


def check_trials(folder: Path, way: str, step: int) -> int:
    found = trials(folder, way, step)
    wrong = {trial: problems for trial, problems in found.items() if problems}
    assert wrong == {}, "\n".join(f"{trial}: {problems}" for trial, problems in wrong.items())
    return len(found)


@needs_compiler
@pytest.mark.parametrize("way", QUICK)
def test_some_calls_that_fail_lose_nothing(tmp_path: Path, way: str) -> None:
    assert check_trials(tmp_path, way, QUICK[way]) > 8


@needs_compiler
@pytest.mark.nightly
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("way", [way.name for way in WAYS])
def test_no_call_that_fails_loses_anything(tmp_path: Path, way: str) -> None:
    assert check_trials(tmp_path, way, 1) > 40


class NthCommit:
    """Counts commits and lets the n-th fail."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_seen = 0

    def __call__(self, _connection: object) -> None:
        self.num_seen += 1
        if self.num_seen == self.number:
            raise sqlite3.OperationalError("database or disk is full")


@contextmanager
def failing_commit(way: DurableWay, number: int) -> Iterator[NthCommit]:
    """Within, the n-th commit of the way's store fails."""
    fault = NthCommit(number)
    engine = way.store.engine
    event.listen(engine, "commit", fault)
    try:
        yield fault
    finally:
        event.remove(engine, "commit", fault)


@pytest.mark.parametrize(
    "kind", [way for way in WAYS if way.name in {"submit", "commit", "export"}]
)
def test_no_commit_that_fails_loses_anything(tmp_path: Path, kind: type[DurableWay]) -> None:
    for number in range(1, 50):
        folder = tmp_path / str(number)
        folder.mkdir()
        way = kind(folder)
        way.prepare()
        said: list[str] = []
        with failing_commit(way, number) as fault:
            try:
                way.walk(said.append)
            except BatchrunError as error:
                assert "\n" not in str(error)
            else:
                assert fault.num_seen < number
        way.check(said)
        way.walk(said.append)
        way.close()
        way.check(said)
        if fault.num_seen < number:
            break

    assert 1 <= fault.num_seen < number
