"""A plan in the making: accounts of time, tokens, blocks and slots that must balance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import largest_chunk
from batchrun.scheduling.view import EngineView, Plan, PrefixHit, RequestView

LONG_PREFILL_TOKENS = 512
"""A prefill with more left than this is long: one at a time (Echo, section 4.1)."""
CLOSING_TOKENS = 32
"""A row with so few tokens left to generate ends before a long prefix is computed."""
MIN_CHUNK_TOKENS = 32
"""A smaller chunk of a longer prefill is not worth its place in the step."""


@dataclass(slots=True)
class Draft:
    """Collects the requests of a step; those that decode together are all of one class.

    `free_blocks` are free now; `promised_blocks` of them are still to be taken by the prompts of
    running requests, online ones from the start, and the outputs of running offline ones,
    `closing_blocks` of these by the next `CLOSING_TOKENS` tokens of decodes. Admitted requests hit
    `hit_blocks` that were idle. Offline requests hold at most `offline_blocks`: one of all blocks
    is vLLM's own. A step of `full_s` has no time for one token more behind `full_tokens` computed
    ones, and so none behind as many or more. With `is_strict` no prompt but the first of the step
    goes past its limit, whatever it risks. Decodes of `deferred` rows wait for prompts. `leader` is
    the request whose long prefix the draft begins. Of rows in `only_begun` nobody sets aside the
    whole answer, for which calls leave no room: nobody else would come in.
    """

    view: EngineView
    load: StepLoad
    tokens_left: int
    slots_left: int
    free_blocks: int
    offline_blocks: int
    hit_blocks: int = 0
    promised_blocks: int = 0
    closing_blocks: int = 0
    num_offline_decodes: int = 0
    is_strict: bool = False
    admitted: list[RequestView] = field(default_factory=list)
    caps: dict[str, int] = field(default_factory=dict)
    preempted: list[RequestView] = field(default_factory=list)
    loras: set[int] = field(default_factory=set)
    only_begun: set[str] = field(default_factory=set)
    deferred: Sequence[RequestView] = ()
    has_long_prefill: bool = False
    full_s: float = -math.inf
    full_tokens: int = 0
    leader: RequestView | None = None
    leader_left_tokens: int = 0

    @classmethod
    def begin(cls, view: EngineView) -> Draft:
        """An empty draft of a step of `view`."""
        num_running = len(view.online_running) + len(view.offline_running)
        running = (*view.online_running, *view.offline_running) if view.max_loras else ()
        return cls(
            view=view,
            load=StepLoad(),
            tokens_left=view.token_budget,
            slots_left=view.max_running - num_running,
            free_blocks=view.free_blocks,
            offline_blocks=view.total_blocks - 1 - view.free_blocks - view.online_blocks,
            promised_blocks=_due_blocks(view),
            loras={request.lora_id for request in running if request.lora_id},
        )

    def copy(self) -> Draft:
        """An independent draft with the same requests so far."""
        return replace(
            self,
            load=self.load.copy(),
            admitted=self.admitted.copy(),
            caps=self.caps.copy(),
            preempted=self.preempted.copy(),
            loras=self.loras.copy(),
            only_begun=self.only_begun.copy(),
        )

    def decode_calls(self) -> None:
        """Let the online requests that generate have their next token, the first of the step: for
        the blocks that they need others make room."""
        decodes, _ = self.view.online_by_kind()
        if not decodes or len(decodes) > self.tokens_left:
            return
        self.load = self.view.online_decodes_load().copy()
        self.tokens_left -= len(decodes)
        computed = [request.num_computed_tokens for request in decodes]
        self.free_blocks -= sum(self.view.law.begun(computed))

    def decode_rows(self, requests: Sequence[RequestView], limit_s: float) -> bool:
        """Let offline requests that run generate their next token.

        False, and nothing done, when they exceed the token budget or `limit_s`, or find no blocks.
        """
        num = len(requests)
        if not num:
            return True
        computed = [request.num_computed_tokens for request in requests]
        load = self.load.copy()
        load.add_decodes([tokens + 1 for tokens in computed])
        if num > self.tokens_left or self.view.model.predict_s(load) > limit_s:
            return False
        law = self.view.law
        new_blocks = sum(law.begun(computed))
        if new_blocks > max(0, self.free_blocks):
            return False
        self.load = load
        self.tokens_left -= num
        self.free_blocks -= new_blocks
        ends = law.kept(self._end_tokens(requests))
        held, soon = law.kept(computed, 1), law.kept(computed, CLOSING_TOKENS)
        self.promised_blocks += sum(ends) - sum(held)
        self.closing_blocks += sum(map(min, ends, soon)) - sum(held)
        self.num_offline_decodes += num
        return True

    def with_blocks(self, decodes: Sequence[RequestView]) -> Sequence[RequestView]:
        """Those of running offline requests that find a block where their next token needs a new
        one, in their order: the others sit the step out, and those that end make room for them."""
        left = max(0, self.free_blocks)
        begun = self.view.law.begun([request.num_computed_tokens for request in decodes])
        if sum(begun) <= left:
            return decodes
        able: list[RequestView] = []
        for request, num_blocks in zip(decodes, begun, strict=True):
            left -= num_blocks
            if not num_blocks or left >= 0:
                able.append(request)
        return able

    def prefill(self, request: RequestView, num_tokens: int) -> None:
        """Let a running request compute `num_tokens` of its prompt."""
        self.caps[request.request_id] = num_tokens
        self._take_blocks(request, num_tokens)
        if num_tokens:
            self._compute(request.num_computed_tokens, num_tokens)
            self.has_long_prefill |= request.prefill_left_tokens > LONG_PREFILL_TOKENS

    def sit_out(self, request: RequestView) -> None:
        """Give a running request nothing in this step."""
        self.caps[request.request_id] = 0
        self._take_blocks(request, 0)

    def admit(self, request: RequestView, hit: PrefixHit, num_tokens: int, blocks: int) -> None:
        """Admit a waiting request with a first chunk of `num_tokens`; `blocks` are set aside."""
        self.admitted.append(request)
        self.caps[request.request_id] = num_tokens
        self._compute(hit.num_tokens, num_tokens)
        self.free_blocks -= blocks
        self.hit_blocks += hit.idle_blocks
        self.slots_left -= 1
        self.has_long_prefill |= request.num_tokens - hit.num_tokens > LONG_PREFILL_TOKENS
        if request.lora_id:
            self.loras.add(request.lora_id)

    def preempt(self, request: RequestView, freed_blocks: int) -> None:
        """Preempt a running offline request; it may not come back in this step."""
        self.preempted.append(request)
        self.free_blocks += freed_blocks
        self.offline_blocks -= freed_blocks
        self.slots_left += 1

    def chunk(self, computed_tokens: int, left_tokens: int, limit_s: float) -> int:
        """The largest chunk of a prefill that keeps the step within `limit_s`."""
        most = min(left_tokens, self.tokens_left)
        if most <= 0 or (limit_s <= self.full_s and computed_tokens >= self.full_tokens):
            return 0
        chunk = largest_chunk(self.view.model, self.load, computed_tokens, limit_s, most)
        if chunk == 0:
            self.full_s, self.full_tokens = limit_s, computed_tokens
        return chunk

    def wanted_blocks(self, request: RequestView) -> int:
        """Free blocks whose KV rows planned before an offline request will hit, without those that
        admitted ones do. What is wanted later is no reason to hold it back: its turn comes first.
        """
        return max(0, self.view.wanted_blocks(request) - self.hit_blocks)

    def room_tokens(self, request: RequestView, computed_tokens: int) -> int:
        """Tokens for which an offline request has blocks, or could take free ones.

        While offline rows decode, and so will make room, what they need next is not taken from
        them, nor what rows before it are about to hit from the cache.
        """
        free_blocks = self.free_blocks
        if self.num_offline_decodes:
            free_blocks -= self.closing_blocks + self.wanted_blocks(request)
        return self.view.law.room_tokens(computed_tokens, max(0, free_blocks))

    def fits_lora(self, request: RequestView) -> bool:
        """Whether admitting the request keeps the distinct adapters within vLLM's limit."""
        if not request.lora_id or request.lora_id in self.loras:
            return True
        return len(self.loras) < self.view.max_loras

    def finish(self, num_left_out: int = 0) -> Plan:
        """The plan, where the order of calls has left so many out."""
        has_work = self.tokens_left < self.view.token_budget
        predicted_s = self.view.model.predict_s(self.load) if has_work else 0.0
        admit, preempt = tuple(self.admitted), tuple(self.preempted)
        return Plan(admit, self.caps, preempt, predicted_s, self.load, num_left_out)

    def _compute(self, computed_tokens: int, num_tokens: int) -> None:
        self.load.add(num_tokens, computed_tokens + num_tokens)
        self.tokens_left -= num_tokens

    def _take_blocks(self, request: RequestView, num_tokens: int) -> None:
        """Blocks for `num_tokens` now; those for the rest of the prompt, and for the output of
        offline work, are promised."""
        blocks_for = self.view.blocks_for
        computed = request.num_computed_tokens
        now_blocks = blocks_for(computed + num_tokens)
        new_blocks = now_blocks - blocks_for(computed)
        self.free_blocks -= new_blocks
        if request.is_offline:
            self.promised_blocks += max(0, blocks_for(*self._end_tokens([request])) - now_blocks)
        else:
            self.promised_blocks -= new_blocks

    def _end_tokens(self, requests: Sequence[RequestView]) -> list[int]:
        """Up to where room is set aside for each."""
        begun = self.only_begun
        if not begun:
            return [request.end_tokens for request in requests]
        return [r.begun_tokens if r.request_id in begun else r.end_tokens for r in requests]


def _due_blocks(view: EngineView) -> int:
    """What the prompts of running calls are still to take."""
    _, begun = view.online_by_kind()
    return sum([
        view.blocks_for(request.num_computed_tokens + request.work_left_tokens)
        - view.blocks_for(request.num_computed_tokens)
        for request in begun
    ])
