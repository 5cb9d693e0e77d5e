"""What a policy sees of an engine before a step, and the plan that it makes of it.

Policies read the view; only the plug-in writes it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from batchrun.estimator.call_history import CallHistory, Promise
from batchrun.estimator.caller_margin import NOTHING, KeptBack
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel
from batchrun.types import RequestClass

GROWTH_TOKENS = 64
"""A row is taken to generate so many more tokens when its answer is longer than expected."""

UNKNOWN_TOKENS = sys.maxsize
"""The length of an answer of which nothing is known."""

Group = tuple[str, int]
"""A job, and the number of a prefix node of its own."""


@dataclass(slots=True, eq=False)
class RequestView:
    """One request, waiting or running. Instants are monotonic seconds.

    `work_left_tokens` is what vLLM could still schedule now: the rest of the prompt, or 1 for a
    decode, 0 when its output in flight may be the last. `num_computed_tokens` and
    `num_output_tokens` count steps in flight as done. `priority` is vLLM's: the lower goes first.
    `slo_jct_s` bounds the time from arrival to the last token (online only, as the other bounds);
    where not all calls can be in time, those of less `slo_value` give way.
    `expected_output_tokens` is the room to set aside for an offline answer,
    `max_output_tokens` what it never exceeds. `rank` is the row's place in the planned order of all
    rows that the daemon of this `epoch` sends, `group` the job and the node of its key portion,
    `announced_followers` the rows of that node that stood behind it when it was sent (offline
    only). An offline request that `is_row` belongs to a job; others are calls. One that was never
    preempted was so at 0. A call that `has_class` has bounds of its own.
    """

    request_id: str
    request_class: RequestClass
    arrival_at_s: float
    num_prompt_tokens: int
    priority: int = 0
    max_output_tokens: int = 0
    expected_output_tokens: int = UNKNOWN_TOKENS
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    slo_jct_s: float = math.inf
    slo_value: float = 1.0
    is_row: bool = False
    epoch: int = 0
    rank: int = 0
    group: Group | None = None
    announced_followers: int = 0
    lora_id: int = 0
    num_tokens: int = 0
    work_left_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    first_token_at_s: float | None = None
    preempted_at_s: float = 0.0
    has_class: bool = False
    handle: Any = field(default=None, repr=False)

    @property
    def is_offline(self) -> bool:
        """Whether the request is offline work."""
        return self.request_class is RequestClass.OFFLINE

    @property
    def promise(self) -> Promise:
        """The bounds of an online call."""
        return self.slo_ttft_s, self.slo_tpot_s, self.slo_jct_s

    @property
    def is_decode(self) -> bool:
        """Whether the next step of this request generates from a complete prompt."""
        return self.work_left_tokens <= 1 and self.num_output_tokens > 0

    @property
    def prefill_left_tokens(self) -> int:
        """Prompt (and recomputed output) tokens that have no KV yet."""
        return 0 if self.is_decode else self.work_left_tokens

    @property
    def end_tokens(self) -> int:
        """Prompt and answer as long as they are expected to become: room is set aside for these.

        An answer that is longer than expected is taken to go on a little; what it grows beyond
        the room costs offline work, by preemption.
        """
        expected = max(self.expected_output_tokens, self.num_output_tokens + GROWTH_TOKENS)
        return self.num_prompt_tokens + min(self.max_output_tokens, expected)

    @property
    def begun_tokens(self) -> int:
        """What there is so far, and as much of the answer as it becomes at least."""
        return min(self.end_tokens, self.num_tokens + GROWTH_TOKENS)


BY_ARRIVAL = attrgetter("priority", "arrival_at_s", "request_id")
"""The order in which online calls wait: by priority, first come, first served."""


def by_kind(requests: Iterable[RequestView]) -> tuple[list[RequestView], list[RequestView]]:
    """Running requests with work left: those that decode, and the others."""
    decodes: list[RequestView] = []
    prefills: list[RequestView] = []
    for request in requests:
        left = request.work_left_tokens
        if left:
            (decodes if left == 1 and request.num_output_tokens else prefills).append(request)
    return decodes, prefills


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a waiting request finds in the KV cache.

    `idle_blocks` of the hit are free blocks, which its admission takes out of the free ones.
    """

    num_tokens: int = 0
    idle_blocks: int = 0


