"""Every odd engine and every caller in bad faith of `python -m benchmarks.evil`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.evil import try_callers, try_engines
from benchmarks.evil_callers import BAD_CALLERS
from benchmarks.evil_engines import ODD_ENGINES
from benchmarks.records import Record

Trials = Callable[[Path, str], Iterator[Record]]


def test_each_case_has_a_name_of_its_own() -> None:
    names = [engine.name for engine in ODD_ENGINES] + [caller.name for caller in BAD_CALLERS]

    assert len(names) == len(set(names)) == 118 + 51


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("trials", [try_engines, try_callers])
def test_no_promise_is_broken(tmp_path: Path, trials: Trials) -> None:
    found = list(trials(tmp_path, ""))

    assert len(found) > 50
    assert [record for record in found if record["problem"] is not None] == []
