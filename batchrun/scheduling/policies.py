"""Policies by name."""

from __future__ import annotations

from typing import Protocol

from batchrun.scheduling.echo import PRESETS, EchoPolicy
from batchrun.scheduling.view import EngineView, Plan


class Policy(Protocol):
    """Decides a step from what the engine shows."""

    def plan(self, view: EngineView) -> Plan:
        """The step to run after those in flight."""
        ...


def make_policy(name: str) -> Policy | None:
    """The policy of this name; None for `bs`, which is vLLM's own order, untouched."""
    return None if name == "bs" else EchoPolicy(PRESETS[name])
