"""What a policy decides about a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchrun.estimator import StepLoad
from batchrun.scheduling.view import RequestView


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, decided. Frozen; the plug-in applies it and vLLM carries it out.

    `admit`: waiting requests to let in, in order, online first. `caps`: the most tokens that a
    request may get in this step, by id (0: it sits the step out; absent: as many as vLLM gives).
    `preempt`: running offline requests whose blocks or slot online work needs.
    `predicted_s`: how long the step is expected to take; `load`: what it then computes.
    """

    admit: tuple[RequestView, ...] = ()
    caps: Mapping[str, int] = field(default_factory=dict)
    preempt: tuple[RequestView, ...] = ()
    predicted_s: float = 0.0
    load: StepLoad | None = None
