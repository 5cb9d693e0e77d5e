"""Rows that may have killed an engine: who is a suspect, and how suspects run until they end.

A death costs the loading of a model, so the guilty row is to be found in few of them. Of n suspects
only about sqrt(n) run at once, beside rows that are none; when the engine dies again, these alone
stay suspects. A few are run one by one, with no other row on their engine. Design section 4 halves
the suspects: that takes 8 deaths for 256 rows where this takes 4.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from batchrun.last_steps import RowKey

SOLO = 1
"""The limit of a suspect that runs with no other row on its engine."""
MAX_SOLO_ROWS = 8
"""So few suspects run one by one."""
MAX_SOLO_DEATHS = 2
"""A row that was alone so often when its engine died ends. The first may be someone's `kill`."""
MAX_PRESENCES = 3
"""A row that was there so often is a suspect though no step held it: it may kill its parser."""


@dataclass(slots=True)
class Trials:
    """The suspects among the rows of a job.

    `limits`: the most suspects that may be on an engine together with this one, itself included.
    """

    limits: dict[int, int] = field(default_factory=dict)
    _presences: dict[int, int] = field(default_factory=dict)
    _solo_deaths: dict[int, int] = field(default_factory=dict)

    def was_there(self, row: int) -> bool:
        """An engine died with the row in flight. True when that is no chance any more."""
        self._presences[row] = self._presences.get(row, 0) + 1
        return self._presences[row] >= MAX_PRESENCES

    def accuse(self, row: int, limit: int) -> None:
        """The row is a suspect now, or still."""
        if self.limits.get(row) == SOLO:
            self._solo_deaths[row] = self._solo_deaths.get(row, 0) + 1
        self.limits[row] = limit

    def is_guilty(self, row: int) -> bool:
        """Whether the row kills engines beyond doubt."""
        return self._solo_deaths.get(row, 0) >= MAX_SOLO_DEATHS

    def clear(self, row: int) -> None:
        """The row has ended."""
        for known in (self.limits, self._presences, self._solo_deaths):
            known.pop(row, None)


class InFlight(Protocol):
    """A row that was sent to an engine; `trials` are those of its job."""

    @property
    def trials(self) -> Trials: ...


def accuse_rows(
    in_flight: Mapping[RowKey, InFlight], last_steps: Collection[RowKey]
) -> frozenset[RowKey]:
    """An engine died: make suspects of the rows in flight that its last steps held, or of all when
    they held none. Where these were suspects before, those alone stay it. Returns all accused."""
    haunting = {key for key, sent in in_flight.items() if sent.trials.was_there(key[1])}
    held = {key for key in in_flight if key in last_steps} or set(in_flight)
    tried = {key for key in held if key[1] in in_flight[key].trials.limits}
    accused = frozenset((tried or held) | haunting)
    limit = SOLO if len(accused) <= MAX_SOLO_ROWS else math.isqrt(len(accused))
    for key in accused:
        in_flight[key].trials.accuse(key[1], limit)
    return accused
