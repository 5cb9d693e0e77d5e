"""Engines of a few lines on the virtual clock, for tables of many routers, loads and seeds.

Chunked prefill, first come, first served, an LRU prefix cache in units of 64 tokens with reference
counts, and the law of the virtual A100: 30 to 60 times quicker than the simulator's engines, which
`benchmarks.routing --shipped` runs instead.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.engine_book import Call, Sent
from batchrun.routing.router import Router

UNIT_TOKENS = 64
PIECE_UNITS = 4
PIECE_TOKENS = UNIT_TOKENS * PIECE_UNITS
KV_TOKENS = 137_600
MAX_RUNNING = 256
BUDGET_TOKENS = 2048

OVERHEAD_S = 0.003
TOKEN_S = 16e9 / 220e12
PAIR_S = 4 * 4096 * 32 / 220e12
WEIGHTS_S = 16e9 / 1.4e12
CONTEXT_S = 131_072 / 1.4e12
OVERLAP_LOSS = 0.25


Report = Callable[[int, KeyArray], None]
"""Told of an engine, by number, and of the keys of pieces that it no longer holds."""


@dataclass(slots=True, eq=False)
class LightCall:
    """A call of a workload: `units` are chained keys of its prompt's units of 64 tokens."""

    arrival_at_s: float
    prompt_tokens: int
    output_tokens: int
    units: KeyArray
    seen: Call = field(init=False)
    sent: Sent | None = None
    engine: int = -1
    left_tokens: int = 0
    computed_tokens: int = 0
    held_units: int = 0
    cached_tokens: int = 0
    first_token_at_s: float = math.inf
    end_at_s: float = math.inf

    def __post_init__(self) -> None:
        keys = self.units[PIECE_UNITS - 1 :: PIECE_UNITS]
        self.seen = Call(self.prompt_tokens, keys, PIECE_TOKENS)


