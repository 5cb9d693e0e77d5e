"""The benchmark of rows over engines: one small case, exact, on the virtual clock."""

from __future__ import annotations

import pytest

from benchmarks.placement import Case, job_of, makespan

SMALL = Case(10)
RUNS = [
    pytest.param((1.0,), float("inf"), 28.86763617644319, 235_627, id="alone"),
    pytest.param((1.0, 0.35), float("inf"), 21.931279433674135, 235_627, id="unlike"),
    pytest.param((1.0, 1.0), 6.0, 27.577387600074818, 262_379, id="one is killed"),
]


@pytest.mark.parametrize(("speeds", "kill_at_s", "taken_s", "computed_tokens"), RUNS)
def test_a_small_job_takes_as_long_on_every_machine(
    speeds: tuple[float, ...], kill_at_s: float, taken_s: float, computed_tokens: int
) -> None:
    found_s, tokens = makespan(job_of(SMALL, seed=0), speeds, 0, kill_at_s)

    assert found_s == pytest.approx(taken_s, abs=1e-6)
    assert tokens == computed_tokens
