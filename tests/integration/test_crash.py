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
NUM_KILLS = 24
SEED = 20
TRIED_FAULTS = (
    "disk full (store)",
    "disk full (output)",
    "truncated log",
    "clock stepped",
    "clock past a deadline",
    "connections refused",
    "a row is never answered",
    "half-written output",
    "killed after a submission",
    "gc killed",
)
"""Those that no other test makes; the others are made at night."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kill_run(tmp_path_factory: pytest.TempPathFactory) -> KillEpisode:
    """Random kills of one deployment whose jobs come and go."""
    rng = random.Random(SEED)
    targets = plan_targets(rng, NUM_KILLS)
    episode = KillEpisode(tmp_path_factory.mktemp("k"), rng, targets)
    episode.run()
    return episode


@pytest.mark.timeout(900)
def test_random_kills_lose_double_and_repeat_nothing(kill_run: KillEpisode) -> None:
    assert kill_run.problems == []
    assert len(kill_run.kills) == NUM_KILLS


def test_kills_hit_rows_in_flight_and_open_transactions(kill_run: KillEpisode) -> None:
    num_in_flight = sum(kill.num_in_flight > 0 for kill in kill_run.kills)
    num_inside = sum(kill.is_inside for kill in kill_run.kills)

    assert num_in_flight >= 0.8 * NUM_KILLS
    assert num_inside >= 0.3 * NUM_KILLS


def test_every_failpoint_is_reached(kill_run: KillEpisode) -> None:
    assert set(kill_run.points.num_passes) == set(NAMES)


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
