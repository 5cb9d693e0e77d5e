"""Echo's scheduler (arXiv 2504.03651, sections 4 and 5), as this project builds it.

Each step starts from the last batch and makes minor changes: let online requests in, in the order
of their queue, preempt offline ones where online demand needs their blocks or slots, then fill the
time that is left with offline work, the KV already cached first. A generator drafts the steps that
come into question and a selector takes the one with the most benefit per second.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchrun.scheduling.draft import LONG_PREFILL_TOKENS, MIN_CHUNK_TOKENS, Draft
from batchrun.scheduling.fill import (
    DecodeTurns,
    admit_followers,
    admit_in_order,
    computing_groups,
    continue_running,
    decode_deferred,
    fits,
    goes_on,
    keep_alive,
    lacks_adapter,
    let_in,
    soon_free_blocks,
    still_running,
    waits_for_calls,
)
from batchrun.scheduling.online_queue import OnlineQueue, place_online
from batchrun.scheduling.patience import Patience, Standstill
from batchrun.scheduling.slack import StepLimits
from batchrun.scheduling.view import EngineView, Plan, PrefixHit, RequestView
from batchrun.scheduling.worth import select

MAX_DRAFTS = 4
"""Long prefixes that one step chooses from."""
PATIENCE_S = 10.0
"""Of the long prefixes, one that stood first for so long is begun before any other."""

Candidate = tuple[RequestView, PrefixHit]


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """Which of Echo's parts are on: the ablations of the paper's figure 6 leave some out.

    `is_kv_aware`: choose among offline candidates by cached KV, else first come, first served.
    `keeps_reserve`: the threshold of section 4.2.
    """

    is_kv_aware: bool = True
    keeps_reserve: bool = True


class EchoPolicy:
    """Plans the steps of one engine. Remembers which rows were overtaken, and since when."""

    def __init__(self, options: EchoOptions, queue: OnlineQueue) -> None:
        self._options = options
        self._queue = queue
        self._patience = Patience()
        self._standstill = Standstill()
        self._head: RequestView | None = None
        self._head_since_s = 0.0
        self._turns = DecodeTurns()
        self._only_begun: set[str] = set()

    def plan(self, view: EngineView) -> Plan:
        """The step to run after those in flight."""
        limits = self._queue.limits(view)
        draft = select(self.generate(view, limits))
        self._turns.put_off(decode_deferred(draft, limits.offline_s))
        self._standstill.note(draft.caps, view.now_s, goes_on=goes_on(draft))
        self._only_begun = draft.only_begun
        self._patience.let_in([row for row in draft.admitted if row.is_offline], view.now_s)
        return draft.finish(self._queue.num_left_out)

    def generate(self, view: EngineView, limits: StepLimits) -> list[Draft]:
        """At least one draft. All share online work, running rows and rows with a cached prefix;
        they differ in the long prefix that they begin, of which one at a time is computed."""
        draft = Draft.begin(view)
        draft.only_begun = self._still_begun(view)
        has_room = place_online(draft, self._queue, limits.online_s)
        if not view.is_offline_on or _must_wait(view, limits, has_room=has_room):
            for request in still_running(draft):
                draft.sit_out(request)
            return [draft]
        continue_running(draft, limits.offline_s, self._turns, self._standstill.pressing(view))
        drafts = self._admit_offline(draft, limits.offline_s) if has_room else [draft]
        if len(drafts) == 1 and drafts[0].tokens_left == view.token_budget:
            keep_alive(drafts[0], limits.offline_s)
        return drafts

    def _still_begun(self, view: EngineView) -> set[str]:
        if not self._only_begun:
            return set()
        return self._only_begun & {row.request_id for row in view.offline_running}

    def _admit_offline(self, draft: Draft, limit_s: float) -> list[Draft]:
        keeps_reserve = self._options.keeps_reserve
        held = self._admit_overdue(draft, limit_s)
        if not self._options.is_kv_aware:
            admit_in_order(draft, limit_s, keeps_reserve=keeps_reserve, held=held)
            return [draft]
        leaders = admit_followers(draft, limit_s, keeps_reserve=keeps_reserve, held=held)
        is_held_up = held is not None and not lacks_adapter(draft, held)
        if draft.has_long_prefill or is_held_up or not leaders:
            return [draft]
        view = draft.view
        soon_free = soon_free_blocks(draft)
        if self._is_overdue(leaders[0][0], view):
            return [self._for_the_head(draft, leaders, limit_s, soon_free)]
        drafts = [
            led
            for request, hit in leaders[:MAX_DRAFTS]
            if (led := self._with_leader(draft, request, hit, limit_s, soon_free)) is not None
        ]
        return drafts or [draft]

    def _admit_overdue(self, draft: Draft, limit_s: float) -> RequestView | None:
        """Let rows in that were overtaken for too long, whatever is reserved. One that waits for
        rows that run, or for the time of a step, is returned: it holds up those behind it, but for
        its adapter only those that need one."""
        view, held = draft.view, None
        for request in self._patience.overdue(view, computing_groups(view)):
            hit = view.look_up(request)
            left = request.num_tokens - hit.num_tokens
            is_long = left > LONG_PREFILL_TOKENS
            is_behind = held is not None and request.lora_id
            if is_behind or not view.is_ready(request) or (is_long and draft.has_long_prefill):
                continue
            soon_free = soon_free_blocks(draft) * is_long
            has_room = fits(
                draft, request, hit, keeps_reserve=False, soon_free=soon_free, is_overdue=True
            )
            if has_room and draft.slots_left > 0 and draft.fits_lora(request):
                chunk_tokens = min(left, draft.room_tokens(request, hit.num_tokens))
                chunk = draft.chunk(hit.num_tokens, chunk_tokens, limit_s)
                if chunk >= min(left, MIN_CHUNK_TOKENS):
                    let_in(draft, request, hit, chunk, is_overdue=True)
                    continue
            elif waits_for_calls(draft, request, hit):
                continue
            held = request
            if not lacks_adapter(draft, request):
                break
        return held

    def _is_overdue(self, head: RequestView, view: EngineView) -> bool:
        if self._head is not head:
            self._head, self._head_since_s = head, view.now_s
        return view.now_s - self._head_since_s > PATIENCE_S

    def _for_the_head(
        self, draft: Draft, leaders: list[Candidate], limit_s: float, soon_free: int
    ) -> Draft:
        """Let the overdue head in, whatever is reserved; hold the others back while rows that run
        are all that it waits for."""
        (head, hit), *others = leaders
        led = self._with_leader(draft, head, hit, limit_s, soon_free, is_overdue=True)
        if led is not None:
            return led
        if not waits_for_calls(draft, head, hit):
            return draft
        for request, other_hit in others[:MAX_DRAFTS]:
            led = self._with_leader(draft, request, other_hit, limit_s, soon_free)
            if led is not None:
                return led
        return draft

    def _with_leader(
        self,
        draft: Draft,
        request: RequestView,
        hit: PrefixHit,
        limit_s: float,
        soon_free: int,
        *,
        is_overdue: bool = False,
    ) -> Draft | None:
        """The draft with one long prefix more; None when it has no slot, room or time."""
        keeps = self._options.keeps_reserve and not is_overdue
        has_room = fits(
            draft, request, hit, keeps_reserve=keeps, soon_free=soon_free, is_overdue=is_overdue
        )
        if not has_room or draft.slots_left <= 0:
            return None
        left = min(request.num_tokens - hit.num_tokens, draft.room_tokens(request, hit.num_tokens))
        chunk = draft.chunk(hit.num_tokens, left, limit_s)
        if chunk < MIN_CHUNK_TOKENS:
            return None
        led = draft.copy()
        let_in(led, request, hit, chunk, is_overdue=is_overdue)
        led.leader, led.leader_left_tokens = request, request.num_tokens - hit.num_tokens
        return led


def _must_wait(view: EngineView, limits: StepLimits, *, has_room: bool) -> bool:
    """Whether rows sit the step out.

    While a call waits for the room of others: the shorter the steps, the sooner those end. And
    while a step is in flight, where the next call is to find one step before it at most.
    """
    if limits.are_sat_out(view):
        return True
    return not has_room and any(request.work_left_tokens for request in view.online_running)