class LightEngine:
    """One engine. `step` moves its clock by one step, or to `until_s` where there is no work."""

    def __init__(self, number: int, speed: float = 1.0) -> None:
        self.number, self.speed = number, speed
        self.now_s = 0.0
        self.waiting: deque[LightCall] = deque()
        self._prefills: list[LightCall] = []
        self._ends: list[tuple[int, int, LightCall]] = []
        self._numbers = count()
        self._num_steps = 0
        self._context_tokens = 0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._refs: dict[int, int] = {}
        self._private_units = 0
        self.ended: list[LightCall] = []
        self.started: list[LightCall] = []

    @property
    def num_running(self) -> int:
        return len(self._prefills) + len(self._ends)

    @property
    def decoding(self) -> list[LightCall]:
        """Those that get a token in the next step besides prefills that end in it."""
        return [call for *_, call in self._ends]

    @property
    def held_units(self) -> set[int]:
        """Keys of the full units that are held, in use or not."""
        return self._refs.keys() | self._cache.keys()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._prefills or self._ends)

    def step(self) -> None:
        """Compute one step; tells whose first token came, and who ended, in `started`, `ended`."""
        self._admit()
        left = BUDGET_TOKENS - len(self._ends)
        tokens, contexts, pairs = len(self._ends), self._context_tokens, 0.0
        done: list[LightCall] = []
        pairs += self._context_tokens
        for call in self._prefills:
            chunk = min(left, call.left_tokens)
            if chunk <= 0:
                break
            left -= chunk
            call.computed_tokens += chunk
            call.left_tokens -= chunk
            tokens += chunk
            contexts += call.computed_tokens
            pairs += chunk * (call.computed_tokens - 0.5 * chunk)
            if not call.left_tokens:
                done.append(call)
        compute_s = TOKEN_S * tokens + PAIR_S * pairs
        memory_s = WEIGHTS_S + CONTEXT_S * contexts
        short_s, long_s = sorted((compute_s, memory_s))
        self.now_s += (OVERHEAD_S + long_s + OVERLAP_LOSS * short_s) / self.speed
        self._num_steps += 1
        self._context_tokens += len(self._ends)
        for call in done:
            self._prefills.remove(call)
            call.first_token_at_s = self.now_s
            self.started.append(call)
            end = self._num_steps + call.output_tokens - 1
            heapq.heappush(self._ends, (end, next(self._numbers), call))
            self._context_tokens += call.prompt_tokens
        while self._ends and self._ends[0][0] <= self._num_steps:
            self._end(heapq.heappop(self._ends)[2])

    def cached_of(self, call: LightCall) -> int:
        """Tokens of a call's prompt that are held now."""
        num = 0
        for key in call.units.tolist():
            if key not in self._refs and key not in self._cache:
                break
            num += 1
        return min(num * UNIT_TOKENS, call.prompt_tokens)

    def _end(self, call: LightCall) -> None:
        call.end_at_s = self.now_s
        self._context_tokens -= call.prompt_tokens + call.output_tokens - 1
        for key in reversed(call.units.tolist()):
            self._refs[key] -= 1
            if not self._refs[key]:
                del self._refs[key]
                self._cache[key] = None
        self._private_units -= call.held_units
        self.ended.append(call)

    def _admit(self) -> None:
        most = KV_TOKENS // UNIT_TOKENS
        while self.waiting and self.num_running < MAX_RUNNING:
            call = self.waiting[0]
            keys = call.units.tolist()
            num_hit = 0
            for key in keys:
                if key not in self._refs and key not in self._cache:
                    break
                num_hit += 1
            num_new = sum(key not in self._refs for key in keys)
            tail = call.prompt_tokens - len(keys) * UNIT_TOKENS + call.output_tokens
            private = -(-tail // UNIT_TOKENS)
            used = len(self._refs) + self._private_units
            if used + num_new + private > most and self.num_running:
                return
            self.waiting.popleft()
            for key in keys:
                self._cache.pop(key, None)
                self._refs[key] = self._refs.get(key, 0) + 1
            self._private_units += private
            call.held_units = private
            over = len(self._cache) + len(self._refs) + self._private_units - most
            self._evict(min(max(over, 0), len(self._cache)))
            call.cached_tokens = min(num_hit * UNIT_TOKENS, call.prompt_tokens - 1)
            call.computed_tokens = call.cached_tokens
            call.left_tokens = call.prompt_tokens - call.cached_tokens
            self._prefills.append(call)

    def _evict(self, num: int) -> list[int]:
        """The keys of so many units, those that were used longest ago, which are gone."""
        return [self._cache.popitem(last=False)[0] for _ in range(num)]


class ReportingEngine(LightEngine):
    """Tells of what it evicts, at once and exactly; but for what a call that waits will bring
    back."""

    def __init__(self, number: int, report: Report) -> None:
        super().__init__(number)
        self._report = report
        self._evicted: set[int] = set()

    def step(self) -> None:
        """See `LightEngine`."""
        super().step()
        if not self._evicted:
            return
        gone = self._evicted - self.held_units
        for call in self.waiting:
            gone.difference_update(call.seen.keys.tolist())
        self._report(self.number, np.fromiter(gone, np.uint64, len(gone)))
        self._evicted.clear()

    def _evict(self, num: int) -> list[int]:
        gone = super()._evict(num)
        self._evicted.update(gone)
        return gone


def run(
    calls: Sequence[LightCall], router: Router, engines: Sequence[LightEngine], end_s: float
) -> float:
    """Send each call when it comes, then go on until `end_s`; returns CPU seconds of decisions."""
    numbers, decision_s = [engine.number for engine in engines], 0.0
    for call in calls:
        advance(engines, router, call.arrival_at_s)
        at_s = call.arrival_at_s + 1.0
        decision_s -= time.process_time()
        call.engine = router.rank(call.seen, numbers, at_s)[0]
        call.sent = router.sent(call.seen, call.engine, at_s)
        decision_s += time.process_time()
        engine = engines[call.engine]
        engine.waiting.append(call)
    advance(engines, router, end_s)
    return decision_s


def advance(engines: Iterable[LightEngine], router: Router, until_s: float) -> None:
    """Let engines go on until then; the router hears what they do."""
    for engine in engines:
        while engine.now_s < until_s:
            if not engine.has_work:
                engine.now_s = until_s
                break
            engine.step()
            for call in engine.started:
                if call.sent is not None:
                    router.first_token(call.sent, engine.now_s + 1.0)
            for call in engine.ended:
                if call.sent is not None:
                    router.ended(
                        call.sent, engine.now_s + 1.0, call.cached_tokens, call.output_tokens
                    )
            engine.started.clear()
            engine.ended.clear()
