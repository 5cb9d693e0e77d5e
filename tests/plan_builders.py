"""Random engines as a policy sees them, and what a plan would make such an engine do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from estimator_builders import A100_LAW, ECHO_BASE_LAW, ECHO_LAW, LINEAR_LAW
from hypothesis import strategies as st

from batchrun.estimator.step_time import StepTimeModel
from batchrun.scheduling.view import BlockKind, BlockLaw, EngineView, Plan, PrefixHit, RequestView
from batchrun.types import RequestClass

BLOCK_TOKENS = 16
NOW_S = 1_000.0
MODELS: tuple[StepTimeModel, ...] = (A100_LAW, ECHO_LAW, ECHO_BASE_LAW, LINEAR_LAW)
NUM_DOCUMENTS = 3


@dataclass(slots=True)
class Engine:
    """A view with the cache behind it.

    `cached_blocks` of each document are in the KV cache; those of `in_use` documents belong to a
    running request, the others are among the view's free blocks.
    """

    view: EngineView
    cached_blocks: list[int]
    in_use: list[bool]
    hit_blocks: dict[str, int] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    private_blocks: dict[str, int] = field(default_factory=dict)
    unready: set[str] = field(default_factory=set)

    @property
    def running(self) -> list[RequestView]:
        return [*self.view.online_running, *self.view.offline_running]

    def staying(self, plan: Plan) -> list[RequestView]:
        """Who still runs after the plan's preemptions."""
        return [request for request in self.running if request not in plan.preempt]

    def granted_tokens(self, plan: Plan, request: RequestView) -> int:
        """What vLLM computes of a request: all that is left of it, or its cap."""
        left = request.work_left_tokens
        if request in plan.admit:
            left = request.num_tokens - BLOCK_TOKENS * self.hit_blocks[request.request_id]
        return min(left, plan.caps.get(request.request_id, left))

    def look_up(self, request: RequestView) -> PrefixHit:
        """What a waiting request finds in the cache."""
        hit = self.hit_blocks[request.request_id]
        is_idle = not self.in_use[self.documents[request.request_id]]
        return PrefixHit(BLOCK_TOKENS * hit, hit if is_idle else 0)

    @property
    def num_cached_free(self) -> int:
        """Cached blocks of documents that nobody uses."""
        both = zip(self.cached_blocks, self.in_use, strict=True)
        return sum(blocks for blocks, used in both if not used)

    def new_blocks(self, plan: Plan) -> int:
        """The blocks that the step fills."""
        taken = 0
        for request in (*self.staying(plan), *plan.admit):
            hit = BLOCK_TOKENS * self.hit_blocks.get(request.request_id, 0)
            before = request.num_computed_tokens + hit
            after = before + self.granted_tokens(plan, request)
            taken += blocks_for(after) - blocks_for(before)
        return taken

    def revived_blocks(self, plan: Plan) -> int:
        """The free blocks that are taken because an admitted request hits them."""
        revived = [0] * NUM_DOCUMENTS
        for request in plan.admit:
            document = self.documents[request.request_id]
            if not self.in_use[document]:
                revived[document] = max(revived[document], self.hit_blocks[request.request_id])
        return sum(revived)


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


@st.composite
def engines(draw: st.DrawFn, /, **fixed: Any) -> Engine:
    """An engine in any state that vLLM can be in. `fixed` sets fields of its view."""
    return _Drawing(draw).engine(fixed)


