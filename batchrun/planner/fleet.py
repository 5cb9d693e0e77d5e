"""Step 1: the smallest number of engines that keeps the promise in the peak; the cheapest kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchrun.planner.alone import HopelessCalls, context_tokens, hopeless_calls
from batchrun.planner.kinds import EngineKind
from batchrun.planner.peak import PeakLoad, attainment
from batchrun.planner.promise import Attainment, Promise
from batchrun.planner.search import smallest
from batchrun.types import ProgressSink

MAX_ENGINES = 1024


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the search found for one kind. `num_engines` is None where nothing holds.

    `tried` are the simulated numbers, the smallest first; none when `hopeless` rules all out.
    """

    kind: EngineKind
    num_engines: int | None
    tried: tuple[Attainment, ...]
    hopeless: tuple[HopelessCalls, ...]
    most_engines: int = MAX_ENGINES

    @property
    def is_impossible(self) -> bool:
        """Too many calls miss their bounds alone: no number of engines helps."""
        return any(each.is_too_many for each in self.hopeless)

    @property
    def price_per_hour(self) -> float | None:
        """Of the engines found; None without a price or an answer."""
        return None if self.num_engines is None else self.kind.price_per_hour(self.num_engines)

    def of(self, num_engines: int) -> Attainment | None:
        """What so many engines attain, if that was simulated."""
        return next((each for each in self.tried if each.num_engines == num_engines), None)


def size_fleet(
    load: PeakLoad,
    kind: EngineKind,
    promise: Promise,
    most_engines: int = MAX_ENGINES,
    progress: ProgressSink | None = None,
) -> Fleet:
    """The smallest number of engines of the kind up to `most_engines`."""
    hopeless = tuple(hopeless_calls(load, kind.engine, promise))
    if any(each.is_too_many for each in hopeless):
        return Fleet(kind, None, (), hopeless, most_engines)
    fitting = load.within(context_tokens(kind.engine))
    tried: dict[int, Attainment] = {}

    def holds(num_engines: int) -> bool:
        def report(stage: str, done: int, total: int) -> None:
            if progress is not None:
                progress(f"{stage} the peak on {num_engines:,} of {kind.name}", done, total)

        tried[num_engines] = attainment(fitting, kind.engine, num_engines, promise, report)
        return tried[num_engines].holds(promise)

    found = smallest(holds, most_engines)
    return Fleet(kind, found, tuple(tried[num] for num in sorted(tried)), hopeless, most_engines)


def cheapest(fleets: Sequence[Fleet]) -> Fleet | None:
    """The fleet with the lowest price, of equals the one with the fewest engines."""
    able = [fleet for fleet in fleets if fleet.num_engines is not None]
    return min(able, key=lambda each: (each.price_per_hour or 0.0, each.num_engines), default=None)
