"""Running sums over the steps of a virtual engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchrun.vllm_plugin.virtual.laws import StepItem, StepLaw


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps so far. A step that computes nothing counts as empty only.

    `online_share_sum` adds, per step, the share of its time that its online tokens cost: by the
    law without noise, [T(step) - T(step without them)] / T(step); 1 when nothing else ran.
    Under Eq. 7 it can be negative: short online decodes lower the mean context of the batch.
    `planning_wall_s` is the measured time of each `schedule()`.
    """

    num_steps: int = 0
    num_empty_steps: int = 0
    busy_s: float = 0.0
    online_share_sum: float = 0.0
    num_online_computed_tokens: int = 0
    num_offline_computed_tokens: int = 0
    planning_wall_s: list[float] = field(default_factory=list)

    def charge(self, law: StepLaw, online: list[StepItem], offline: list[StepItem]) -> float:
        """Count one step and return its duration in seconds."""
        duration_s = law.step_s(online + offline)
        self.num_steps += 1
        self.busy_s += duration_s
        self.num_online_computed_tokens += sum(item[0] for item in online)
        self.num_offline_computed_tokens += sum(item[0] for item in offline)
        if not offline:
            self.online_share_sum += 1.0
        elif online:
            expected = law.expected
            rest_s, whole_s = expected.step_s(offline), expected.step_s(online + offline)
            self.online_share_sum += 1.0 - rest_s / whole_s
        return duration_s
