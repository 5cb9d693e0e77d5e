"""Arrivals of online calls, made from a seed: Poisson with bursts, log-normal lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

_COMMON = """
a about after all also and any are as at back be because but by can come could day do even
find first for from get give go good great hand have he her here him his how I if in into it
its just know last life like line long look make man many may me more most much my name new
no not now of off old on one only or other our out over own part people place point right
same say see she short show side small so some still take tell than that the their them then
there these they thing think this time to two under up us use very want water way we well
what when where which who will with word work world would write year you your
"""
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class Arrival:
    """One online call: `at_s` after the start of the trace; `max_tokens` caps its answer."""

    at_s: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Log-normal token counts: `mu` and `sigma` of the logarithm, clipped to the two bounds."""

    mu: float
    sigma: float
    min_tokens: int
    max_tokens: int

    def draw(self, rng: random.Random) -> int:
        """One token count."""
        return max(
            self.min_tokens, min(self.max_tokens, round(rng.lognormvariate(self.mu, self.sigma)))
        )


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Poisson arrivals at `rate_per_s`, times `burst_factor` in the first `burst_length_s` of
    every `burst_period_s`.

    Prompt lengths are aimed at with one common word per token; a tokenizer may count more.
    """

    duration_s: float
    rate_per_s: float
    burst_factor: float = 4.0
    burst_period_s: float = 30.0
    burst_length_s: float = 5.0
    prompt: TokenRange = TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=400)
    output: TokenRange = TokenRange(mu=3.0, sigma=0.6, min_tokens=4, max_tokens=100)

    def rate_at(self, at_s: float) -> float:
        """Arrivals per second at an instant of the trace."""
        is_burst = at_s % self.burst_period_s < self.burst_length_s
        return self.rate_per_s * (self.burst_factor if is_burst else 1.0)


def generate_trace(shape: TraceShape, *, seed: int) -> list[Arrival]:
    """The arrivals of `shape` in order of time; the same seed gives the same trace."""
    rng = random.Random(seed)
    top_rate_per_s = shape.rate_per_s * max(1.0, shape.burst_factor)
    arrivals: list[Arrival] = []
    at_s = 0.0
    while top_rate_per_s > 0:
        at_s += rng.expovariate(top_rate_per_s)
        if at_s >= shape.duration_s:
            break
        # Thinning: candidates come at the highest rate, each is kept with its instant's share.
        if rng.random() * top_rate_per_s < shape.rate_at(at_s):
            num_words = shape.prompt.draw(rng)
            max_tokens = shape.output.draw(rng)
            arrivals.append(Arrival(at_s, make_prompt(num_words, rng=rng), max_tokens))
    return arrivals


def make_prompt(num_words: int, *, rng: random.Random) -> str:
    """Text of common words; no two prompts share more than a few leading words."""
    return " ".join(rng.choices(WORDS, k=num_words))
