"""Routers by name. A new one is a file beside this one, its test, and a line in `ROUTERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from batchrun.routing.old_router import Call, Load, Router


class Least(Router):
    """The engine with the fewest calls in flight, of those the one that had the fewest calls.

    A prefix group stays together: its rows rank the engine first that has its number, counted over
    all engines there were, and after that the engines by prompt tokens in flight. While that engine
    is away another has its groups, and all others keep theirs.
    """

    def __init__(self) -> None:
        self._seen: list[int] = []

    def rank(self, call: Call, loads: Mapping[int, Load], now_s: float) -> list[int]:
        """See `Router`. O(n log n) in the engines."""
        if call.group is None:
            return sorted(loads, key=lambda i: (loads[i].num_in_flight, loads[i].num_sent))
        if not loads:
            return []
        self._seen += [engine for engine in loads if engine not in self._seen]
        turn, place = divmod(call.group, len(self._seen))
        own = self._seen[place]
        engines = list(loads)
        if own not in loads:
            own = engines[turn % len(engines)]
        engines.remove(own)
        return [own, *sorted(engines, key=lambda i: loads[i].tokens_in_flight)]


DEFAULT_ROUTER = "least"
ROUTERS: dict[str, Callable[[], Router]] = {
    "least": Least,
}


def make_router(name: str = DEFAULT_ROUTER) -> Router:
    """A new router of this name. Raises ValueError for a name that is not in `ROUTERS`."""
    if name not in ROUTERS:
        raise ValueError(f"no router is called {name!r}; there are {', '.join(ROUTERS)}")
    return ROUTERS[name]()
