"""Laws of the step time beside the reference one: another form, another speed, and noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from batchrun.simulator.virtual.setup import A100Law, StepItem, StepLaw


@dataclass(frozen=True, slots=True)
class PoolingLaw:
    """A law of the form of Echo's Eq. 6 to 8, with gamma > 0.

    prefill = max(alpha * l^2 + beta * l, c); decode = gamma * max(L) + delta * mean(L);
    step = overhead + lambda * max(prefill, decode) + (1 - lambda) * min(prefill, decode), without
    the second line when only one of them is there. For chunks l^2 is the sum of
    new * (2 * context - new) and l that of new tokens: for one whole prompt that is Eq. 6.

    The overhead stands for reading the weights; Eq. 7 has no constant, so without it a decode of
    short contexts would take no time. Constants are of the A100 law's size: beta and alpha are its
    arithmetic per token and per pair; a 28,000-token row beside short ones decodes in 12 + 8 ms
    plus 0.8 us per token of mean context.
    """

    overhead_s: float = 0.012
    alpha_s: float = 1.2e-9
    beta_s: float = 7.3e-5
    floor_s: float = 0.003
    gamma_s: float = 3e-7
    delta_s: float = 8e-7
    lambda_share: float = 0.8

    @property
    def expected(self) -> StepLaw:
        """Itself: this law has no noise."""
        return self

    def step_s(self, items: Sequence[StepItem]) -> float:
        """See the class; a step without requests takes the overhead."""
        prefill_s = self._prefill_s([item for item in items if not item[2]])
        decode_s = self._decode_s([context for _, context, is_decode in items if is_decode])
        if not prefill_s or not decode_s:
            return self.overhead_s + prefill_s + decode_s
        shorter_s, longer_s = sorted((prefill_s, decode_s))
        share = self.lambda_share
        return self.overhead_s + share * longer_s + (1 - share) * shorter_s

    def _prefill_s(self, chunks: Sequence[StepItem]) -> float:
        if not chunks:
            return 0.0
        squares = sum(new * (2 * context - new) for new, context, _ in chunks)
        tokens = sum(new for new, _, _ in chunks)
        return max(self.alpha_s * squares + self.beta_s * tokens, self.floor_s)

    def _decode_s(self, contexts: Sequence[int]) -> float:
        if not contexts:
            return 0.0
        return self.gamma_s * max(contexts) + self.delta_s * sum(contexts) / len(contexts)


@dataclass(frozen=True, slots=True)
class NoisyLaw:
    """Another law with multiplied noise: log-normal, and now and then a step that takes thrice.

    The noise is drawn from `rng`, twice per step.
    """

    law: StepLaw
    rng: random.Random
    sigma: float = 0.1
    stall_share: float = 0.01
    stall_factor: float = 3.0

    @property
    def expected(self) -> StepLaw:
        """The law before noise."""
        return self.law.expected

    def step_s(self, items: Sequence[StepItem]) -> float:
        """The law's duration times the next noise."""
        factor = self.rng.lognormvariate(0.0, self.sigma)
        if self.rng.random() < self.stall_share:
            factor *= self.stall_factor
        return self.law.step_s(items) * factor


@dataclass(frozen=True, slots=True)
class SlowedLaw:
    """Another law on an engine of this speed: steps take 1 / speed times as long."""

    law: StepLaw
    speed: float

    @property
    def expected(self) -> StepLaw:
        """The law without its noise, as slow."""
        return SlowedLaw(self.law.expected, self.speed)

    def step_s(self, items: Sequence[StepItem]) -> float:
        """The law's duration over the speed."""
        return self.law.step_s(items) / self.speed


LAWS: Mapping[str, Callable[[int], StepLaw]] = {
    "a100": lambda seed: A100Law(),
    "pooling": lambda seed: PoolingLaw(),
    "noisy": lambda seed: NoisyLaw(A100Law(), random.Random(seed)),
}
"""By name, from the seed of the noise."""