@dataclass(frozen=True, slots=True)
class BlockKind:
    """`num_groups` KV groups alike, with blocks of `block_tokens` tokens.

    In each a request holds at most `most_blocks` while its prompt is computed, `kept_blocks` while
    it generates: behind a window, as where one state stands for all tokens, blocks are given back.
    """

    block_tokens: int
    num_groups: int = 1
    most_blocks: int = sys.maxsize
    kept_blocks: int = sys.maxsize


class BlockLaw:
    """How many blocks of the pool tokens take. All KV groups of a model share it, and each has
    blocks of its own for the same tokens. `block_tokens` are those of the smallest block.

    With full attention alone, as in most models, nothing is summed: the sums are in every step.
    """

    def __init__(self, *kinds: BlockKind) -> None:
        self.block_tokens = min(kind.block_tokens for kind in kinds)
        self._kinds = kinds
        self._is_plain = kinds == (BlockKind(self.block_tokens),)
        growing = [kind.num_groups for kind in kinds if kind.most_blocks > 1]
        self._num_growing = max(1, sum(growing))
        self._num_fixed = sum(kind.num_groups for kind in kinds) - sum(growing)

    def blocks(self, num_tokens: int) -> int:
        """Blocks set aside for `num_tokens` tokens: the most that are held at once."""
        if self._is_plain:
            return -(-num_tokens // self.block_tokens)
        return self.new_blocks(num_tokens, 0)

    def new_blocks(self, num_tokens: int, hit_tokens: int) -> int:
        """The same where the blocks of the first `hit_tokens` are there."""
        if self._is_plain:
            return -(-num_tokens // self.block_tokens) - hit_tokens // self.block_tokens
        return sum([
            kind.num_groups * min(-(-num_tokens // size) - hit_tokens // size, kind.most_blocks)
            for kind in self._kinds
            for size in (kind.block_tokens,)
        ])  # fmt: skip

    def kept(self, tokens: Sequence[int], more: int = 0) -> list[int]:
        """Blocks that each request keeps of so many tokens, and of `more`, while it generates."""
        if self._is_plain:
            size, more = self.block_tokens, more + self.block_tokens - 1
            return [(num + more) // size for num in tokens]
        return [
            sum([
                kind.num_groups * min(-(-(num + more) // kind.block_tokens), kind.kept_blocks)
                for kind in self._kinds
            ])
            for num in tokens
        ]

    def growth_tokens(self, num_tokens: int, answer_tokens: float) -> float:
        """Tokens of such an answer to a prompt of `num_tokens` for each block that it takes."""
        if self._is_plain:
            return self.block_tokens
        first, last = self.kept([num_tokens, num_tokens + math.ceil(answer_tokens)])
        return answer_tokens / max(1, last - first)

    def begun(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that each request of so many tokens begins with its next one."""
        if self._is_plain:
            size = self.block_tokens
            return [num % size == 0 for num in tokens]
        return [
            sum([
                kind.num_groups
                for kind in self._kinds
                if num % kind.block_tokens == 0 and (kind.most_blocks > 1 or not num)
            ])
            for num in tokens
        ]

    def room_tokens(self, num_tokens: int, free_blocks: int) -> int:
        """Tokens that surely fit behind `num_tokens` with so many blocks more."""
        size = self.block_tokens
        if not num_tokens:
            free_blocks = max(0, free_blocks - self._num_fixed)
        return free_blocks // self._num_growing * size + -num_tokens % size


@dataclass(slots=True)
class EngineView:
    """An engine before a step.

    `rest_s` is the predicted time until the steps in flight are done; `free_blocks` counts every
    block that an allocation could take, cached or not; `reserve_blocks` are kept for online bursts,
    beside the `online_blocks` that online requests hold; `law` says how many tokens take, and
    vLLM wants `watermark_blocks` free behind each admission. `look_up(request)` finds a waiting
    request's prefix in the KV cache (costly: once per decision); `wanted_blocks(request)` counts
    the free blocks whose KV rows planned no later than it will hit, `num_followers(request)` the
    rows of its group that have not ended, besides itself, `private_blocks(request)` the blocks that
    preempting it would free. `is_ready(request)` says whether a waiting one may be admitted at all
    (its grammar is there, no output in flight).
    `online_waiting` is in order of `BY_ARRIVAL`, `offline_waiting` in planned order.
    `error_share` is the mean error of the latest predictions of `model` (0.1: 10 %); `alone_model`
    says what steps would take if the engine held no row.
    `online_slo_ttft_s` and `online_slo_tpot_s` are the bounds of online requests without a class;
    `online_cost` is how many times as slow as alone they may be, None where nobody says; `calls`
    is what all online requests so far tell of those to come; `were_calls_lately` where one came or
    ended in the last minute, planned or not; `kept_back` is what steps beside rows leave of the
    bounds of calls.
    """

    now_s: float
    rest_s: float
    model: StepTimeModel
    alone_model: StepTimeModel
    online_running: Sequence[RequestView]
    online_waiting: Sequence[RequestView]
    offline_running: Sequence[RequestView]
    offline_waiting: Sequence[RequestView]
    free_blocks: int
    total_blocks: int
    reserve_blocks: int
    online_blocks: int
    law: BlockLaw
    token_budget: int
    max_running: int
    max_loras: int
    look_up: Callable[[RequestView], PrefixHit]
    wanted_blocks: Callable[[RequestView], int]
    num_followers: Callable[[RequestView], int]
    private_blocks: Callable[[RequestView], int]
    is_ready: Callable[[RequestView], bool]
    is_offline_on: bool = True
    watermark_blocks: int = 0
    error_share: float = 0.0
    online_slo_ttft_s: float = 1.0
    online_slo_tpot_s: float = 0.05
    calls: CallHistory = field(default_factory=CallHistory)
    were_calls_lately: bool = False
    online_cost: float | None = None
    kept_back: KeptBack = NOTHING
    _online_kinds: tuple[list[RequestView], list[RequestView]] | None = field(
        default=None, init=False, repr=False
    )
    _decodes_load: StepLoad | None = field(default=None, init=False, repr=False)
    _backlog_s: float | None = field(default=None, init=False, repr=False)

    def online_by_kind(self) -> tuple[list[RequestView], list[RequestView]]:
        """`by_kind` of the online requests that run."""
        if self._online_kinds is None:
            self._online_kinds = by_kind(self.online_running)
        return self._online_kinds

    def online_decodes_load(self) -> StepLoad:
        """What the decodes of online requests add to a step, to be read only."""
        if self._decodes_load is None:
            self._decodes_load = StepLoad()
            decodes, _ = self.online_by_kind()
            if decodes:
                contexts = [request.num_computed_tokens + 1 for request in decodes]
                self._decodes_load.add_decodes(contexts)
        return self._decodes_load

    def backlog_s(self) -> float:
        """How long the prompts of all waiting calls take in full steps."""
        if self._backlog_s is None:
            budget = self.token_budget
            tokens = sum([request.num_tokens for request in self.online_waiting])
            full_step_s = self.model.predict_s(StepLoad.of([(budget, budget, False)]))
            self._backlog_s = tokens / budget * full_step_s
        return self._backlog_s

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, of the smallest where there are several kinds."""
        return self.law.block_tokens

    @property
    def room_beside_calls(self) -> int:
        """Blocks that offline work could have if all of it were one request."""
        return self.total_blocks - 1 - self.watermark_blocks - self.online_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return self.law.blocks(num_tokens)

    def free_blocks_for(self, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks that a request with this hit takes to hold `num_tokens` tokens: not those
        that others hold, but the idle ones that it hits. No more than without a hit."""
        need = self.law.new_blocks(num_tokens, hit.num_tokens) + hit.idle_blocks
        return min(need, self.law.blocks(num_tokens))


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, decided. Frozen; the plug-in applies it and vLLM carries it out.

    `admit`: waiting requests to let in, in order, online first. `caps`: the most tokens that a
    request may get in this step, by id (0: it sits the step out; absent: as many as vLLM gives).
    `preempt`: running offline requests whose blocks or slot online work needs.
    `predicted_s`: how long the step is expected to take; `load`: what it then computes.
    `num_left_out`: calls that the order in which calls come in does not bring in time.
    """

    admit: tuple[RequestView, ...] = ()
    caps: Mapping[str, int] = field(default_factory=dict)
    preempt: tuple[RequestView, ...] = ()
    predicted_s: float = 0.0
    load: StepLoad | None = None
    num_left_out: int = 0
