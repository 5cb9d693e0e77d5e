"""vLLM's processes call our nap where they would spin, if told so and only then."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
from vllm.distributed.device_communicators import shm_broadcast

from batchrun.vllm_waiting import NAPPING, PR_SET_TIMERSLACK, WAIT_VARIABLE, nap, register

PR_GET_TIMERSLACK = 30
prctl = ctypes.CDLL(None).prctl


@pytest.fixture(autouse=True)
def timer_slack_ns() -> Iterator[int]:
    """What it was before, and is again afterwards."""
    slack_ns: int = prctl(PR_GET_TIMERSLACK)
    yield slack_ns
    prctl(PR_SET_TIMERSLACK, slack_ns)


@pytest.mark.parametrize(("told", "naps"), [(NAPPING, True), ("", False), (None, False)])
def test_waiting_readers_nap_when_told_so(
    monkeypatch: pytest.MonkeyPatch, timer_slack_ns: int, told: str | None, *, naps: bool
) -> None:
    called_by_readers = shm_broadcast.SpinCondition.wait.__globals__
    monkeypatch.setitem(called_by_readers, "sched_yield", called_by_readers["sched_yield"])
    monkeypatch.delenv(WAIT_VARIABLE, raising=False)
    if told is not None:
        monkeypatch.setenv(WAIT_VARIABLE, told)

    (plugin,) = entry_points(group="vllm.general_plugins", name="batchrun")
    plugin.load()()

    assert plugin.load() is register
    assert (called_by_readers["sched_yield"] is nap) == naps
    assert prctl(PR_GET_TIMERSLACK) == (1 if naps else timer_slack_ns)
