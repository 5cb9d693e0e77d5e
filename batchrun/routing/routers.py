"""Routers by name. A new one is a file beside this one, its test, and a line in `ROUTERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from batchrun.routing.router import Call, Load, Router


class Least(Router):
    """The engine with the fewest calls in flight, of those the one that had the fewest calls.

    A prefix group stays together: its rows rank the engine first that has its number, counted over
    the engines that are there, and after that the engines by prompt tokens in flight.
    """

    def rank(self, call: Call, loads: Mapping[int, Load], now_s: float) -> list[int]:
        """See `Router`. O(n log n) in the engines."""
        if call.group is None:
            return sorted(loads, key=lambda i: (loads[i].num_in_flight, loads[i].num_sent))
        engines = list(loads)
        if not engines:
            return engines
        own = engines.pop(call.group % len(engines))
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
