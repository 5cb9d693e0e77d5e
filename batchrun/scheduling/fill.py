"""The offline part of a step: running rows go on, rows whose prefix is cached come in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from batchrun.scheduling.draft import CLOSING_TOKENS, MIN_CHUNK_TOKENS, Draft
from batchrun.scheduling.draft import LONG_PREFILL_TOKENS as LONG
from batchrun.scheduling.view import EngineView, Group, PrefixHit, RequestView, by_kind
from batchrun.scheduling.worth import Victims

MAX_TRIED = 64
"""Candidates whose prefix one step looks up."""
MAX_TRIED_EARLY = 8
"""Rows that have stood still for long of which one step looks for one that can go on."""
MEAN_STEPS = 200
"""Over so many steps the rows that decode are averaged."""
EARLY_STEPS = 512
"""So many steps a new engine puts off no decodes: its model knows little of how steps add up."""
ROOMY_SHARE = 0.4
"""Decodes are put off while this share of all blocks is free: rows keep theirs for longer."""
LITTLE_MORE = 1.25
"""So many times as long as with the least work may a step take for which there is no time."""


class DecodeTurns:
    """Which rows decode before the prompts of a step: as many as could in the steps before it, on
    average, those that were put off first.

    The rows of a document come to decode together. Decodes read KV, prompts use arithmetic, and a
    GPU does both at once: so decodes are spread over the steps beside calls.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean_rows = 0.0
        self._put_off_at: dict[str, int] = {}

    def first(self, draft: Draft, able: Sequence[RequestView]) -> Sequence[RequestView]:
        """Those of rows that could decode which do so before prompts; once a step."""
        self._num_steps += 1
        self._mean_rows += (len(able) - self._mean_rows) / min(self._num_steps, MEAN_STEPS)
        view, most = draft.view, math.ceil(self._mean_rows)
        room_blocks = draft.free_blocks - draft.promised_blocks
        is_roomy = room_blocks >= ROOMY_SHARE * view.total_blocks
        can_wait = view.online_running and is_roomy and self._num_steps > EARLY_STEPS
        if len(able) <= most or not can_wait:
            return able
        return sorted(able, key=self._turn)[:most]

    def _turn(self, row: RequestView) -> int:
        """The step since which it is put off; flex calls never are."""
        return self._put_off_at.get(row.request_id, self._num_steps) if row.is_row else -1

    def put_off(self, rows: Iterable[RequestView]) -> None:
        """These are told not to decode in the step."""
        self._put_off_at = {row.request_id: self._turn(row) for row in rows}


def continue_running(
    draft: Draft, limit_s: float, turns: DecodeTurns, pressing: Sequence[RequestView]
) -> None:
    """Offline requests that run already: decodes first, then prefills in order. Decodes whose turn
    it is not are put off, see `decode_deferred`. Of those that are `pressing` one gets its next
    token before the others, and one a chunk.

    Where none of them finds the blocks to go on, one gives way to the others, least loss first.
    """
    early = _decode_early(draft, pressing, limit_s)
    decodes, prefills = by_kind(still_running(draft))
    able = draft.with_blocks([row for row in decodes if row is not early])
    if not able and early is None and _are_stuck(draft, decodes, prefills):
        Victims(draft).make_room(draft.free_blocks + 1)
        decodes, prefills = by_kind(still_running(draft))
        able = draft.with_blocks(decodes)
    first = turns.first(draft, able)
    ahead = _prefill_ahead(draft, pressing, limit_s)
    first = first[: _decode_most(draft, first, limit_s, ahead)]
    going = set(map(id, first if early is None else [early, *first]))
    if len(going) < len(decodes):
        for request in decodes:
            if id(request) not in going:
                draft.sit_out(request)
        draft.deferred = [request for request in able if id(request) not in going]
    if ahead is not None:
        prefills.sort(key=lambda row: row is not ahead)
    for request in prefills:
        computed = request.num_computed_tokens
        left = min(request.prefill_left_tokens, draft.room_tokens(request, computed))
        chunk = draft.chunk(computed, left, limit_s)
        draft.prefill(request, chunk if chunk >= min(left, MIN_CHUNK_TOKENS) else 0)


