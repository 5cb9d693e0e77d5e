"""What `benchmarks.online_queue` compares by name: orders, and engines like those of others.

On today's vLLM several published schedulers are one with other budgets: each is called after what
it is like, not after what its authors ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from batchrun.scheduling.draft import Draft
from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.policies import Policy
from batchrun.scheduling.promise_orders import SlackOrder
from batchrun.scheduling.view import EngineView, RequestView
from batchrun.scheduling.worth import Victims
from benchmarks.queue_calls import MOST_ANSWER_TOKENS, PromisedCall

Told = Mapping[str, PromisedCall]


@dataclass(frozen=True, slots=True)
class Rival:
    """An engine: stock vLLM, or ours with `order`; `policy` is made from what no engine knows.
    Where it `is_told`, calls say how long their answers will be."""

    order: str
    is_stock: bool = False
    budget: int = 2_048
    max_running: int = 256
    policy: Callable[[Told], Policy] | None = None
    more: Mapping[str, object] = field(default_factory=dict)
    is_told: bool = False

    @property
    def settings(self) -> Mapping[str, object]:
        """The plug-in's."""
        order = "larry" if self.policy is not None else self.order
        name, _, alpha = order.partition(":")
        told = {"larry_alpha": float(alpha)} if alpha else {}
        return {"policy": "echo", "online_queue": name, "channel": False, **told, **self.more}


class TrailOrder(ArrivalOrder):
    """The shortest answer first, by true lengths: TRAIL with a perfect predictor and without
    preemption (c = 0)."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told = told

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """By what is left of prompt and answer."""

        def left_tokens(call: RequestView) -> int:
            its = self._told[call.request_id]
            return its.num_prompt_tokens + its.num_output_tokens - call.num_output_tokens

        return [*begun, *sorted(view.online_waiting, key=left_tokens)]


class NoPreemptOrder(ArrivalOrder):
    """First come, first served; a call comes in when the longest answer that it and all that run
    may have finds room, so none is ever preempted."""

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """Up to the first that finds none."""
        free = (
            view.total_blocks - 1 - sum(map(partial(self._most_blocks, view), view.online_running))
        )
        able: list[RequestView] = []
        for call in view.online_waiting:
            free -= self._most_blocks(view, call)
            if free < 0:
                break
            able.append(call)
        return [*begun, *able]

    @staticmethod
    def _most_blocks(view: EngineView, call: RequestView) -> int:
        answer = min(call.max_output_tokens, MOST_ANSWER_TOKENS)
        return view.blocks_for(call.num_prompt_tokens + answer)


class LevelOrder(ArrivalOrder):
    """Like FastServe: a call joins one of five levels by its prompt's length, the shortest prompts
    first. None sinks: no prompt is computed anew."""

    FIRST_TOKENS, NUM_LEVELS = 256, 5

    def order(self, view: EngineView, begun: Sequence[RequestView]) -> Sequence[RequestView]:
        """By level, then by arrival, prompts that are begun too."""
        calls = [*begun, *view.online_waiting]
        return sorted(calls, key=lambda call: (self._level(call), call.arrival_at_s))

    def _level(self, call: RequestView) -> int:
        level, tokens = 0, self.FIRST_TOKENS
        while call.num_tokens > tokens and level < self.NUM_LEVELS - 1:
            level, tokens = level + 1, 4 * tokens
        return level


class WholeStepOrder(SlackOrder):
    """AccelGen without its chunks: a step computes as many tokens of prompts as vLLM allows."""

    def fill(
        self, draft: Draft, prompts: Sequence[RequestView], limit_s: float, victims: Victims
    ) -> bool:
        """Whatever the tightest bound leaves."""
        return super().fill(draft, prompts, math.inf, victims)


def _echo(queue: ArrivalOrder) -> Policy:
    return EchoPolicy(EchoOptions(), queue)


RIVALS: Mapping[str, Rival] = {
    **{f"vllm-{b}": Rival("", is_stock=True, budget=b) for b in (256, 512, 1_024, 2_048, 8_192)},
    "orca-like": Rival("", is_stock=True, budget=32_768, max_running=8),
    "fastgen-like": Rival("", is_stock=True, budget=768),
    "sarathi-like": Rival("", is_stock=True, budget=512),
    "fastserve-like": Rival("levels", policy=lambda told: _echo(LevelOrder())),
    "no-preempt": Rival("no-preempt", policy=lambda told: _echo(NoPreemptOrder())),
    "on-time-told": Rival("on-time", is_told=True),
    "slack-no-chunks": Rival("slack", policy=lambda told: _echo(WholeStepOrder())),
    "trail": Rival("trail", policy=lambda told: _echo(TrailOrder(told))),
}
