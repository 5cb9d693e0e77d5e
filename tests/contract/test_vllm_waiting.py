"""vLLM's processes call our nap where they would spin, if told so and only then."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from vllm.distributed.device_communicators import shm_broadcast

from batchrun.vllm_waiting import NAPPING, WAIT_VARIABLE, nap, register


@pytest.mark.parametrize(("told", "naps"), [(NAPPING, True), ("", False), (None, False)])
def test_waiting_readers_nap_when_told_so(
    monkeypatch: pytest.MonkeyPatch, told: str | None, *, naps: bool
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
