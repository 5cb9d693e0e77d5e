"""Policies: from what an engine shows before a step to what the step does."""

from batchrun.scheduling.plan import Plan
from batchrun.scheduling.presets import Policy, make_policy
from batchrun.scheduling.view import EngineView, PrefixHit, RequestView

__all__ = ["EngineView", "Plan", "Policy", "PrefixHit", "RequestView", "make_policy"]
