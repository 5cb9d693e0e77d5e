"""The online part of a step: decodes, prefills, then admissions in their order."""

from __future__ import annotations

from collections.abc import Sequence

from batchrun.scheduling.draft import Draft
from batchrun.scheduling.victims import Victims
from batchrun.scheduling.view import RequestView

MIN_CHUNK_TOKENS = 32
"""A smaller chunk of a longer prefill is not worth its place in the step."""


def place_online(draft: Draft, limit_s: float) -> bool:
    """Give online requests all they want within `limit_s`, at the cost of offline ones.

    False when one has to wait: offline work then takes nothing new.
    """
    decodes, prefills = by_kind(draft.view.online_running)
    draft.decode(decodes)
    for request in prefills:
        left = request.prefill_left_tokens
        chunk = draft.chunk(request.num_computed_tokens, left, limit_s)
        draft.prefill(request, _at_least(chunk, left, draft))
    victims = Victims(draft)
    victims.make_room(0)
    return all(_let_in(draft, victims, request, limit_s) for request in draft.view.online_waiting)


def by_kind(requests: Sequence[RequestView]) -> tuple[list[RequestView], list[RequestView]]:
    """Running requests with work left: those that decode, and the others."""
    decodes: list[RequestView] = []
    prefills: list[RequestView] = []
    for request in requests:
        left = request.work_left_tokens
        if left:
            (decodes if left == 1 and request.num_output_tokens else prefills).append(request)
    return decodes, prefills


def _let_in(draft: Draft, victims: Victims, request: RequestView, limit_s: float) -> bool:
    """Admit an online request, preempting offline ones; False when it must wait for room.

    One whose adapter must wait for other online requests does not hold up those behind it.
    """
    view = draft.view
    if draft.tokens_left <= 0:
        return False
    has_adapter = draft.fits_lora(request)
    if not has_adapter and not victims.can_free_adapter():
        return True
    hit = view.look_up(request)
    left = request.num_tokens - hit.num_tokens
    chunk = _at_least(draft.chunk(hit.num_tokens, left, limit_s), left, draft)
    if chunk == 0:
        return False
    need = view.free_blocks_for(request.num_tokens + 1, hit)
    if need > draft.free_blocks + draft.offline_blocks:
        return False
    if not has_adapter:
        victims.free_adapter()
    victims.make_room(need, slots=1)
    if draft.free_blocks < need or draft.slots_left <= 0:
        return False
    draft.let_in(request, hit, chunk, need)
    return True


def _at_least(chunk: int, left: int, draft: Draft) -> int:
    """Online prefills always move, if by little: a limit of zero would starve them."""
    return max(chunk, min(left, MIN_CHUNK_TOKENS, draft.tokens_left))
