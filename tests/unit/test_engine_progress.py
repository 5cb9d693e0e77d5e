"""An engine that has work must get on with it; its health proves nothing."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from batchrun.engine.progress import (
    SILENCE,
    SILENT_S,
    UNKNOWN_STEP_S,
    Look,
    Progress,
    look_at_page,
    step_bound_s,
    without_held,
)
from batchrun.wire import StepTelemetry, Telemetry


def watched(
    seconds: int, mark: Hashable = "same", *, has_work: bool = True, bound_s: float = SILENT_S
) -> Progress:
    """An engine that showed the same for so long, looked at every second."""
    progress = Progress()
    for now_s in range(seconds + 1):
        progress.see(Look(mark, has_work, bound_s), float(now_s))
    return progress


def test_work_without_progress_is_doubtful_first_and_then_a_hang() -> None:
    assert not watched(4).is_doubtful
    assert watched(5).is_doubtful and not watched(29).is_hung
    assert watched(30).is_hung
    assert (watched(30).num_hangs, watched(90).num_hangs) == (1, 1)


def test_an_engine_without_work_owes_no_progress() -> None:
    assert watched(1_000, has_work=False).stalled_s == 0


def test_a_sign_of_progress_ends_the_count() -> None:
    progress = watched(40)
    progress.see(Look("another", has_work=True), 41.0)

    assert (progress.stalled_s, progress.is_hung, progress.num_hangs) == (0, False, 1)


def test_a_watcher_that_was_stopped_himself_blames_nobody() -> None:
    progress = watched(3)
    progress.see(Look("same", has_work=True), 600.0)

    assert not progress.is_hung and progress.stalled_s == 6


def test_an_engine_that_is_started_anew_begins_with_nothing() -> None:
    progress = watched(40)
    progress.begin_again()
    progress.see(Look("same", has_work=True), 41.0)

    assert (progress.stalled_s, progress.num_hangs) == (0, 1)


@pytest.mark.parametrize(
    ("step", "bound_s"),
    [
        (StepTelemetry(), UNKNOWN_STEP_S),
        (StepTelemetry(1_000, 1_000, 0.0, 20.0, 2.0, 0.1, 500), SILENT_S),
        (StepTelemetry(10, 10, 0.0, 600.0, 60.0, 60.0, 2_048), 1_200.0),
        # Decodes of 0.3 s, and a prompt: a full step, a part of one, or one that was stuck.
        (StepTelemetry(201, 201, 0.0, 100.0, 40.0, 40.0, 2_048), 160.0),
        (StepTelemetry(201, 201, 0.0, 60.0, 0.5, 0.5, 32), 65.0),
        (StepTelemetry(5_000, 5_000, 0.0, 60.0, 0.05, 0.02, 4), SILENT_S),
        (StepTelemetry(20_001, 20_001, 0.0, 6_900.0, 900.0, 40.0, 2_048), UNKNOWN_STEP_S),
    ],
)
def test_a_step_may_take_many_times_as_long_as_others(step: StepTelemetry, bound_s: float) -> None:
    assert step_bound_s(Telemetry("start", 1.0, "echo", 2_048, True, step=step)) == bound_s


def page(num_running: str = "3", num_steps: int = 7) -> str:
    return (
        "# HELP vllm:num_requests_running x\n"
        f'vllm:num_requests_running{{engine="0"}} {num_running}\n'
        'vllm:num_requests_waiting{engine="0"} 0.0\n'
        f'vllm:iteration_tokens_total_count{{engine="0"}} {num_steps}\n'
        f"process_cpu_seconds_total {num_steps * 13}\n"
    )


def test_any_counter_of_the_core_that_moves_is_progress() -> None:
    before, same, later = look_at_page(page()), look_at_page(page()), look_at_page(page("3", 8))

    assert before == same and before.has_work
    assert later.mark != before.mark


ASLEEP = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'


@pytest.mark.parametrize(
    ("text", "has_work"),
    [
        ("", None),
        ("vllm:num_requests_running", None),
        (page("0.0"), False),
        (page("many"), False),
        (page("0.0") + ASLEEP, False),
    ],
)
def test_a_page_without_queues_does_not_tell_of_work(text: str, *, has_work: bool | None) -> None:
    assert look_at_page(text).has_work is has_work


def test_an_engine_that_sleeps_has_its_work_still_and_owes_no_progress() -> None:
    progress, asleep = Progress(), look_at_page(page() + ASLEEP)
    for now_s in range(400):
        progress.see(asleep, float(now_s), newest_s=1.0)
    assert asleep.has_work and progress.is_doubtful and progress.stalled_s == 0
    progress.see(look_at_page(page()), 400.0)
    assert not progress.is_doubtful


def test_what_a_scheduler_told_long_ago_holds_no_work_back() -> None:
    heard = 100.0, Telemetry("start", 1.0, "echo", 2_048, is_offline_on=False)
    looks = [without_held(look_at_page(page()), heard, now_s) for now_s in (104.0, 106.0)]
    assert [look.has_work for look in looks] == [False, True]


def test_an_engine_that_says_nothing_has_the_short_bound() -> None:
    assert (SILENCE.has_work, SILENCE.bound_s) == (True, SILENT_S)