class _Drawing:
    """Draws one engine."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._max_loras = draw(st.integers(0, 2))
        self._loras_running: set[int] = set()
        self._num_requests = 0

    def _int(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, max(least, most)))

    def _bool(self) -> bool:
        return self._draw(st.booleans())

    def engine(self, fixed: dict[str, Any]) -> Engine:
        max_running = self._int(1, 8)
        num_online = self._int(0, max_running)
        num_offline = self._int(0, max_running - num_online)
        online = [self._running(RequestClass.ONLINE) for _ in range(num_online)]
        offline = [self._running(RequestClass.OFFLINE) for _ in range(num_offline)]
        held = sum(blocks_for(r.num_computed_tokens) for r in (*online, *offline))
        engine = self._cache(online, offline)
        is_roomy = self._bool()
        free = engine.num_cached_free + (self._int(0, 1_000) if is_roomy else self._int(0, 40))
        if not (num_online or num_offline):
            free = max(free, 300)
        wanted = self._int(0, free) if self._bool() else 0
        engine.view = EngineView(
            now_s=NOW_S,
            rest_s=self._draw(st.sampled_from([0.0, 0.03, 0.2])),
            model=self._draw(st.sampled_from(MODELS)),
            alone_model=self._draw(st.sampled_from(MODELS)),
            online_running=online,
            online_waiting=[self._waiting(RequestClass.ONLINE, engine) for _ in range(self._few())],
            offline_running=offline,
            offline_waiting=[
                self._waiting(RequestClass.OFFLINE, engine) for _ in range(self._few())
            ],
            free_blocks=free,
            total_blocks=held + free + 1,
            reserve_blocks=self._int(0, (held + free) // 2) if self._bool() else 0,
            law=BlockLaw(BlockKind(BLOCK_TOKENS)),
            token_budget=self._draw(st.sampled_from([8, 64, 512, 2_048])),
            max_running=max_running,
            max_loras=self._max_loras,
            online_blocks=sum(blocks_for(r.num_computed_tokens) for r in online),
            look_up=engine.look_up,
            wanted_blocks=lambda _: wanted,
            num_followers=lambda r: r.announced_followers,
            private_blocks=lambda r: engine.private_blocks[r.request_id],
            is_ready=lambda r: r.request_id not in engine.unready,
        )
        for name, value in fixed.items():
            setattr(engine.view, name, value)
        return engine

    def _few(self) -> int:
        return self._draw(st.sampled_from([0, 1, 1, 2, 5]))

    def _cache(self, online: Sequence[RequestView], offline: Sequence[RequestView]) -> Engine:
        view: Any = None
        cached = [self._int(0, 40) for _ in range(NUM_DOCUMENTS)]
        engine = Engine(view, cached, [self._bool() for _ in cached])
        if not (online or offline):
            engine.in_use = [False] * NUM_DOCUMENTS
        for request in offline:
            most = blocks_for(request.num_computed_tokens)
            engine.private_blocks[request.request_id] = self._int(0, most)
        return engine

    def _running(self, request_class: RequestClass) -> RequestView:
        """Part of its prompt computed, decoding, or waiting for its last token."""
        kind = self._draw(st.sampled_from(["prefill", "decode", "decode", "last"]))
        prompt = self._int(1, 1_500)
        output = 0 if kind == "prefill" and self._bool() else self._int(1, 200)
        left = self._int(2 if output else 1, prompt + output) if kind == "prefill" else 1
        num_tokens = prompt + output
        lora = self._lora()
        if lora and len(self._loras_running | {lora}) > self._max_loras:
            lora = min(self._loras_running)
        if lora:
            self._loras_running.add(lora)
        view = self._request(request_class, prompt, output, lora)
        view.work_left_tokens = 0 if kind == "last" else left
        view.num_computed_tokens = max(0, num_tokens - left)
        if output and request_class is RequestClass.ONLINE:
            view.first_token_at_s = NOW_S - self._int(0, 10)
        return view

    def _waiting(self, request_class: RequestClass, engine: Engine) -> RequestView:
        """New, or preempted with some output."""
        output = self._int(1, 50) if self._bool() else 0
        view = self._request(request_class, self._int(1, 1_500), output, self._lora())
        document = self._int(0, NUM_DOCUMENTS - 1)
        most = (view.num_tokens - 1) // BLOCK_TOKENS
        hit = min(engine.cached_blocks[document], most) if self._bool() else 0
        engine.hit_blocks[view.request_id] = hit
        engine.documents[view.request_id] = document
        view.group = "job", document
        if request_class is RequestClass.OFFLINE and self._int(0, 4) == 0:
            engine.unready.add(view.request_id)
        return view

    def _lora(self) -> int:
        return self._int(0, 3) if self._max_loras else 0

    def _request(
        self, request_class: RequestClass, prompt: int, output: int, lora: int
    ) -> RequestView:
        self._num_requests += 1
        return RequestView(
            request_id=f"{request_class}-{self._num_requests}",
            request_class=request_class,
            arrival_at_s=NOW_S - self._int(0, 20) / 4,
            num_prompt_tokens=prompt,
            max_output_tokens=output + self._int(1, 200),
            slo_ttft_s=self._draw(st.sampled_from([1.0, 1.0, 0.1, 30.0])),
            slo_tpot_s=self._draw(st.sampled_from([0.02, 0.05, 1.0])),
            slo_jct_s=self._draw(st.sampled_from([math.inf, math.inf, 0.5, 9.0])),
            rank=self._num_requests,
            lora_id=lora,
            num_tokens=prompt + output,
            num_output_tokens=output,
        )
