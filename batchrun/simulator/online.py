"""Online calls of a simulation, recorded or drawn, and the gateway that spreads them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import xxhash

from batchrun.routing.engine_book import Call, EngineBook, EngineTraits, Sent
from batchrun.routing.routers import DEFAULT_ROUTER, make_router
from batchrun.simulator.offline_jobs import Keys, LogNormalTokens, key_of, mixed, prompt_of
from batchrun.simulator.traces.trace import Floats, Ints, PrefixBlocks, Trace
from batchrun.simulator.virtual.engine import Arrival, RequestRecord, answer_of

NO_KEYS: Keys = np.empty(0, np.uint64)
PREFIX = "online-"
PIECE_BYTES, TOKEN_BYTES = 1024, 4
"""What the gateway knows a prompt by: as much of a real prompt's text is 256 tokens."""
START_S = 1.0
"""What the book's clock, which is positive, is ahead of the engines'."""
MIN_RATE_PER_S = 0.05


@dataclass(frozen=True, slots=True)
class OnlineCall:
    """One online request: `num_system_tokens` that all begin with, and a prompt of its own.

    The next turn of a conversation names the call of the turn before, by its place in the list of
    calls: its prompt is that call's prompt and answer, and then its own.
    """

    arrival_at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_system_tokens: int = 0
    previous: int | None = None


@dataclass(frozen=True, slots=True)
class OnlineTraffic:
    """Arrivals at rate_per_s * (1 + swing * sin(t / swing_s)), times `burst_factor` for the first
    `burst_length_s` of every `burst_period_s` that begins at `burst_at_s`.

    Gaps have the coefficient of variation `gap_cv`: 1 is Poisson, more is a gamma distribution
    whose calls come in clusters. Every prompt begins with the same `system_tokens` tokens, beside
    its own.
    """

    rate_per_s: float
    burst_factor: float
    burst_length_s: float
    burst_period_s: float
    prompt: LogNormalTokens
    output: LogNormalTokens
    swing: float = 0.0
    swing_s: float = 60.0
    system_tokens: int = 0
    burst_at_s: float = 0.0
    gap_cv: float = 1.0

    def rate_at(self, t_s: float) -> float:
        """Arrivals per second at an instant; never quite 0."""
        is_burst = (t_s - self.burst_at_s) % self.burst_period_s < self.burst_length_s
        tide = 1 + self.swing * math.sin(t_s / self.swing_s)
        return max(self.rate_per_s * tide * (self.burst_factor if is_burst else 1), MIN_RATE_PER_S)

    def draw(self, duration_s: float, seed: int) -> list[OnlineCall]:
        """The calls of the first `duration_s` seconds, by arrival."""
        rng, t_s = random.Random(1000 + seed), 0.0
        calls: list[OnlineCall] = []
        while True:
            t_s += self._gap_s(rng, self.rate_at(t_s))
            if t_s >= duration_s:
                return calls
            prompt, output = self.prompt.draw(rng), self.output.draw(rng)
            calls.append(OnlineCall(t_s, prompt, output, self.system_tokens))

    def _gap_s(self, rng: random.Random, rate_per_s: float) -> float:
        if self.gap_cv == 1.0:
            return rng.expovariate(rate_per_s)
        return rng.gammavariate(self.gap_cv**-2, self.gap_cv**2 / rate_per_s)


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Calls in memory: `arrival_s` rises from 0, lengths are 1 or more.

    `prefix` is None where no two calls share a prompt's beginning. `previous` has the call of the
    turn before, for those that go on with a conversation: their prompts begin with all of it.
    """

    arrival_s: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    prefix: PrefixBlocks | None = None
    previous: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: Sequence[OnlineCall]) -> Calls:
        """From the calls of a generator, by arrival."""
        previous = {i: call.previous for i, call in enumerate(calls) if call.previous is not None}
        system = np.array([call.num_system_tokens for call in calls], np.int64)
        prefix = None
        if block_tokens := int(np.gcd.reduce(system)):
            blocks = [[1] * (num_tokens // block_tokens) for num_tokens in system]
            prefix = PrefixBlocks.of(blocks, block_tokens)
        prompts = (system + [call.num_prompt_tokens for call in calls]).tolist()
        for index, before in previous.items():
            prompts[index] += prompts[before] + calls[before].num_output_tokens
        return cls(
            np.array([call.arrival_at_s for call in calls], np.float64),
            np.array(prompts, np.int64),
            np.array([call.num_output_tokens for call in calls], np.int64),
            prefix,
            previous,
        )


CallTrace = Calls | Trace


def first_too_long(calls: CallTrace, max_model_len: int) -> int | None:
    """The first call that an engine with such a context refuses; None when all of them fit."""
    too_long = np.flatnonzero(calls.num_prompt_tokens + calls.num_output_tokens > max_model_len)
    return int(too_long[0]) if too_long.size else None


class Sender(Protocol):
    """Who spreads requests over engines."""

    @property
    def next_due_s(self) -> float:
        """When a request may be sent next; infinity while none is to come."""

    def send(self, now_s: float) -> None:
        """Hand all requests that are due to the engines' ports."""


