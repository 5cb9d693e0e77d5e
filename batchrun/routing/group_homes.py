"""Which engine a row of a job goes to, best first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class RowLoad:
    """Rows that the daemon has on one engine, and the tokens of their prompts."""

    num_in_flight: int = 0
    tokens_in_flight: int = 0

    def add(self, tokens: int) -> None:
        """A row goes to the engine."""
        self.num_in_flight += 1
        self.tokens_in_flight += tokens

    def remove(self, tokens: int) -> None:
        """A row has left it."""
        self.num_in_flight -= 1
        self.tokens_in_flight -= tokens


class GroupHomes:
    """A prefix group stays together: it ranks the engine first that has its number, counted over
    all engines there were, and after that the engines by prompt tokens in flight. While that engine
    is away another has its groups, and all others keep theirs.
    """

    def __init__(self) -> None:
        self._seen: list[int] = []

    def rank(self, group: int, loads: Mapping[int, RowLoad]) -> list[int]:
        """The engines of `loads`, all of them, best first. `loads` always has the same order."""
        if not loads:
            return []
        self._seen += [engine for engine in loads if engine not in self._seen]
        turn, place = divmod(group, len(self._seen))
        own = self._seen[place]
        engines = list(loads)
        if own not in loads:
            own = engines[turn % len(engines)]
        engines.remove(own)
        return [own, *sorted(engines, key=lambda i: loads[i].tokens_in_flight)]
