"""Echo's scheduler (arXiv 2504.03651, sections 4 and 5), as this project builds it.

Each step starts from the last batch and makes minor changes: let online requests in (first come,
first served), preempt offline ones where online demand needs their blocks or slots, then fill the
time that is left with offline work, the KV already cached first. A generator drafts the steps that
come into question and a selector takes the one with the most benefit per second.
"""

from __future__ import annotations

import math
from collections.abc import Collection

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
        self._ttft_seen_at_s: dict[float, float] = {}

    def plan(self, view: EngineView) -> Plan:
        """The step to run after those in flight."""
        bounds_s = self._ttft_bounds_of_late(view)
        limits = step_limits(
            view,
            was_online_lately=bool(bounds_s),
            least_ttft_s=min(bounds_s, default=math.inf),
        )
        return select(self._generator.generate(view, limits)).finish()

    def _ttft_bounds_of_late(self, view: EngineView) -> Collection[float]:
        """The TTFT bounds of all online requests of the last minute: few, one for each class."""
        bounds_s = {request.slo_ttft_s for request in view.online_running}
        bounds_s.update(request.slo_ttft_s for request in view.online_waiting)
        for ttft_s in bounds_s:
            self._ttft_seen_at_s[ttft_s] = view.now_s
        self._ttft_seen_at_s = {
            ttft_s: seen_at_s
            for ttft_s, seen_at_s in self._ttft_seen_at_s.items()
            if view.now_s - seen_at_s < ONLINE_MEMORY_S
        }
        return self._ttft_seen_at_s
