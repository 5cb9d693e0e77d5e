"""Routers that rank by load alone, and those of other projects, from their published rules."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

import xxhash

from batchrun.routing.engine_book import Call, EngineBook, Load
from batchrun.routing.router import Router


class Least(Router):
    """The fewest calls in flight, of those the one that had the fewest calls."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        loads = self.book.loads(engines, now_s)
        return sorted(engines, key=lambda i: (loads[i].calls, self.num_sent[i]))


class RoundRobin(Router):
    """One after the other. One that is new or was away has no turns to make up for."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        least = max(map(self.num_sent.__getitem__, engines)) - 1
        for engine in engines:
            self.num_sent[engine] = max(least, self.num_sent[engine])
        return sorted(engines, key=self.num_sent.__getitem__)


class Random(Router):
    """Any."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        return self.rng.sample(list(engines), len(engines))


class TwoChoices(Router):
    """Of two at random the one with fewer prompt tokens in flight (power of two choices)."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        loads = self.book.loads(engines, now_s)
        drawn = self.rng.sample(list(engines), len(engines))
        return [*sorted(drawn[:2], key=lambda i: loads[i].prompt_tokens), *drawn[2:]]


class Hash(Router):
    """Consistent hashing of a prompt's first 1,024 tokens, with bounded loads: who has 1.25 times
    the mean number of calls passes the call on (as KubeAI's `PrefixHash`)."""

    MOST_LOAD, NUM_POINTS, PREFIX_TOKENS = 1.25, 100, 1024

    def __init__(self, book: EngineBook, rng: random.Random) -> None:
        super().__init__(book, rng)
        self._points: list[tuple[int, int]] = []
        self._known: set[int] = set()

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        loads = self.book.loads(engines, now_s)
        if not len(call.keys):
            return sorted(engines, key=lambda i: loads[i].calls)
        last = min(len(call.keys), max(1, int(self.PREFIX_TOKENS / call.piece_tokens))) - 1
        self._place(engines)
        start = bisect_left(self._points, (int(call.keys[last]), 0))
        most = self.MOST_LOAD * (sum(loads[i].calls for i in engines) + 1) / len(engines)
        order = _distinct(self._points[start:] + self._points[:start], set(engines))
        return sorted(order, key=lambda i: loads[i].calls + 1 > most)

    def _place(self, engines: Sequence[int]) -> None:
        """Put engines that are new on the ring."""
        new = [engine for engine in engines if engine not in self._known]
        for engine in new:
            self._known.add(engine)
            for point in range(self.NUM_POINTS):
                key = xxhash.xxh3_64_intdigest(f"{engine}/{point}".encode())
                insort(self._points, (key, engine))


def _distinct(points: Sequence[tuple[int, int]], engines: set[int]) -> list[int]:
    found: dict[int, None] = {}
    for _, engine in points:
        if engine in engines:
            found.setdefault(engine)
            if len(found) == len(engines):
                break
    return list(found)


class CacheAware(Router):
    """The rule of SGLang's and vLLM's router: the fewest calls while loads differ by more than 64
    and by half (today's defaults); else who holds the most, if that is 0.3 of the prompt; else who
    holds the least in all."""

    LEAST_SHARE, MOST_MORE, MOST_RATIO = 0.3, 64, 1.5

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        loads = self.book.loads(engines, now_s)
        calls = [loads[i].calls for i in engines]
        by_calls = sorted(engines, key=lambda i: loads[i].calls)
        if max(calls) - min(calls) > self.MOST_MORE and max(calls) > self.MOST_RATIO * min(calls):
            return by_calls
        cached = self.book.cached_tokens(call, engines, now_s)
        if max(cached[i] for i in engines) >= self.LEAST_SHARE * call.prompt_tokens:
            return sorted(by_calls, key=lambda i: -cached[i])
        return sorted(by_calls, key=lambda i: self.book.prefixes.num_pieces(i, now_s))


class LMetric(Router):
    """New prefill tokens times the batch (LMETRIC, arXiv 2603.15202): no parameter."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        loads = self.book.loads(engines, now_s)
        cached = self.book.cached_tokens(call, engines, now_s)

        def score(i: int) -> float:
            new = loads[i].waiting_tokens + call.prompt_tokens - cached[i]
            return new * (loads[i].calls + 1)

        return sorted(engines, key=lambda i: (score(i), loads[i].calls))


class LlmD(Router):
    """llm-d's endpoint picker, weights 3/2/2: held share of the prompt, queue, free KV, each from
    0 to 1 over the engines."""

    PREFIX, QUEUE, KV = 3.0, 2.0, 2.0

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        loads = self.book.loads(engines, now_s)
        cached = self.book.cached_tokens(call, engines, now_s)
        queues = [loads[i].waiting_calls for i in engines]
        fewest, most = min(queues), max(queues)

        def score(i: int) -> float:
            load = loads[i]
            queue = 1.0 if most == fewest else (most - load.waiting_calls) / (most - fewest)
            kv = 1.0 - min(1.0, load.prompt_tokens / self.book.traits[i].kv_tokens)
            held = cached[i] / max(call.prompt_tokens, 1)
            return self.PREFIX * held + self.QUEUE * queue + self.KV * kv

        return sorted(self.rng.sample(list(engines), len(engines)), key=lambda i: -score(i))


class LlmDSticky(Router):
    """llm-d's later rule, sticky until saturated: engines that hold 0.8 of the prompt, unless the
    best of them has so many more seconds of prefill before it than the best other; then the fewest
    uncached tokens in flight with the call's own."""

    LEAST_SHARE, MOST_MORE_S = 0.8, 18.0

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        loads = self.book.loads(engines, now_s)
        cached = self.book.cached_tokens(call, engines, now_s)

        def tokens(i: int) -> float:
            return loads[i].waiting_tokens + call.prompt_tokens - cached[i]

        order = sorted(engines, key=lambda i: (tokens(i), loads[i].calls))
        sticky = [i for i in order if cached[i] >= self.LEAST_SHARE * call.prompt_tokens]
        others = [i for i in order if i not in sticky]
        if sticky and others:
            per_s = 1 / self.book.traits[sticky[0]].prices.token_s
            if (loads[sticky[0]].waiting_tokens - loads[others[0]].waiting_tokens) / per_s > (
                self.MOST_MORE_S
            ):
                return order
        return [*sticky, *others]


class Sal(Router):
    """SAL (LARRY's paper, section 4.2, equation 2): the larger of two waits, for memory and for
    the queue before the call, both in steps.

    As printed the deficit of memory is multiplied by beta = (prompt + answer) / answer; as waiting
    time it is divided by the rate at which memory is freed, beta for each running call and step.
    """

    is_printed = False

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        loads = self.book.loads(engines, now_s)
        answer = max(self.book.answer_tokens, 1.0)
        beta = (self.book.prompt_tokens + answer) / answer

        def steps(i: int) -> float:
            return self._steps(call, loads[i], i, beta, answer)

        return sorted(engines, key=lambda i: (steps(i), loads[i].calls))

    def _steps(self, call: Call, load: Load, engine: int, beta: float, answer: float) -> float:
        traits = self.book.traits[engine]
        running = load.calls - load.waiting_calls
        used = load.prompt_tokens + running * answer / 2
        deficit = call.prompt_tokens - (traits.kv_tokens - used)
        queued = load.waiting_tokens / traits.budget_tokens
        if self.is_printed:
            return max(beta * deficit, queued)
        return max(deficit / (beta * max(running, 1)), queued)


class SalPrinted(Sal):
    """SAL with equation 2 as printed."""

    is_printed = True
