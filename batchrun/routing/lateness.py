"""Which calls cannot have their first token in time, as far as their gateway can tell.

Every worker knows the calls that it sent itself one by one, and of those of all workers how many
tokens of prompts wait. What of these goes before a call is taken to be the share that it is among
the worker's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from batchrun.hints import SloBounds
from batchrun.routing.engine_book import Call, EngineBook, Sent

NUM_PACES, LEAST_PACES = 64, 16
"""First tokens that tell how long calls really wait in an engine, and how few tell nothing yet."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call without a first token: when that is due, what the call is worth, the tokens of its
    prompt that are to be computed, and of those that go before it. One `is_alone` that found none
    waiting."""

    due_s: float
    value: float
    tokens: int
    ahead_tokens: float
    is_alone: bool

    def goes_before(self, due_s: float, value: float, now_s: float) -> bool:
        """Whether it is served before a call that is due then. What is late goes last."""
        if now_s > self.due_s:
            return False
        return self.value > value or (self.value == value and self.due_s <= due_s)


class LateCalls:
    """The calls of one worker that wait in engines, and by how much new ones would be late.

    How long a call waits is learnt by engine, in medians of the last ones: what it waits anyway,
    from calls that found nobody, and from those that found others, and may wait out a step under
    way too, how much longer than twice that for each token more. Instants are the book's.
    """

    def __init__(self, book: EngineBook) -> None:
        self._book = book
        self._waiting: dict[int, dict[Sent, _Waiting]] = {}
        self._paces_s: dict[int, deque[float]] = {}
        self._alone: dict[int, deque[tuple[float, int]]] = {}

    def excess_s(
        self, call: Call, slo: SloBounds, engines: Sequence[int], now_s: float
    ) -> dict[int, float]:
        """By how much the first token of the call would be late in each engine; 0 where it may be
        in time, where nobody knows yet, and where its prompt alone takes too long: to come back
        later is of no use then. O(calls that wait)."""
        bound_s = bound_of(slo)
        cached = self._book.cached_tokens(call, engines, now_s)
        found: dict[int, float] = {}
        for engine in engines:
            paces_s = self._paces_s.get(engine, ())
            found[engine] = 0.0
            if len(paces_s) < LEAST_PACES or not self._waiting.get(engine):
                continue
            pace_s, (alone_s, alone_tokens) = median(paces_s), self._usual_alone(engine)
            own_s = pace_s * (call.prompt_tokens - cached[engine])
            own_s += max(0.0, alone_s - pace_s * alone_tokens)
            if own_s <= bound_s:
                ahead, _ = self._ahead_tokens(engine, now_s + bound_s, slo.value, now_s)
                found[engine] = max(0.0, own_s + pace_s * ahead - bound_s)
        return found

    def sent(self, sent: Sent, slo: SloBounds) -> None:
        """A call with this promise goes to an engine; before the book is told of the next one."""
        due_s, tokens = sent.at_s + bound_of(slo), sent.call.prompt_tokens - sent.cached_tokens
        # The book counts the call itself already.
        ahead, others = self._ahead_tokens(
            sent.engine, due_s, slo.value, sent.at_s, but_tokens=tokens
        )
        waiting = self._waiting.setdefault(sent.engine, {})
        waiting[sent] = _Waiting(due_s, slo.value, tokens, ahead, is_alone=others == 0)

    def began(self, sent: Sent, now_s: float) -> None:
        """Its first token was seen."""
        call = self._waiting.get(sent.engine, {}).get(sent)
        if call is not None and call.is_alone:
            alone = self._alone.setdefault(sent.engine, deque(maxlen=NUM_PACES))
            alone.append((now_s - sent.at_s, call.tokens))
        elif call is not None and call.ahead_tokens:
            alone_s, alone_tokens = self._usual_alone(sent.engine)
            line_tokens = call.ahead_tokens + call.tokens
            # By few tokens more than those of two steps nothing could be told.
            more_tokens = max(line_tokens - 2 * alone_tokens, line_tokens / 2)
            paces_s = self._paces_s.setdefault(sent.engine, deque(maxlen=NUM_PACES))
            paces_s.append(max(0.0, now_s - sent.at_s - 2 * alone_s) / more_tokens)
        self.left(sent)

    def left(self, sent: Sent) -> None:
        """It waits no longer, whatever became of it."""
        self._waiting.get(sent.engine, {}).pop(sent, None)

    def forget(self, engine: int) -> None:
        """It is another engine from now on, or was started anew."""
        self._paces_s.pop(engine, None)
        self._alone.pop(engine, None)

    def _usual_alone(self, engine: int) -> tuple[float, float]:
        """How long a call waits that finds nobody, and for how many tokens; 0 where none did."""
        waits_s, tokens = zip(*self._alone.get(engine, [(0.0, 0)]), strict=True)
        return median(waits_s), median(tokens)

    def _ahead_tokens(
        self, engine: int, due_s: float, value: float, now_s: float, *, but_tokens: int = 0
    ) -> tuple[float, int]:
        """Tokens of the prompts that go before a call, and of all that wait; `but_tokens` of those
        in the book are its own."""
        own = self._waiting.get(engine, {}).values()
        all_tokens = sum([each.tokens for each in own])
        before = [each.tokens for each in own if each.goes_before(due_s, value, now_s)]
        others = max(0, self._book.loads((engine,), now_s)[engine].waiting_tokens - but_tokens)
        return sum(before) / max(1, all_tokens) * others, others


def bound_of(slo: SloBounds) -> float:
    """Seconds in which the first token of a call is to come."""
    return slo.ttft_s if slo.jct_s is None else min(slo.ttft_s, slo.jct_s)
