"""A plan in the making: accounts of time, tokens, blocks and slots that must balance."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchrun.estimator import StepLoad, largest_chunk
from batchrun.scheduling.plan import Plan
from batchrun.scheduling.view import EngineView, RequestView

LONG_PREFILL_TOKENS = 512
"""A prefill with more left than this is long: one at a time (Echo, section 4.1)."""


@dataclass(slots=True)
class Draft:
    """Collects the requests of a step. `free_blocks` may be spent; the rest is as in `Plan`."""

    view: EngineView
    load: StepLoad
    tokens_left: int
    slots_left: int
    free_blocks: int
    admit: list[RequestView] = field(default_factory=list)
    caps: dict[str, int] = field(default_factory=dict)
    preempt: list[RequestView] = field(default_factory=list)
    loras: set[int] = field(default_factory=set)
    has_long_prefill: bool = False

    @classmethod
    def begin(cls, view: EngineView) -> Draft:
        """An empty draft of a step of `view`."""
        num_running = len(view.online_running) + len(view.offline_running)
        running = (*view.online_running, *view.offline_running)
        return cls(
            view=view,
            load=StepLoad(),
            tokens_left=view.token_budget,
            slots_left=view.max_running - num_running,
            free_blocks=view.free_blocks,
            loras={r.lora_id for r in running if r.lora_id} if view.max_loras else set(),
        )

    def decode(self, request: RequestView) -> None:
        """Let a running request generate its next token."""
        context = request.num_computed_tokens + 1
        self.load.add(1, context, is_decode=True)
        self.tokens_left -= 1
        self.free_blocks -= self._growth(request.num_computed_tokens, 1)

    def prefill(self, request: RequestView, num_tokens: int) -> None:
        """Let a running request compute `num_tokens` of its prompt."""
        self.caps[request.request_id] = num_tokens
        if num_tokens:
            self._compute(request.num_computed_tokens, num_tokens)
            self.free_blocks -= self._growth(request.num_computed_tokens, num_tokens)
            self._note_length(request.prefill_left_tokens)

    def sit_out(self, request: RequestView) -> None:
        """Give a running request nothing in this step."""
        self.caps[request.request_id] = 0

    def let_in(self, request: RequestView, hit_tokens: int, num_tokens: int, blocks: int) -> None:
        """Admit a waiting request with a first chunk of `num_tokens`; `blocks` are set aside."""
        self.admit.append(request)
        self.caps[request.request_id] = num_tokens
        self._compute(hit_tokens, num_tokens)
        self.free_blocks -= blocks
        self.slots_left -= 1
        self._note_length(request.num_tokens - hit_tokens)
        if request.lora_id:
            self.loras.add(request.lora_id)

    def push_out(self, request: RequestView, freed_blocks: int) -> None:
        """Preempt a running offline request; it may not come back in this step."""
        self.preempt.append(request)
        self.free_blocks += freed_blocks
        self.slots_left += 1

    def chunk(self, computed_tokens: int, left_tokens: int, limit_s: float) -> int:
        """The largest chunk of a prefill that keeps the step within `limit_s`."""
        most = min(left_tokens, self.tokens_left)
        if most <= 0:
            return 0
        return largest_chunk(self.view.model, self.load, computed_tokens, limit_s, most)

    def fits_lora(self, request: RequestView) -> bool:
        """Whether admitting the request keeps the distinct adapters within vLLM's limit."""
        if not request.lora_id or request.lora_id in self.loras:
            return True
        return len(self.loras) < self.view.max_loras

    def predicted_s(self) -> float:
        """How long the step is expected to take as drafted."""
        return self.view.model.predict_s(self.load)

    def finish(self) -> Plan:
        """The plan."""
        predicted_s = self.predicted_s() if self.tokens_left < self.view.token_budget else 0.0
        return Plan(tuple(self.admit), self.caps, tuple(self.preempt), predicted_s)

    def _compute(self, computed_tokens: int, num_tokens: int) -> None:
        self.load.add(num_tokens, computed_tokens + num_tokens)
        self.tokens_left -= num_tokens

    def _growth(self, computed_tokens: int, num_tokens: int) -> int:
        blocks_for = self.view.blocks_for
        return blocks_for(computed_tokens + num_tokens) - blocks_for(computed_tokens)

    def _note_length(self, left_tokens: int) -> None:
        self.has_long_prefill |= left_tokens > LONG_PREFILL_TOKENS
