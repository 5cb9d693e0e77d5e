"""How long a step takes in the virtual engine. Hidden from policies and estimators.

A law gets one `(new_tokens, context_tokens, is_decode)` per request of the step; context_tokens
counts the request's tokens whose KV exists after the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel

StepItem = tuple[int, int, bool]


class StepLaw(Protocol):
    """What a step takes, in seconds."""

    @property
    def expected(self) -> StepLaw:
        """The law without its noise; asking it changes nothing."""
        ...

    def step_s(self, items: Sequence[StepItem]) -> float:
        """The duration of one step. A noisy law draws: call it once per step."""
        ...


@dataclass(frozen=True, slots=True)
class A100Law:
    """Llama-3.1-8B in bf16 on an A100-40GB: the roofline of the reference scenario (design 6.4).

    step = overhead + max(c, m) + overlap_loss * min(c, m), where c is the time of the arithmetic
    and m that of reading the weights and every KV entry of the step's requests.
    """

    overhead_s: float = 0.003
    flop_per_token: float = 16e9
    flop_per_token_pair: float = 4 * 4096 * 32
    flop_per_s: float = 220e12
    weight_bytes: float = 16e9
    kv_bytes_per_token: float = 131_072
    bytes_per_s: float = 1.4e12
    overlap_loss: float = 0.25

    @property
    def expected(self) -> StepLaw:
        """Itself: this law has no noise."""
        return self

    def step_s(self, items: Sequence[StepItem]) -> float:
        """See the class; a chunk of n tokens attends to n * (context - n / 2) pairs."""
        tokens = contexts = doubled_pairs = 0
        for new, context, _ in items:
            tokens += new
            contexts += context
            doubled_pairs += new * (2 * context - new)
        flop = self.flop_per_token * tokens + self.flop_per_token_pair * doubled_pairs / 2
        compute_s = flop / self.flop_per_s
        memory_s = (self.weight_bytes + self.kv_bytes_per_token * contexts) / self.bytes_per_s
        shorter_s, longer_s = sorted((compute_s, memory_s))
        return self.overhead_s + longer_s + self.overlap_loss * shorter_s


@dataclass(frozen=True, slots=True)
class ModelLaw:
    """Steps take as long as a fitted model says."""

    model: StepTimeModel

    @property
    def expected(self) -> StepLaw:
        """Itself: a model has no noise."""
        return self

    def step_s(self, items: Sequence[StepItem]) -> float:
        """The model's prediction."""
        return self.model.predict_s(StepLoad.of(items))
