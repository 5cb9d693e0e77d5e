"""vLLM's waiting queue, holding everything and showing only what this step's plan admits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from batchrun.scheduling.view import BY_ARRIVAL, RequestView
from batchrun.types import RequestClass

_BY_RANK = attrgetter("epoch", "rank", "arrival_at_s", "request_id")


class PlanQueue(RequestQueue):
    """All waiting and preempted requests, by class.

    `len`, iteration and removal see everything, so that aborts, counts and pauses work as in
    vLLM; truth, `peek_request` and `pop_request` see only what `expose` named. `online` is in
    order of priority, then arrival, and `offline` in planned order. `views` holds a view of every
    live request; a preempted request that ends is freed, view and all, before vLLM takes it out.
    """

    def __init__(self, views: Mapping[str, RequestView]) -> None:
        self._views = views
        self._waiting: dict[str, RequestView] = {}
        self._exposed: list[Request] = []
        self.online: list[RequestView] = []
        self.offline: list[RequestView] = []

    def expose(self, requests: Sequence[Request]) -> None:
        """Let vLLM's waiting loop see these, in this order, until the next call."""
        self._exposed = list(reversed(requests))

    def add_request(self, request: Request) -> None:
        """Add a request at the place of its class's order."""
        view = self._views[request.request_id]
        self._waiting[request.request_id] = view
        if view.request_class is RequestClass.ONLINE:
            insort(self.online, view, key=BY_ARRIVAL)
        else:
            insort(self.offline, view, key=_BY_RANK)

    def prepend_request(self, request: Request) -> None:
        """Add a request; the plan, not the queue, decides who goes first."""
        if request.request_id not in self._waiting:
            self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Add several requests."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """The next exposed request. Raises IndexError when there is none."""
        return self._exposed[-1]

    def pop_request(self) -> Request:
        """Take the next exposed request out. Raises IndexError when there is none."""
        request = self._exposed.pop()
        self._take_out(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Take a request out. Raises ValueError when it is not there, as a deque does."""
        if request.request_id not in self._waiting:
            raise ValueError(f"{request.request_id} is not waiting")
        self._take_out(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those of the requests that are there."""
        for request in requests:
            if request.request_id in self._waiting:
                self._take_out(request)

    def check(self) -> None:
        """Recount; raises AssertionError when the two orders and the whole disagree."""
        listed = [view.request_id for view in (*self.online, *self.offline)]
        assert sorted(listed) == sorted(self._waiting)
        assert self.online == sorted(self.online, key=BY_ARRIVAL)
        assert self.offline == sorted(self.offline, key=_BY_RANK)

    def _take_out(self, request: Request) -> None:
        view = self._waiting.pop(request.request_id)
        if view.request_class is RequestClass.ONLINE:
            del self.online[bisect_left(self.online, BY_ARRIVAL(view), key=BY_ARRIVAL)]
        else:
            del self.offline[bisect_left(self.offline, _BY_RANK(view), key=_BY_RANK)]

    def __bool__(self) -> bool:
        return bool(self._exposed)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter([view.handle for view in self._waiting.values()])