class OnlineRouter:
    """The gateway: each call goes to the engine that the router of this name ranks first.

    No call limits its answer: engines with a context of `max_model_len` learn of an answer's length
    by its end. What the engines have is as of the clock of the one that is behind; another one may
    be a step ahead. `num_arrived` counts the calls made so far.
    """

    def __init__(
        self,
        calls: CallTrace,
        engines: Sequence[EngineTraits],
        seed: int,
        max_model_len: int,
        router: str = DEFAULT_ROUTER,
    ) -> None:
        self._calls = calls
        self._previous = calls.previous if isinstance(calls, Calls) else {}
        self._goes_on = set(self._previous.values())
        self._told: dict[int, list[int]] = {}
        self._max_model_len = max_model_len
        self._numbers = range(len(engines))
        self.router = make_router(router, EngineBook.of(engines), seed)
        self._arrival_s: list[float] = calls.arrival_s.tolist()
        self._seed_key = key_of(seed, 1)
        self._sent: dict[str, Sent] = {}
        self.ports = [EnginePort(self) for _ in engines]
        self.num_arrived = 0

    @property
    def next_due_s(self) -> float:
        """The next call; infinity after the last."""
        has_more = self.num_arrived < len(self._arrival_s)
        return self._arrival_s[self.num_arrived] if has_more else math.inf

    def send(self, now_s: float) -> None:
        """Give all calls made by now to engines."""
        while self.next_due_s <= now_s:
            at_s = self.next_due_s + START_S
            arrival = self._arrival(self.num_arrived)
            call = self._seen(arrival.prompt_token_ids)
            index = self.router.rank(call, self._numbers, at_s)[0]
            self._sent[arrival.request_id] = self.router.sent(call, index, at_s)
            self.ports[index].waiting.append(arrival)
            self.num_arrived += 1

    def started(self, request_id: str, now_s: float) -> None:
        """The first token of a call has come."""
        self.router.first_token(self._sent[request_id], now_s + START_S)

    def ended(self, record: RequestRecord, now_s: float) -> None:
        """A call has ended."""
        sent = self._sent.pop(record.request_id)
        output_tokens = len(record.output_token_ids)
        self.router.ended(sent, now_s + START_S, record.num_hit_tokens, output_tokens)

    def _seen(self, prompt_token_ids: Sequence[int]) -> Call:
        """What the gateway sees of a prompt: the keys of its pieces, where there is a choice."""
        keys: list[int] = []
        if len(self._numbers) > 1:
            text = np.asarray(prompt_token_ids, np.uint32).tobytes()
            for start in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
                before = keys[-1] if keys else 0
                keys.append(xxhash.xxh3_64_intdigest(text[start : start + PIECE_BYTES], before))
        return Call(len(prompt_token_ids), np.array(keys, np.uint64), PIECE_BYTES / TOKEN_BYTES)

    def _arrival(self, index: int) -> Arrival:
        calls, request_id = self._calls, f"{PREFIX}{index}"
        num_tokens = int(calls.num_prompt_tokens[index])
        num_output_tokens = int(calls.num_output_tokens[index])
        before = self._told.pop(self._previous.get(index, index), [])
        prompt = before + self._own_prompt(index, num_tokens - len(before))
        if index in self._goes_on:
            self._told[index] = prompt + answer_of(request_id, num_tokens, num_output_tokens)
        return Arrival(
            request_id,
            True,
            self._arrival_s[index],
            prompt,
            self._max_model_len - num_tokens,
            num_output_tokens=num_output_tokens,
        )

    def _own_prompt(self, index: int, num_tokens: int) -> list[int]:
        """The prompt of a call, or in a later turn what is new of it."""
        shared, chain, block_tokens = self._calls.prefix, NO_KEYS, 1
        if shared is not None and index not in self._previous:
            hashes, block_tokens = shared.of_request(index).astype(np.uint64), shared.block_tokens
            # Two blocks of one text in different places have different KV.
            chain = np.bitwise_xor.accumulate(mixed(hashes, np.arange(len(hashes))))
        own_key = key_of(self._seed_key, index)
        tokens: list[int] = prompt_of(chain, block_tokens, num_tokens, own_key).tolist()
        return tokens


class EnginePort:
    """The requests of one engine that have been sent: a `TrafficSource`.

    `sender` spreads requests over the `ports` of all engines.
    """

    def __init__(self, sender: Sender) -> None:
        self.waiting: list[Arrival] = []
        self._sender = sender

    @property
    def next_due_s(self) -> float:
        """The next request that may be for this engine."""
        waiting = self.waiting
        return waiting[0].arrival_at_s if waiting else self._sender.next_due_s

    def take_due(self, now_s: float) -> list[Arrival]:
        """The requests sent by now."""
        self._sender.send(now_s)
        num_due = sum(arrival.arrival_at_s <= now_s for arrival in self.waiting)
        due = self.waiting[:num_due]
        del self.waiting[:num_due]
        return due

    def on_finished(self, request_id: str) -> None:
        """Told of the end of every request of the engine."""


def windows_of(calls: CallTrace, duration_s: float, num: int, window_s: float, seed: int) -> Calls:
    """A day in short: `num` windows of `window_s`, one at a random place in each `num`-th part of
    the first `duration_s`, one after the other.

    Raises ValueError when a part is shorter than a window.
    """
    part_s = duration_s / num
    if window_s > part_s:
        raise ValueError(f"{num} windows of {window_s:g} s do not fit into {duration_s:g} s")
    rng = np.random.default_rng(seed)
    starts_s = part_s * np.arange(num) + rng.uniform(0, part_s - window_s, num)
    edges = np.searchsorted(calls.arrival_s, (starts_s, starts_s + window_s)).T
    chosen = np.concatenate([np.arange(first, after) for first, after in edges])
    number = np.repeat(np.arange(num), edges[:, 1] - edges[:, 0])
    return Calls(
        calls.arrival_s[chosen] - starts_s[number] + number * window_s,
        calls.num_prompt_tokens[chosen],
        calls.num_output_tokens[chosen],
        None if calls.prefix is None else calls.prefix.take(chosen),
    )
