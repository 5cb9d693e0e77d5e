"""Which engine takes the next call: the one with the fewest in flight in this worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from batchrun.gateway.upstreams import Upstream

COOLDOWN_S = 5.0


@dataclass(slots=True)
class _Load:
    num_in_flight: int = 0
    num_calls: int = 0
    down_until_s: float = 0.0


class Balancer:
    """Counts calls per engine. `now_s` is any monotonic clock, the same one in all calls."""

    def __init__(self) -> None:
        self._loads: dict[Upstream, _Load] = {}

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        """The engines known now."""
        return tuple(self._loads)

    def replace(self, upstreams: Sequence[Upstream]) -> None:
        """Take over a new list; counts of engines that stay are kept, running calls go on."""
        self._loads = {upstream: self._loads.get(upstream, _Load()) for upstream in upstreams}

    def candidates(self, *, now_s: float, is_offline: bool = False) -> list[Upstream]:
        """All engines, best first; those that are the last choice come late, and those that lately
        refused a connection last. An offline call goes first where it can give way to others."""

        def key(upstream: Upstream) -> tuple[bool, bool, bool, int, int]:
            load = self._loads[upstream]
            is_down = load.down_until_s > now_s
            is_unfit = is_offline and not upstream.runs_offline_calls
            calls = load.num_in_flight, load.num_calls
            return (is_down, upstream.is_last_choice, is_unfit, *calls)

        return sorted(self._loads, key=key)

    def mark_down(self, upstream: Upstream, *, now_s: float) -> None:
        """Try others first for a while, because this engine could not be reached."""
        if upstream in self._loads:
            self._loads[upstream].down_until_s = now_s + COOLDOWN_S

    @contextmanager
    def call(self, upstream: Upstream) -> Iterator[None]:
        """Count a call as in flight while the block runs."""
        load = self._loads.get(upstream, _Load())
        load.num_in_flight += 1
        load.num_calls += 1
        try:
            yield
        finally:
            load.num_in_flight -= 1
