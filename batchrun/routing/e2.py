"""Preble's global scheduler E2 (arXiv 2407.00023, section 4.2), whole.

Exploit where more of the prompt is held than must be computed, else explore by the load of the
last calls, what must be evicted and the prompt's own prefill. Algorithm 1 is printed with a
condition that any hit fulfils; the text's is built. Three more: calls for the heaviest engine go to
the lightest while their loads differ too much, a prefix whose queueing time doubles gets one more
home, and an engine that mostly decodes takes new prefills first.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from batchrun.routing.engine_book import Call, EngineBook, Sent
from batchrun.routing.router import Router

WINDOW_S = 60.0
"""The paper's H: how far back the load of an engine goes. It prints no number."""
WINDOW_CALLS = 200
"""Calls of one prefix whose queueing times are compared, the newer half with the older."""
MOST_IMBALANCE = 1.5
"""Th_bal, the heaviest load over the lightest. It prints no number."""
MOST_DECODE_SHARE = 0.7
"""IMBALR. It prints no number."""
MAX_PREFIXES = 65_536


@dataclass(slots=True)
class _Window:
    """The calls of one engine of late: when each was sent, its seconds of prefill and of decode."""

    calls: deque[tuple[float, float, float]] = field(default_factory=deque)
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def add(self, now_s: float, prefill_s: float, decode_s: float) -> None:
        self.calls.append((now_s, prefill_s, decode_s))
        self.prefill_s += prefill_s
        self.decode_s += decode_s

    def expire(self, now_s: float) -> None:
        while self.calls and self.calls[0][0] < now_s - WINDOW_S:
            _, prefill_s, decode_s = self.calls.popleft()
            self.prefill_s -= prefill_s
            self.decode_s -= decode_s

    @property
    def load_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def decode_share(self) -> float:
        return self.decode_s / self.load_s if self.load_s > 0 else 0.0


@dataclass(slots=True)
class _Waits:
    """Queueing times of the calls of one prefix: the newest, and those before them."""

    newest_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_CALLS // 2))
    before_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_CALLS // 2))

    LEAST_CALLS = 16

    def add(self, wait_s: float) -> None:
        if len(self.newest_s) == self.newest_s.maxlen:
            self.before_s.append(self.newest_s[0])
        self.newest_s.append(wait_s)

    @property
    def has_doubled(self) -> bool:
        if len(self.before_s) < self.LEAST_CALLS:
            return False
        before_s = sum(self.before_s) / len(self.before_s)
        return sum(self.newest_s) / len(self.newest_s) > 2 * before_s


class E2(Router):
    """Exploit or explore; the class attributes leave parts out, for Preble's ablation."""

    rebalances = True
    replicates = True
    balances_decodes = True

    def __init__(self, book: EngineBook, rng: random.Random) -> None:
        super().__init__(book, rng)
        self._windows: defaultdict[int, _Window] = defaultdict(_Window)
        self._waits: OrderedDict[int, _Waits] = OrderedDict()

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        for engine in engines:
            self._windows[engine].expire(now_s)
        cached = self.book.cached_tokens(call, engines, now_s)
        costs = {engine: self._cost_s(call, engine, cached[engine]) for engine in engines}
        by_cost = sorted(engines, key=lambda i: (costs[i], self.num_sent[i]))
        most = max(cached[i] for i in engines)
        if 2 * most > call.prompt_tokens:
            homes = [i for i in by_cost if cached[i] == most]
            homes += self._extra_homes(call, homes, by_cost)
            return self._shifted([*homes, *(i for i in by_cost if i not in homes)])
        return self._shifted(self._most_decoding_first(by_cost))

    def sent(self, call: Call, engine: int, now_s: float, *, in_line: bool = True) -> Sent:
        """See `Router`. A cached prompt counts as a decode, what is missed as prefill."""
        sent = super().sent(call, engine, now_s, in_line=in_line)
        prices, answer = self.book.traits[engine].prices, self.book.answer_tokens
        context = call.prompt_tokens + answer / 2
        decode_s = answer * (prices.call_s + context * prices.context_token_s)
        self._windows[engine].add(now_s, sent.prefill_s, decode_s)
        return sent

    def first_token(self, sent: Sent, now_s: float) -> None:
        """See `Router`."""
        is_first = sent.is_waiting and sent.in_line
        super().first_token(sent, now_s)
        if not is_first or not len(sent.call.keys):
            return
        waits = self._waits.setdefault(_home_key(sent.call), _Waits())
        self._waits.move_to_end(_home_key(sent.call))
        waits.add(max(0.0, now_s - sent.at_s - sent.prefill_s))
        if len(self._waits) > MAX_PREFIXES:
            self._waits.popitem(last=False)

    def _cost_s(self, call: Call, engine: int, cached: int) -> float:
        """Algorithm 2: L of the window, M of what is evicted, R of the own prefill."""
        own_s = self.book.traits[engine].prices.prefill_s(call.prompt_tokens, cached)
        num_new = (call.prompt_tokens - cached) / call.piece_tokens
        prefixes = self.book.prefixes
        evicted = float(prefixes.evicted_shares(np.array([engine]), np.array([num_new]))[0])
        evicted_s = own_s * evicted * prefixes.mean_uses
        return self._windows[engine].load_s + evicted_s + own_s

    def _most_decoding_first(self, by_cost: list[int]) -> list[int]:
        """Where some engines mostly decode, the one that does most of them goes first."""
        shares = [self._windows[engine].decode_share for engine in by_cost]
        if not self.balances_decodes or not min(shares) <= MOST_DECODE_SHARE < max(shares):
            return by_cost
        first = by_cost[shares.index(max(shares))]
        return [first, *(engine for engine in by_cost if engine != first)]

    def _extra_homes(
        self, call: Call, homes: Sequence[int], by_cost: Sequence[int]
    ) -> Sequence[int]:
        waits = self._waits.get(_home_key(call)) if len(call.keys) else None
        others = [engine for engine in by_cost if engine not in homes]
        if not self.replicates or waits is None or not others or not waits.has_doubled:
            return ()
        waits.before_s.clear()
        return others[:1]

    def _shifted(self, order: list[int]) -> list[int]:
        """While the first is the heaviest by far, the lightest goes before it."""
        if not self.rebalances or len(order) < 2:
            return order
        by_load = sorted(order, key=lambda i: self._windows[i].load_s)
        lightest, heaviest = by_load[0], by_load[-1]
        least_s, most_s = self._windows[lightest].load_s, self._windows[heaviest].load_s
        if order[0] != heaviest or most_s <= MOST_IMBALANCE * least_s:
            return order
        return [lightest, *(engine for engine in order if engine != lightest)]


def _home_key(call: Call) -> int:
    """The prefix whose queue is watched: the prompt's first half, which its key portion ends in."""
    return int(call.keys[len(call.keys) // 2])


class E2Plain(E2):
    """Exploit and explore alone."""

    rebalances = replicates = balances_decodes = False
