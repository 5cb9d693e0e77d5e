"""Echo's scheduler (arXiv 2504.03651, sections 4 and 5), as this project builds it.

Each step starts from the last batch and makes minor changes: let online requests in (first come,
first served), preempt offline ones where online demand needs their blocks or slots, then fill the
time that is left with offline work, the KV already cached first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from batchrun.scheduling.draft import LONG_PREFILL_TOKENS as LONG
from batchrun.scheduling.draft import Draft
from batchrun.scheduling.plan import Plan
from batchrun.scheduling.slack import StepLimits, step_limits
from batchrun.scheduling.view import EngineView, RequestView

MIN_CHUNK_TOKENS = 32
"""A smaller chunk of a longer prefill is not worth its place in the step."""
MAX_SCANNED = 64
"""Candidates that one step looks at."""
ONLINE_MEMORY_S = 60.0
"""So long after the last online request an arrival is still expected at any moment."""
PATIENCE_S = 20.0
"""A candidate that waited so long at the head of the order is not overtaken any more."""


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """Which of Echo's parts are on; the ablations of the paper's figure 6.

    `is_kv_aware`: choose among offline candidates by cached KV, else first come, first served.
    `keeps_reserve`: the threshold of section 4.2.
    """

    is_kv_aware: bool = True
    keeps_reserve: bool = True


class Verdict(Enum):
    """What became of an offline candidate."""

    LEADER = auto()
    """Admitted; it computes a long prefix that others wait for."""
    FOLLOWER = auto()
    """Admitted; its prefix is cached, or short."""
    NOT_NOW = auto()
    """A long prefill is under way already."""
    NO_ROOM = auto()
    NO_TIME = auto()


PRESETS = {
    "bs+e": EchoOptions(is_kv_aware=False, keeps_reserve=False),
    "bs+e+s": EchoOptions(is_kv_aware=True, keeps_reserve=False),
    "echo": EchoOptions(),
}


class EchoPolicy:
    """Plans the steps of one engine. Keeps nothing but when it last saw online work."""

    def __init__(self, options: EchoOptions) -> None:
        self._options = options
        self._online_seen_at_s: float | None = None
        self._head: tuple[str, float] | None = None

    def plan(self, view: EngineView) -> Plan:
        """The step to run after those in flight."""
        limits = step_limits(view, was_online_lately=self._was_online_lately(view))
        draft = Draft.begin(view)
        self._place_online(draft, limits)
        if view.is_offline_on:
            self._place_offline(draft, limits)
        else:
            for request in view.offline_running:
                draft.sit_out(request)
        return draft.finish()

    def _was_online_lately(self, view: EngineView) -> bool:
        if view.online_running or view.online_waiting:
            self._online_seen_at_s = view.now_s
        seen_at_s = self._online_seen_at_s
        return seen_at_s is not None and view.now_s - seen_at_s < ONLINE_MEMORY_S

    def _place_online(self, draft: Draft, limits: StepLimits) -> None:
        prefills: list[RequestView] = []
        for request in draft.view.online_running:
            if request.is_decode:
                if request.work_left_tokens:
                    draft.decode(request)
            elif request.work_left_tokens:
                prefills.append(request)
        for request in prefills:
            left = request.prefill_left_tokens
            chunk = draft.chunk(request.num_computed_tokens, left, limits.online_s)
            draft.prefill(request, self._at_least(chunk, left, draft))
        for request in draft.view.online_waiting:
            if not self._let_online_in(draft, request, limits):
                return

    def _let_online_in(self, draft: Draft, request: RequestView, limits: StepLimits) -> bool:
        """Admit an online request, at the cost of offline ones; False when it must wait."""
        view = draft.view
        if not draft.fits_lora(request):
            return True
        hit = view.hit_tokens(request)
        left = request.num_tokens - hit
        chunk = self._at_least(draft.chunk(hit, left, limits.online_s), left, draft)
        if chunk == 0:
            return False
        need = view.blocks_for(request.num_tokens + 1)
        self._make_room(draft, need)
        if draft.free_blocks < need or draft.slots_left <= 0:
            return False
        draft.let_in(request, hit, chunk, need)
        return True

    def _at_least(self, chunk: int, left: int, draft: Draft) -> int:
        """Online prefills always move, if by little: a limit of zero would starve them."""
        return max(chunk, min(left, MIN_CHUNK_TOKENS, draft.tokens_left))

    def _make_room(self, draft: Draft, blocks: int) -> None:
        """Preempt offline requests until `blocks` are free and a slot too, least loss first."""
        if draft.free_blocks >= blocks and draft.slots_left > 0:
            return
        gone = set(map(id, draft.preempt))
        victims = [r for r in draft.view.offline_running if id(r) not in gone]
        private = {id(r): draft.view.private_blocks(r) for r in victims}
        victims.sort(key=lambda r: private[id(r)])
        while victims and (draft.free_blocks < blocks or draft.slots_left <= 0):
            short = blocks - draft.free_blocks
            enough = next((i for i, r in enumerate(victims) if private[id(r)] >= short), -1)
            victim = victims.pop(enough)
            draft.push_out(victim, private[id(victim)])

    def _place_offline(self, draft: Draft, limits: StepLimits) -> None:
        self._go_on(draft, limits.offline_s)
        self._let_offline_in(draft, limits.offline_s)
        if draft.tokens_left == draft.view.token_budget:
            self._keep_alive(draft)

    def _go_on(self, draft: Draft, limit_s: float) -> None:
        """Offline requests that run already: decodes first, then prefills in order."""
        gone = set(map(id, draft.preempt))
        prefills: list[RequestView] = []
        for request in draft.view.offline_running:
            if id(request) in gone or not request.work_left_tokens:
                continue
            if not request.is_decode:
                prefills.append(request)
            elif draft.tokens_left > 0 and self._has_time(draft, request, limit_s):
                draft.decode(request)
            else:
                draft.sit_out(request)
        for request in prefills:
            left = request.prefill_left_tokens
            chunk = draft.chunk(request.num_computed_tokens, left, limit_s)
            draft.prefill(request, chunk if chunk >= min(left, MIN_CHUNK_TOKENS) else 0)

    def _has_time(self, draft: Draft, request: RequestView, limit_s: float) -> bool:
        draft.load.add(1, request.num_computed_tokens + 1, is_decode=True)
        fits = draft.predicted_s() <= limit_s
        draft.load.remove(1, request.num_computed_tokens + 1, is_decode=True)
        return fits

    def _let_offline_in(self, draft: Draft, limit_s: float) -> None:
        view = draft.view
        leaders = {r.group for r in view.offline_running if r.prefill_left_tokens > LONG}
        for request in view.offline_waiting[:MAX_SCANNED]:
            if draft.slots_left <= 0 or draft.tokens_left <= 0:
                return
            if not view.is_ready(request) or not draft.fits_lora(request):
                continue
            if self._options.is_kv_aware and request.group in leaders:
                continue
            verdict = self._try(draft, request, limit_s)
            if verdict is Verdict.LEADER:
                leaders.add(request.group)
            elif verdict is Verdict.NO_TIME or self._ends_the_scan(verdict, request, view):
                return

    def _try(self, draft: Draft, request: RequestView, limit_s: float) -> Verdict:
        """Admit an offline candidate if time, blocks and the reserve allow."""
        hit = draft.view.hit_tokens(request)
        left = request.num_tokens - hit
        is_leader = left > LONG
        if is_leader and draft.has_long_prefill:
            return Verdict.NOT_NOW
        need = self._need_blocks(draft.view, request, hit)
        if not self._fits(draft, need):
            return Verdict.NO_ROOM
        chunk = draft.chunk(hit, left, limit_s)
        if chunk < min(left, MIN_CHUNK_TOKENS):
            return Verdict.NO_TIME
        draft.let_in(request, hit, chunk, need)
        return Verdict.LEADER if is_leader else Verdict.FOLLOWER

    def _need_blocks(self, view: EngineView, request: RequestView, hit: int) -> int:
        total = view.blocks_for(request.num_tokens + request.max_output_tokens)
        return total - hit // view.block_tokens

    def _fits(self, draft: Draft, need: int) -> bool:
        """The threshold of section 4.2: room for the request beside what is wanted and reserved."""
        view = draft.view
        kept = view.wanted_blocks + view.reserve_blocks if self._options.keeps_reserve else 0
        return draft.free_blocks - need >= kept

    def _ends_the_scan(self, verdict: Verdict, request: RequestView, view: EngineView) -> bool:
        """Without KV awareness nobody overtakes; with it, nobody for longer than `PATIENCE_S`."""
        if verdict not in {Verdict.NO_ROOM, Verdict.NOT_NOW}:
            return False
        if not self._options.is_kv_aware:
            return True
        if verdict is Verdict.NOT_NOW:
            return False
        if self._head is None or self._head[0] != request.request_id:
            self._head = (request.request_id, view.now_s)
        return view.now_s - self._head[1] > PATIENCE_S

    def _keep_alive(self, draft: Draft) -> None:
        """Something must move: a step without any work lets the first in line go, whatever else."""
        view = draft.view
        for request in view.offline_running:
            if request.work_left_tokens and request not in draft.preempt:
                draft.prefill(request, min(request.work_left_tokens, draft.tokens_left))
                return
        if view.online_running or view.online_waiting or view.offline_running:
            return
        for request in view.offline_waiting:
            if view.is_ready(request):
                hit = view.hit_tokens(request)
                left = request.num_tokens - hit
                draft.let_in(request, hit, min(left, draft.tokens_left), 0)
                return
