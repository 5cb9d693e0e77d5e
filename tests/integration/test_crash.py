"""The faults of the manual, and a short run of the kills of `python -m benchmarks.crash`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_faults import ENGINE_FAULTS
from fault_trial import Fault, SkippedFaultError
from job_faults import JOB_FAULTS
from store_faults import STORE_FAULTS

from batchrun.failpoints import NAMES
from benchmarks.crash import KillEpisode, plan_targets

FAULTS = (*STORE_FAULTS, *ENGINE_FAULTS, *JOB_FAULTS)
NUM_KILLS, NUM_KILLS_AT_NIGHT = 6, 36
SEED = 20
TRIED_FAULTS = (
    "disk full (store)",
    "truncated log",
    "clock stepped",
    "half-written output",
)
"""One of each kind; the others are made at night."""

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_random_kills_lose_double_and_repeat_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path / "k", NUM_KILLS)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_many_kills_hit_rows_in_flight_and_open_transactions_at_every_failpoint(
    tmp_path: Path,
) -> None:
    run = check_kills(tmp_path / "k", NUM_KILLS_AT_NIGHT)

    assert sum(kill.num_in_flight > 0 for kill in run.kills) >= 0.8 * NUM_KILLS_AT_NIGHT
    assert sum(kill.is_inside for kill in run.kills) >= 0.3 * NUM_KILLS_AT_NIGHT
    assert set(run.points.num_passes) == set(NAMES)


def check_kills(folder: Path, num_kills: int) -> KillEpisode:
    """Random kills of one deployment whose jobs come and go; nothing may be lost by them."""
    rng = random.Random(SEED)
    episode = KillEpisode(folder, rng, plan_targets(rng, num_kills))
    episode.run()
    assert episode.problems == []
    assert len(episode.kills) == num_kills
    return episode


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault,
            id=fault.name.replace(" ", "-"),
            marks=() if fault.name in TRIED_FAULTS else pytest.mark.nightly,
        )
        for fault in FAULTS
    ],
)
def test_a_fault_has_the_outcome_that_the_manual_says(fault: Fault, tmp_path: Path) -> None:
    try:
        fault.run(tmp_path / "t")
    except SkippedFaultError as error:
        pytest.skip(str(error))
