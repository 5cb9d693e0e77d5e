"""What fails in our part of a step costs that part, never the engine."""

from __future__ import annotations

from typing import Any

import pytest
import scheduler_rig as rig
from vllm.config import LoRAConfig, VllmConfig

from batchrun.scheduling.view import EngineView, Plan
from batchrun.vllm_plugin.scheduler import ColocatedScheduler


class Failing:
    """The scheduler's policy, but in the steps that are named."""

    def __init__(self, policy: Any, steps: set[int]) -> None:
        self._policy, self._steps, self._step = policy, steps, 0

    def plan(self, view: EngineView) -> Plan:
        self._step += 1
        if self._step in self._steps:
            raise ZeroDivisionError
        plan: Plan = self._policy.plan(view)
        return plan


def with_one_adapter() -> ColocatedScheduler:
    def one_lora(config: VllmConfig) -> None:
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1, max_cpu_loras=4)

    return rig.ours(rig.build(change=one_lora))


@pytest.mark.parametrize("fails", ["the policy", "the view"])
def test_a_step_without_a_plan_admits_no_adapter_beside_that_of_rows(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = with_one_adapter()
    scheduler.add_request(rig.make_request("row", row=1, lora=1, max_tokens=20))
    for _ in range(3):
        rig.step(scheduler)
    scheduler.add_request(rig.make_request("other", lora=2, max_tokens=20))
    scheduler.add_request(rig.make_request("plain"))
    with monkeypatch.context() as patch:
        if fails == "the policy":
            scheduler.step_policy = Failing(scheduler.step_policy, {1})
        else:
            patch.setattr(scheduler.view_builder, "view", lambda *_: 1 / 0)
        scheduled = rig.step(scheduler)

    assert "plain" in scheduled and "other" not in scheduled
    assert scheduler.state.num_policy_errors == 1
    rig.run(scheduler)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("estimates", "predict_s"),
        ("estimates", "observe"),
        ("estimates", "reserve_blocks"),
        ("steps", "ended"),
        ("margin", "saw_first"),
    ],
)
def test_calls_are_answered_while_what_watches_them_fails(
    part: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = rig.ours(rig.build())
    monkeypatch.setattr(type(getattr(scheduler.state, part)), name, lambda *_, **__: 1 / 0)
    for row in range(3):
        scheduler.add_request(rig.make_request(f"row-{row}", row=row))
        scheduler.add_request(rig.make_request(f"call-{row}"))

    for _ in range(20):
        rig.step(scheduler)

    assert not [name for name in scheduler.requests if name.startswith("call")]
    assert scheduler.state.num_policy_errors
