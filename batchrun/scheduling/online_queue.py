"""The online part of a step: decodes, then prompts, begun or waiting, in a queue's order.

An order of the queue is a class like `ArrivalOrder`, and most need no more than an `order` of their
own; `policies.QUEUES` names them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from batchrun.scheduling.draft import MIN_CHUNK_TOKENS, Draft
from batchrun.scheduling.kv_plan import KvPlan
from batchrun.scheduling.online_cost import OnlineCost
from batchrun.scheduling.slack import Practice, StepLimits, step_limits
from batchrun.scheduling.view import EngineView, RequestView
from batchrun.scheduling.worth import Victims

RISK_SHARE = 0.5
"""A first token is at risk when more of its TTFT bound than this will have gone by."""
ONLINE_MEMORY_S = 60.0
"""So long after the last online request an arrival is still expected at any moment."""


class OnlineQueue(Protocol):
    """How the online calls of one engine are served. May remember what it saw in earlier steps.

    `num_left_out` calls cannot be in time in the order of the last step, as far as it tells;
    `ttft_seen_at_s` has the TTFT bounds of late, and when a call with each was there.
    """

    num_left_out: int
    ttft_seen_at_s: dict[float, float]

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """The `begun` prompts, of calls that run, and the waiting calls of the view, in the order
        in which they get their parts of the step."""
        ...

    def limits(self, view: EngineView) -> StepLimits:
        """How long the step after those in flight may take. Called once a step, first."""
        ...

    def fill(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        """Give those of `order` their parts of the step within `limit_s`, at the cost of offline
        work; every one that is begun gets a part, of no tokens if need be.

        False when one has to wait: offline work then takes nothing new.
        """
        ...


class ArrivalOrder:
    """First come, first served, by vLLM's priority first: nobody overtakes who waits for room."""

    def __init__(self) -> None:
        self.num_left_out = 0
        self.ttft_seen_at_s: dict[float, float] = {}
        self._kv_plan = KvPlan()
        self._practice = Practice()
        self._cost = OnlineCost()

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """As the engine shows them, those that are begun first."""
        return [*begun, *view.online_waiting]

    def limits(self, view: EngineView) -> StepLimits:
        """What the bounds of all calls of the last minute leave, their KV, and `online_cost`."""
        bounds_s = self._ttft_bounds_of_late(view)
        lately, least_s = bool(bounds_s) or view.were_calls_lately, min(bounds_s, default=math.inf)
        limits = step_limits(view, was_online_lately=lately, least_ttft_s=least_s)
        is_idle = not view.online_running and not view.online_waiting
        most_s = math.inf
        if not is_idle:
            most_s = self._kv_plan.most_s(view)
        elif not limits.are_sat_out(view):
            most_s = self._practice.most_s(view)
        cost_s = self._cost.most_s(view)
        if is_idle and not lately:
            cost_s = math.inf
        return replace(limits, offline_s=min(limits.offline_s, most_s, cost_s))

    def fill(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        """One after the other, until one has to wait."""
        return fill_in_order(draft, prompts, limit_s, victims)

    def _ttft_bounds_of_late(self, view: EngineView) -> Collection[float]:
        """The TTFT bounds of all online requests of the last minute: few, one for each class. Those
        without one have what the view says."""
        bounds_s = {
            call.slo_ttft_s if call.has_class else math.inf
            for calls in (view.online_running, view.online_waiting)
            for call in calls
        }
        for ttft_s in bounds_s:
            self.ttft_seen_at_s[ttft_s] = view.now_s
        for ttft_s, seen_at_s in list(self.ttft_seen_at_s.items()):
            if view.now_s - seen_at_s >= ONLINE_MEMORY_S:
                del self.ttft_seen_at_s[ttft_s]
        return self.ttft_seen_at_s


def place_online(draft: Draft, queue: OnlineQueue, limit_s: float) -> bool:
    """Give online requests all they want within `limit_s`, at the cost of offline ones.

    False when one has to wait: offline work then takes nothing new.
    """
    _, begun = draft.view.online_by_kind()
    draft.decode_calls()
    victims = Victims(draft)
    victims.make_room(0)
    has_room = queue.fill(draft, queue.order(draft.view, begun), limit_s, victims)
    victims.make_room(0)
    return has_room


def fill_in_order(
    draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
) -> bool:
    """Give begun prompts and waiting calls their parts, one after the other; once a waiting one
    finds no room, no other is let in. False then."""
    begun, has_room = begun_ids(draft.view), True
    num_left = len(begun)
    for request in prompts:
        if id(request) in begun:
            go_on(draft, request, limit_s)
            num_left -= 1
        elif has_room:
            has_room = admit_call(draft, victims, request, limit_s)
        elif not num_left:
            break
    return has_room


def begun_ids(view: EngineView) -> set[int]:
    """`id` of each running call whose prompt is not complete."""
    return set(map(id, view.online_by_kind()[1]))


def go_on(draft: Draft, request: RequestView, limit_s: float) -> None:
    """Let a call that runs compute as much of its prompt as there is time for."""
    left = request.prefill_left_tokens
    chunk = draft.chunk(request.num_computed_tokens, left, limit_s)
    draft.prefill(request, _at_least(chunk, left, draft, request))


def admit_call(draft: Draft, victims: Victims, request: RequestView, limit_s: float) -> bool:
    """Admit an online request, preempting offline ones; False when it must wait for room.

    One whose adapter must wait for other online requests does not hold up those behind it.
    """
    view = draft.view
    if draft.tokens_left <= 0:
        return False
    if not victims.may_have_adapter(request):
        return True
    hit = view.look_up(request)
    left = request.num_tokens - hit.num_tokens
    chunk = _at_least(draft.chunk(hit.num_tokens, left, limit_s), left, draft, request)
    if chunk == 0:
        return False
    need = view.free_blocks_for(request.num_tokens + 1, hit)
    room = need + draft.promised_blocks + view.watermark_blocks
    if room > draft.free_blocks + draft.offline_blocks:
        return False
    if not draft.fits_lora(request):
        victims.free_adapter()
    victims.make_room(room, slots=1)
    if draft.free_blocks < room or draft.slots_left <= 0:
        return False
    draft.admit(request, hit, chunk, need)
    return True


def _at_least(chunk: int, left: int, draft: Draft, request: RequestView) -> int:
    """The chunk of an online prefill, or a small one past the limit.

    A prefill moves where it is the first of the step, as a limit of zero would starve it, and where
    its first token is at risk. Others wait for a step with time: in a burst a small chunk for each
    would break the TPOT of the calls that decode.
    """
    least = min(left, MIN_CHUNK_TOKENS, draft.tokens_left)
    if chunk >= least:
        return chunk
    if draft.load.num_tokens == draft.load.num_decodes:
        return least
    return least if not draft.is_strict and _is_at_risk(request, draft) else chunk


def _is_at_risk(request: RequestView, draft: Draft) -> bool:
    """Whether the line takes much of the time until a first token is due. What is late is lost."""
    waited_s = draft.view.now_s - request.arrival_at_s
    ttft_s = request.slo_ttft_s
    return waited_s < ttft_s < (waited_s + draft.view.backlog_s()) / RISK_SHARE
