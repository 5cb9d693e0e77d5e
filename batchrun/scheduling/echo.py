"""Echo's scheduler (arXiv 2504.03651, sections 4 and 5), as this project builds it.

Each step starts from the last batch and makes minor changes: let online requests in (first come,
first served), preempt offline ones where online demand needs their blocks or slots, then fill the
time that is left with offline work, the KV already cached first. A generator drafts the steps that
come into question and a selector takes the one with the most benefit per second.
"""

from __future__ import annotations

from batchrun.scheduling.generator import Generator
from batchrun.scheduling.options import EchoOptions
from batchrun.scheduling.plan import Plan
from batchrun.scheduling.selector import select
from batchrun.scheduling.slack import step_limits
from batchrun.scheduling.view import EngineView

ONLINE_MEMORY_S = 60.0
"""So long after the last online request an arrival is still expected at any moment."""


class EchoPolicy:
    """Plans the steps of one engine."""

    def __init__(self, options: EchoOptions) -> None:
        self._generator = Generator(options)
        self._online_seen_at_s: float | None = None

    def plan(self, view: EngineView) -> Plan:
        """The step to run after those in flight."""
        limits = step_limits(view, was_online_lately=self._was_online_lately(view))
        return select(self._generator.generate(view, limits)).finish()

    def _was_online_lately(self, view: EngineView) -> bool:
        if view.online_running or view.online_waiting:
            self._online_seen_at_s = view.now_s
        seen_at_s = self._online_seen_at_s
        return seen_at_s is not None and view.now_s - seen_at_s < ONLINE_MEMORY_S