def _decode_early(
    draft: Draft, pressing: Sequence[RequestView], limit_s: float
) -> RequestView | None:
    """Let the first pressing row decode for which there are time and blocks."""
    decodes, _ = by_kind(pressing)
    for request in decodes[:MAX_TRIED_EARLY]:
        if request not in draft.preempted and draft.decode_rows([request], limit_s):
            return request
    return None


def _prefill_ahead(
    draft: Draft, pressing: Sequence[RequestView], limit_s: float
) -> RequestView | None:
    """The first pressing row for whose least chunk there are time and blocks."""
    _, prefills = by_kind(pressing)
    for request in prefills[:MAX_TRIED_EARLY]:
        computed = request.num_computed_tokens
        least = min(request.prefill_left_tokens, MIN_CHUNK_TOKENS)
        if request in draft.preempted or draft.room_tokens(request, computed) < least:
            continue
        if draft.chunk(computed, least, limit_s) == least:
            return request
    return None


def still_running(draft: Draft) -> Sequence[RequestView]:
    """Offline requests that run and that the draft has not preempted."""
    running = draft.view.offline_running
    if not draft.preempted:
        return running
    gone = set(map(id, draft.preempted))
    return [request for request in running if id(request) not in gone]


def _are_stuck(
    draft: Draft, decodes: Sequence[RequestView], prefills: Sequence[RequestView]
) -> bool:
    """Whether several rows run and none of them finds blocks, nor is about to end."""
    num = len(decodes) + len(prefills)
    if num < 2 or num < len(draft.view.offline_running) - len(draft.preempted):
        return False
    least = [min(each.prefill_left_tokens, MIN_CHUNK_TOKENS) for each in prefills]
    return all(
        draft.room_tokens(each, each.num_computed_tokens) < tokens
        for each, tokens in zip(prefills, least, strict=True)
    )


def _decode_most(
    draft: Draft, requests: Sequence[RequestView], limit_s: float, ahead: RequestView | None = None
) -> int:
    """Let as many of the first requests decode as fit, beside the least chunk of a prefill that is
    `ahead` of them; returns how many. O(log) predictions."""
    trial = draft
    if ahead is not None:
        trial = draft.copy()
        trial.prefill(ahead, min(ahead.prefill_left_tokens, MIN_CHUNK_TOKENS))
    num, size = 0, 1 << (len(requests) - 1).bit_length()
    while size and num < len(requests):
        part = requests[num : num + size]
        if trial.decode_rows(part, limit_s):
            num += len(part)
        size //= 2
    if ahead is not None:
        draft.decode_rows(requests[:num], limit_s)
    return num


def decode_deferred(draft: Draft, limit_s: float) -> Sequence[RequestView]:
    """Let rows whose decodes were put off decode in the time that prompts have left; returns those
    for which there is none."""
    left = draft.with_blocks([row for row in draft.deferred if not draft.caps[row.request_id]])
    num = _decode_most(draft, left, limit_s)
    for row in left[:num]:
        del draft.caps[row.request_id]
    return left[num:]


def admit_in_order(
    draft: Draft, limit_s: float, *, keeps_reserve: bool, held: RequestView | None = None
) -> None:
    """Admit candidates first come, first served: nobody overtakes."""
    for request in candidates(draft, held=held):
        hit = draft.view.look_up(request)
        is_long = request.num_tokens - hit.num_tokens > LONG
        if is_long and draft.has_long_prefill:
            return
        if not fits(draft, request, hit, keeps_reserve=keeps_reserve):
            return
        if not _admit(draft, request, hit, limit_s):
            return


