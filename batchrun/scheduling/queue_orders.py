"""Orders of the queue that look at the size of a call and at what of it is cached.

`LarryOrder` is that of LARRY, `GroupsOrder` that of Preble (arXiv 2407.00023, section 4.3). Running
prompts go on first in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from batchrun.scheduling.draft import Draft
from batchrun.scheduling.online_queue import ArrivalOrder, fill_in_order
from batchrun.scheduling.view import EngineView, PrefixHit, RequestView
from batchrun.scheduling.worth import Victims

MEMORY_BLOCK_TOKENS = 16
"""The unit of memory in LARRY's score, whatever the engine's blocks are. The paper gives none; with
blocks of 16 tokens its remark holds that beyond an alpha of 1,000 order is by arrival."""
DEFAULT_ALPHA = 1_000.0
NUM_GROUPS = 10
LOOK_EVERY_STEPS = 8
"""What a waiting call finds in the cache is looked up again after so many steps."""


class CachedHits:
    """What waiting calls find in the KV cache, looked up now and then: one look-up takes longer
    than all the rest of an order."""

    def __init__(self) -> None:
        self._step = 0
        self._known: dict[str, tuple[int, PrefixHit]] = {}

    def of(self, view: EngineView) -> list[PrefixHit]:
        """For each waiting call of the view; once a step."""
        self._step += 1
        known, self._known = self._known, {}
        for request in view.online_waiting:
            entry = known.get(request.request_id)
            if entry is None or self._step - entry[0] >= LOOK_EVERY_STEPS:
                entry = self._step, view.look_up(request)
            self._known[request.request_id] = entry
        return [self._known[request.request_id][1] for request in view.online_waiting]


class LarryOrder(ArrivalOrder):
    """The highest score first: alpha * seconds waited - calls that wait * memory that a call needs.

    The paper's Eq. 1 adds the second term; its text deprives large calls under pressure, which
    only the minus does. `alpha` weighs waiting: with a very large one order is by arrival.
    """

    def __init__(self, alpha: float = DEFAULT_ALPHA) -> None:
        super().__init__()
        self._alpha = alpha
        self._hits = CachedHits()

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """By falling score; priorities count first."""
        num = len(view.online_waiting)
        scored = [
            (
                call.priority,
                num * _memory(view, call, hit) - self._alpha * (view.now_s - call.arrival_at_s),
                place,
                call,
            )
            for place, (call, hit) in enumerate(
                zip(view.online_waiting, self._hits.of(view), strict=True)
            )
        ]
        scored.sort(key=itemgetter(0, 1, 2))
        return [*begun, *(call for *_, call in scored)]


def _memory(view: EngineView, call: RequestView, hit: PrefixHit) -> float:
    """Blocks of 16 tokens for the prompt, but for those that others hold."""
    blocks = view.free_blocks_for(call.num_tokens, hit)
    return blocks * view.block_tokens / MEMORY_BLOCK_TOKENS


class GroupsOrder(ArrivalOrder):
    """Calls in groups by how much of their prompt is cached, 0 to 10 tenths, and in each group by
    arrival; groups take turns, one with g tenths g + 1 times as often as that with none. vLLM's
    priority goes before all.

    As printed, the weight is g: calls of which nothing is cached would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hits = CachedHits()
        self._served = [0.0] * (NUM_GROUPS + 1)
        self._served_last = 0.0
        self._group_of: dict[str, int] = {}

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """By turns; a group that had nobody waiting gets no credit for it."""
        groups: dict[int, list[RequestView]] = {}
        waited, self._group_of = set(self._group_of.values()), {}
        for call, hit in zip(view.online_waiting, self._hits.of(view), strict=True):
            group = min(NUM_GROUPS, NUM_GROUPS * hit.num_tokens // max(1, call.num_tokens))
            groups.setdefault(group, []).append(call)
            self._group_of[call.request_id] = group
        turns: list[tuple[int, float, int, RequestView]] = []
        for group, calls in groups.items():
            if group not in waited:
                self._served[group] = max(self._served[group], self._served_last)
            served = self._served[group]
            for number, call in enumerate(calls, start=1):
                turns.append((call.priority, served + number / (group + 1), -group, call))
        turns.sort(key=itemgetter(0, 1, 2))
        return [*begun, *(call for *_, call in turns)]

    def fill(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        """In that order; those let in have had their turns."""
        has_room = fill_in_order(draft, prompts, limit_s, victims)
        for call in draft.admitted:
            group = self._group_of[call.request_id]
            self._served[group] += 1 / (group + 1)
            self._served_last = self._served[group]
        return has_room
