"""Calls with promises for `benchmarks.online_queue`, and steps to learn a step-time model from."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchrun.estimator.step_load import StepLoad
from batchrun.hints import SloBounds, SloHint, write_hint
from batchrun.simulator.offline_jobs import LogNormalTokens
from batchrun.simulator.virtual.engine import FIRST_TOKEN_ID, LAST_TOKEN_ID, Arrival
from batchrun.simulator.virtual.setup import NONCE, A100Law, StepItem, StepLaw
from benchmarks.scenarios import CHAT_OUTPUT, CHAT_PROMPT, azure_calls

SHORT_CLASSES = {"voice": 0.20, "chat": 0.35, "batch": 0.10}
LONG_CLASSES = {"summary": 0.25, "batch": 0.10}
"""Shares of all calls; short ones have ShareGPT's lengths, long ones have parts of documents."""
LONG_PROMPT_TOKENS = (512, 16_384)
LONG_ANSWER = LogNormalTokens(4.6, 0.8, (4, 600))
MOST_ANSWER_TOKENS = 1_024
BURST_FACTOR, BURST_S, PERIOD_S = 3.0, 10.0, 50.0
NUM_STEPS = 1_500


@dataclass(frozen=True, slots=True)
class Promise:
    """The bounds of a class, in seconds; `is_told` says whether the call carries them."""

    name: str
    ttft_s: float
    tpot_s: float
    jct_s: float | None = None
    is_told: bool = True


VOICE = Promise("voice", 0.5, 0.05)
CHAT = Promise("chat", 1.5, 0.1)
BATCH = Promise("batch", 39.0, 1.0, 40.0)
SUMMARY = Promise("summary", 2.0, 0.1875)
"""Beside the TTFT bound three times what the prompt takes alone."""
PLAIN = Promise("default", 1.0, 0.05, is_told=False)
PROMISES = {promise.name: promise for promise in (VOICE, CHAT, BATCH, SUMMARY)}


@dataclass(frozen=True, slots=True)
class PromisedCall:
    """One call; what it carries is its promise, not the length of its answer. Its prompt begins
    with `parts`, (name, tokens) of what other prompts may have too."""

    arrival_at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    promise: Promise
    parts: tuple[tuple[int, int], ...] = ()


def classed_calls(rate_per_s: float, duration_s: float, seed: int) -> list[PromisedCall]:
    """Poisson arrivals of all classes."""
    rng, at_s = random.Random(2_000 + seed), 0.0
    kinds = [*((name, False) for name in SHORT_CLASSES), *((name, True) for name in LONG_CLASSES)]
    weights = [*SHORT_CLASSES.values(), *LONG_CLASSES.values()]
    calls: list[PromisedCall] = []
    while True:
        at_s += rng.expovariate(rate_per_s)
        if at_s >= duration_s:
            return calls
        ((name, is_long),) = rng.choices(kinds, weights)
        if is_long:
            prompt = round(math.exp(rng.uniform(*map(math.log, LONG_PROMPT_TOKENS))))
            answer = LONG_ANSWER.draw(rng)
        else:
            prompt, answer = CHAT_PROMPT.draw(rng), CHAT_OUTPUT.draw(rng)
        promise = PROMISES[name]
        if promise is SUMMARY:
            promise = replace(promise, ttft_s=promise.ttft_s + 3 * alone_s(prompt))
        calls.append(PromisedCall(at_s, prompt, answer, promise))


def alone_s(prompt_tokens: int) -> float:
    """What a prompt takes on an engine of its own."""
    return A100Law().step_s([(prompt_tokens, prompt_tokens, False)])


def bursty_calls(rate_per_s: float, duration_s: float, seed: int) -> list[PromisedCall]:
    """Lengths of Azure's conversations in their order, `rate_per_s` on average, `BURST_FACTOR`
    times as often for the first `BURST_S` of every `PERIOD_S`. No call brings bounds."""
    trace = azure_calls(1.0)
    rng, at_s = random.Random(3_000 + seed), 0.0
    number = rng.randrange(len(trace.arrivals_s))
    mean_factor = 1 + (BURST_FACTOR - 1) * BURST_S / PERIOD_S
    calls: list[PromisedCall] = []
    while True:
        factor = BURST_FACTOR if at_s % PERIOD_S < BURST_S else 1.0
        at_s += rng.expovariate(rate_per_s * factor / mean_factor)
        if at_s >= duration_s:
            return calls
        number = (number + 1) % len(trace.arrivals_s)
        lengths = trace.prompt_tokens[number], trace.output_tokens[number]
        calls.append(PromisedCall(at_s, *lengths, PLAIN))


class PromisedCalls:
    """The users of one engine: a `TrafficSource` of `call-0`, `call-1` and so on."""

    def __init__(
        self, calls: Sequence[PromisedCall], seed: int, *, tells_lengths: bool = False
    ) -> None:
        """With `tells_lengths` the most tokens that a call allows are those that it will get."""
        self._calls = calls
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._next = 0
        self._tells_lengths = tells_lengths

    @property
    def next_due_s(self) -> float:
        """The next call; infinity after the last."""
        return self._calls[self._next].arrival_at_s if self._next < len(self._calls) else math.inf

    def take_due(self, now_s: float) -> list[Arrival]:
        """The calls made by now."""
        due: list[Arrival] = []
        while self.next_due_s <= now_s:
            due.append(self._arrival(self._next))
            self._next += 1
        return due

    def on_finished(self, request_id: str) -> None:
        """Nobody waits for an answer before the next call."""

    def _arrival(self, number: int) -> Arrival:
        call, promise = self._calls[number], self._calls[number].promise
        own = call.num_prompt_tokens - sum(tokens for _, tokens in call.parts)
        prompt: list[int] = []
        for name, tokens in call.parts:
            prompt += self._drawn(np.random.default_rng((self._seed, name % 2**63)), tokens)
        prompt += self._drawn(self._rng, own)
        most = max(MOST_ANSWER_TOKENS, call.num_output_tokens)
        bounds = SloBounds(ttft_s=promise.ttft_s, tpot_s=promise.tpot_s, jct_s=promise.jct_s)
        return Arrival(
            f"call-{number}",
            True,
            call.arrival_at_s,
            prompt,
            call.num_output_tokens if self._tells_lengths else most,
            hint=write_hint(SloHint(slo=bounds), NONCE) if promise.is_told else None,
            num_output_tokens=call.num_output_tokens,
        )

    @staticmethod
    def _drawn(rng: np.random.Generator, tokens: int) -> list[int]:
        found: list[int] = rng.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID + 1, tokens).tolist()
        return found


def synthetic_steps(law: StepLaw, seed: int) -> Iterator[tuple[StepLoad, float]]:
    """Steps of all sizes, and what each took: what a calibrated engine has seen."""
    rng = random.Random(4_000 + seed)
    for _ in range(NUM_STEPS):
        items: list[StepItem] = []
        for _ in range(rng.choice((0, 1, 8, 32, 64, 128))):
            items.append((1, rng.randint(50, 6_000), True))
        left = rng.choice((0, 64, 256, 512, 1_024, 2_048))
        while left > 0:
            new = min(left, rng.randint(16, 2_048))
            items.append((new, new + rng.choice((0, 0, 512, 4_096, 12_000)), False))
            left -= new
        if items:
            yield StepLoad.of(items), law.step_s(items)
