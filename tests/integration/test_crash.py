"""The faults of the manual, and a short run of the kills of `python -m benchmarks.crash`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_faults import ENGINE_FAULTS
from fault_trial import Fault, SkippedFaultError
from job_faults import JOB_FAULTS
from postgres_server import PostgresServer
from store_faults import STORE_FAULTS

from batchrun.failpoints import NAMES
from benchmarks.crash import KillEpisode, event_plans, plan_targets
from benchmarks.crash_events import EVENTS, EventEpisode

FAULTS = (*STORE_FAULTS, *ENGINE_FAULTS, *JOB_FAULTS)
NUM_KILLS, NUM_KILLS_AT_NIGHT = 6, 36
NUM_EVENTS = 2 * len(EVENTS)
SEED = 20
TRIED_FAULTS = (
    "disk full (store)",
    "truncated log",
    "clock stepped",
    "half-written output",
)
"""One of each kind; the others are made at night."""

pytestmark = pytest.mark.slow


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("at", range(4))
def test_whatever_happens_to_a_deployment_that_lives_its_jobs_end(
    tmp_path: Path, postgres: PostgresServer, at: int
) -> None:
    """Each kind of event twice, on both stores, with one engine and with two."""
    plans = event_plans(NUM_EVENTS, SEED, None)
    assert len(plans) == 4
    episode = EventEpisode(tmp_path / "e", plans[at], postgres.new_database() if at % 2 else None)
    episode.run()

    assert episode.problems == []
    assert len(episode.events) == len(plans[at].events)
    assert [event for event in episode.events if event.is_due and event.noticed_s is None] == []


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