def admit_followers(
    draft: Draft, limit_s: float, *, keeps_reserve: bool, held: RequestView | None = None
) -> list[tuple[RequestView, PrefixHit]]:
    """Admit the candidates whose prefix is cached, or short.

    Those that are mostly cached may use the reserve: what they add is little, and the sooner they
    are done, the sooner their prefix makes room. Rows of a group need about the same room, so where
    one finds none the others are not looked at. Those behind a row that is `held` up wait for it.
    Returns the others, which could begin a long prefix, the first of each group.
    """
    leaders: list[tuple[RequestView, PrefixHit]] = []
    passed_over = computing_groups(draft.view)
    for num_tried, request in enumerate(candidates(draft, passed_over, held), start=1):
        hit = draft.view.look_up(request)
        keeps = keeps_reserve and 2 * hit.num_tokens <= request.num_tokens
        if request.num_tokens - hit.num_tokens > LONG:
            leaders.append((request, hit))
            passed_over.add(request.group)
        elif not fits(draft, request, hit, keeps_reserve=keeps):
            passed_over.add(request.group)
        elif not _admit(draft, request, hit, limit_s):
            return []
        passed_over.discard(None)
        if num_tried >= MAX_TRIED or draft.tokens_left <= 0:
            break
    return leaders


def computing_groups(view: EngineView) -> set[Group | None]:
    """Prefix groups whose long prefix is being computed: their other rows wait for it."""
    groups = {row.group for row in view.offline_running if row.work_left_tokens > LONG}
    groups.discard(None)
    return groups


def waits_for_calls(draft: Draft, request: RequestView, hit: PrefixHit) -> bool:
    """Whether an overdue row could not come in if no other row ran: calls hold its room or its
    adapter."""
    view = draft.view
    if not view.online_running:
        return False
    if need_blocks(view, request, hit, is_overdue=True) > view.room_beside_calls:
        return True
    loras = {each.lora_id for each in view.online_running if each.lora_id}
    needs_adapter = request.lora_id and request.lora_id not in loras
    return bool(needs_adapter) and len(loras) >= view.max_loras


def candidates(
    draft: Draft, passed_over: Collection[Group | None] = (), held: RequestView | None = None
) -> Iterator[RequestView]:
    """Offline requests that may come in and are of no group passed over, while slots and tokens
    last. Behind the one `held` up none, but those without an adapter where it lacks its own."""
    view, is_adapter_held = draft.view, False
    admitted = set(map(id, draft.admitted))
    for request in view.offline_waiting:
        if draft.slots_left <= 0 or draft.tokens_left <= 0:
            return
        if request is held and not (is_adapter_held := lacks_adapter(draft, request)):
            return
        if request.group in passed_over or id(request) in admitted:
            continue
        may_come = not (is_adapter_held and request.lora_id) and view.is_ready(request)
        if may_come and draft.fits_lora(request):
            yield request


def lacks_adapter(draft: Draft, request: RequestView) -> bool:
    """Whether its adapter is all that a row waits for."""
    if draft.slots_left <= 0 or draft.fits_lora(request):
        return False
    hit = draft.view.look_up(request)
    return fits(draft, request, hit, keeps_reserve=False, is_overdue=True)


def need_blocks(
    view: EngineView, request: RequestView, hit: PrefixHit, *, is_overdue: bool = False
) -> int:
    """Free blocks that an offline request takes until its expected end, idle cached ones too.

    Of an overdue one whose whole answer finds no room beside calls, until its answer has begun: how
    long that becomes is only expected.
    """
    blocks = view.free_blocks_for(request.end_tokens, hit)
    if is_overdue and blocks > view.room_beside_calls:
        return view.free_blocks_for(request.begun_tokens, hit)
    return blocks


