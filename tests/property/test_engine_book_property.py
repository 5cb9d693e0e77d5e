"""What gateway workers know of engines: random calls, deaths of workers, losses of engines."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.engine_book import FIELDS, Call, EngineBook, EngineTraits, Sent
from batchrun.routing.prefix_map import SWEEP_SHARE, Arrays, PrefixMap

NUM_WORKERS, NUM_ENGINES = 3, 4
NUM_PIECES = 1 << 10
PIECE_TOKENS = 256
ROOM_PIECES = 100
TRAITS = EngineTraits(kv_tokens=ROOM_PIECES * PIECE_TOKENS)
LONGEST = 30


@dataclass
class Fleet:
    """Workers that share memory, and the calls of each that are on their way; those of workers that
    are `dead` still hold their KV for a while."""

    rng: random.Random
    arrays: Arrays = field(default_factory=lambda: Arrays.private(NUM_PIECES, NUM_ENGINES))
    books: list[EngineBook] = field(init=False)
    on_way: list[list[Sent]] = field(init=False)
    dead: list[Sent] = field(default_factory=list)
    now_s: float = 1.0

    def __post_init__(self) -> None:
        self.loads = np.zeros((NUM_WORKERS, NUM_ENGINES, len(FIELDS)))
        self.documents = [self._keys() for _ in range(40)]
        self.books = [self._book(worker) for worker in range(NUM_WORKERS)]
        self.on_way = [[] for _ in range(NUM_WORKERS)]

    def step(self) -> None:
        """One random operation of one worker."""
        self.now_s += self.rng.expovariate(20.0)
        worker = self.rng.randrange(NUM_WORKERS)
        kind = self.rng.random()
        if kind < 0.001:
            self.books[worker] = self._book(worker)
            self.dead = [sent for sent in self.dead if sent.held.stamp_s > self.now_s]
            self.dead += self.on_way[worker]
            self.on_way[worker].clear()
        elif kind < 0.002:
            self.lose(self.rng.randrange(NUM_ENGINES))
        elif kind < 0.4 and len(self.on_way[worker]) < 40:
            self.send(worker)
        elif self.on_way[worker]:
            self.move(worker)

    def send(self, worker: int) -> None:
        """A call to any engine, of a known document or a new one."""
        keys = self.rng.choice(self.documents) if self.rng.random() < 0.8 else self._keys()
        call = Call(len(keys) * PIECE_TOKENS + self.rng.randrange(PIECE_TOKENS), keys, PIECE_TOKENS)
        book, engine = self.books[worker], self.rng.randrange(NUM_ENGINES)
        cached = book.cached_tokens(call, range(NUM_ENGINES), self.now_s)
        sent = book.sent(call, engine, self.now_s)
        assert sent.cached_tokens == cached[engine]
        self.on_way[worker].append(sent)

    def move(self, worker: int) -> None:
        """A call's first token, or its end."""
        calls, book = self.on_way[worker], self.books[worker]
        sent = calls[self.rng.randrange(len(calls))]
        if self.rng.random() < 0.5:
            book.first_token(sent, self.now_s)
            return
        calls.remove(sent)
        told = self.rng.choice([None, 0, sent.cached_tokens])
        book.ended(sent, self.now_s, told, self.rng.choice([None, 5]))

    def lose(self, engine: int) -> None:
        """It holds nothing from now on, as all workers see it."""
        self.books[0].left(engine)
        for book, document in zip(self.books, self.documents, strict=False):
            assert book.prefixes.num_pieces(engine, self.now_s) == 0
            assert book.prefixes.num_held(document, [engine], self.now_s).tolist() == [0]

    def check(self) -> None:
        """Loads are those of the calls on their way; no engine is taken to hold more than fits."""
        found = self.books[0].loads(range(NUM_ENGINES), self.now_s)
        for engine, load in found.items():
            calls = [sent for each in self.on_way for sent in each if sent.engine == engine]
            waiting = [sent for sent in calls if sent.is_waiting]
            assert load.calls == len(calls)
            assert load.prompt_tokens == sum(sent.call.prompt_tokens for sent in calls)
            assert load.waiting_calls == len(waiting)
            assert 0 <= load.waiting_s <= sum(sent.prefill_s for sent in waiting) + 1e-6
            # The calls of a dead worker may run for as long as they were thought to.
            calls += [sent for sent in self.dead if sent.engine == engine]
            on_way = sum(len(sent.call.keys) for sent in calls)
            most = ROOM_PIECES * (1 + SWEEP_SHARE) + LONGEST + on_way
            assert self.books[0].prefixes.num_pieces(engine, self.now_s) <= most

    def _book(self, worker: int) -> EngineBook:
        """A worker begins, or begins anew after its death."""
        book = EngineBook(PrefixMap(self.arrays), self.loads, worker)
        for engine in range(NUM_ENGINES):
            book.introduce(engine, TRAITS)
        return book

    def _keys(self) -> KeyArray:
        num = self.rng.randrange(1, LONGEST)
        return np.array([self.rng.getrandbits(63) | 1 for _ in range(num)], np.uint64)


@pytest.mark.parametrize(
    "num_operations",
    [
        20_000,
        pytest.param(10_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3_600)]),
    ],
)
def test_no_load_leaks_and_nobody_is_taken_to_hold_what_it_lost(num_operations: int) -> None:
    fleet = Fleet(random.Random(num_operations))
    for number in range(num_operations):
        fleet.step()
        if number % 500 == 0:
            fleet.check()
        if number == num_operations // 2:
            half_bytes = len(pickle.dumps(fleet.books))
    fleet.check()
    for book, calls in zip(fleet.books, fleet.on_way, strict=True):
        for sent in calls:
            book.ended(sent, fleet.now_s)
        calls.clear()
    fleet.check()
    assert not fleet.loads[:, :, : FIELDS.index("waiting_s")].any()
    assert len(pickle.dumps(fleet.books)) == pytest.approx(half_bytes, rel=0.001)
