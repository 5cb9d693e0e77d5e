"""What stands before a simulated engine: its API server, which takes one request after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from batchrun.vllm_plugin.virtual import TrafficSource
from batchrun.vllm_plugin.virtual.requests import Arrival


@dataclass(frozen=True, slots=True)
class FrontEndTimes:
    """What the server needs for a request, and beside that for each token of its prompt."""

    request_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_prompt_tokens: int) -> float:
        """For one request."""
        return self.request_s + self.token_s * num_prompt_tokens


class FrontEnd:
    """Hands requests on when they are rendered and tokenized: first come, first served.

    A `TrafficSource` of one engine. Waiting here counts as waiting: arrivals keep their instants.
    """

    def __init__(self, sources: Sequence[TrafficSource], times: FrontEndTimes) -> None:
        self._sources = sources
        self._times = times
        self._rendered: deque[tuple[float, Arrival]] = deque()
        self._free_at_s = 0.0

    @property
    def next_due_s(self) -> float:
        """When a request is rendered, or may come."""
        first_s = min(source.next_due_s for source in self._sources)
        return min(first_s, self._rendered[0][0]) if self._rendered else first_s

    def take_due(self, now_s: float) -> list[Arrival]:
        """The requests rendered by now."""
        new = [arrival for source in self._sources for arrival in source.take_due(now_s)]
        for arrival in sorted(new, key=attrgetter("arrival_at_s")):
            begin_s = max(self._free_at_s, arrival.arrival_at_s)
            self._free_at_s = begin_s + self._times.seconds(len(arrival.prompt_token_ids))
            self._rendered.append((self._free_at_s, arrival))
        due: list[Arrival] = []
        while self._rendered and self._rendered[0][0] <= now_s:
            due.append(self._rendered.popleft()[1])
        return due

    def on_finished(self, request_id: str) -> None:
        """The sources want to know."""
        for source in self._sources:
            source.on_finished(request_id)