def soon_free_blocks(draft: Draft) -> int:
    """Blocks of prefix groups that are about to end: all rows that they have left run, and have at
    most `CLOSING_TOKENS` left to generate.

    A long prefix may begin on them: it needs its blocks one chunk after the other.
    """
    view = draft.view
    waiting = {request.group for request in view.offline_waiting}
    gone = set(map(id, draft.preempted))
    blocks: dict[Group, int] = {}
    staying: set[Group] = set()
    num_to_run: dict[Group, int] = {}
    for request in view.offline_running:
        group = request.group
        if group is None or group in waiting or id(request) in gone:
            continue
        left = request.end_tokens - request.num_prompt_tokens - request.num_output_tokens
        if not request.is_decode or left > CLOSING_TOKENS:
            staying.add(group)
        num_to_run[group] = num_to_run.get(group, 1 + view.num_followers(request)) - 1
        (held,) = view.law.kept([request.num_computed_tokens])
        is_alone = group not in blocks
        blocks[group] = view.private_blocks(request) if is_alone else max(held, blocks[group])
    closing = [group for group, num in num_to_run.items() if num <= 0 and group not in staying]
    return sum(blocks[group] for group in closing)


def fits(
    draft: Draft,
    request: RequestView,
    hit: PrefixHit,
    *,
    keeps_reserve: bool,
    soon_free: int = 0,
    is_overdue: bool = False,
) -> bool:
    """Whether an offline request has room beside what is wanted before it, and reserved: the
    threshold of Echo, 4.2."""
    need = need_blocks(draft.view, request, hit, is_overdue=is_overdue)
    room = draft.free_blocks - draft.promised_blocks - draft.view.watermark_blocks + soon_free
    if keeps_reserve:
        wanted_by_others = max(0, draft.wanted_blocks(request) - hit.idle_blocks)
        room -= wanted_by_others + draft.view.reserve_blocks
    return need <= room


def _admit(draft: Draft, request: RequestView, hit: PrefixHit, limit_s: float) -> bool:
    """Admit a request that has room; False when the step has no time for it."""
    left = request.num_tokens - hit.num_tokens
    chunk = draft.chunk(hit.num_tokens, left, limit_s)
    if chunk < min(left, MIN_CHUNK_TOKENS):
        return False
    draft.admit(request, hit, chunk, need_blocks(draft.view, request, hit))
    return True


def let_in(
    draft: Draft, request: RequestView, hit: PrefixHit, num_tokens: int, *, is_overdue: bool
) -> None:
    """Admit a request that has room, with a first chunk of `num_tokens`."""
    blocks = need_blocks(draft.view, request, hit, is_overdue=is_overdue)
    if blocks < need_blocks(draft.view, request, hit):
        draft.only_begun.add(request.request_id)
    draft.admit(request, hit, num_tokens, blocks)


def keep_alive(draft: Draft, limit_s: float) -> None:
    """Something must move: a step without any work lets the first in line go, whatever else. Where
    time was short, with little."""
    view = draft.view
    for request in view.offline_running:
        if request.work_left_tokens and request not in draft.preempted:
            computed, left = request.num_computed_tokens, request.work_left_tokens
            draft.prefill(request, _least_chunk(draft, computed, left, limit_s))
            return
    if view.online_running or view.online_waiting or view.offline_running:
        return
    for request in view.offline_waiting:
        if view.is_ready(request):
            hit = view.look_up(request)
            left = request.num_tokens - hit.num_tokens
            draft.admit(request, hit, _least_chunk(draft, hit.num_tokens, left, limit_s), 0)
            return


def _least_chunk(draft: Draft, computed_tokens: int, left_tokens: int, limit_s: float) -> int:
    """A small chunk of a prefill, and what it takes with it for little more time."""
    least = min(left_tokens, MIN_CHUNK_TOKENS, draft.tokens_left)
    load = draft.load.copy()
    load.add(least, computed_tokens + least)
    most_s = max(limit_s, LITTLE_MORE * draft.view.model.predict_s(load))
    return max(least, draft.chunk(computed_tokens, left_tokens, most_s))


def goes_on(draft: Draft) -> bool:
    """Whether any row gets something in the step."""
    running = draft.view.offline_running
    return bool(
        draft.num_offline_decodes
        or any(draft.caps.get(row.request_id) for row in running)
        or any(row.is_offline for row in draft.admitted)
    )
