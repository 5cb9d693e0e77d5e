"""The pool under random jobs: the order is a depth-first walk, and no row is lost or doubled."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from xxhash import xxh3_64_intdigest

from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainBuilder, ChainTable
from batchrun.pool.radix_tree import build_radix_tree, order_by_prefix
from batchrun.pool.row_queue import RowQueue

words = st.lists(st.sampled_from("abc"), max_size=5).map("".join)
SALT = 7


def table_of(texts: list[str]) -> ChainTable:
    """Texts of one chunk per letter."""
    builder = ChainBuilder(SALT)
    builder.add("".join(letter * CHUNK_BYTES for letter in text).encode() for text in texts)
    return builder.build()


def shared_letters(one: str, other: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@given(st.lists(st.binary(max_size=3 * CHUNK_BYTES), max_size=5))
def test_each_chunk_has_the_hash_of_its_bytes_under_that_of_the_chunk_before(
    texts: list[bytes],
) -> None:
    builder = ChainBuilder(SALT)
    builder.add(texts)
    table = builder.build()

    assert table.lengths.tolist() == [len(text) // CHUNK_BYTES for text in texts]
    for row, text in enumerate(texts):
        key = SALT
        for place, number in enumerate(table.keys[table.starts[row] : table.starts[row + 1]]):
            key = xxh3_64_intdigest(text[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES], key)
            assert number == key


@given(st.lists(words, max_size=40))
def test_each_row_runs_right_after_the_row_it_shares_most_with(texts: list[str]) -> None:
    order = order_by_prefix(table_of(texts))

    assert sorted(order.rows) == list(range(len(texts)))
    for i in range(1, len(texts)):
        mine = texts[order.rows[i]]
        best = max(shared_letters(mine, texts[order.rows[j]]) for j in range(i))
        assert order.shared_chunks[i] == shared_letters(mine, texts[order.rows[i - 1]]) == best


@given(st.lists(words, max_size=40))
def test_the_rows_of_every_prefix_are_contiguous(texts: list[str]) -> None:
    order = order_by_prefix(table_of(texts))
    ordered = [texts[row] for row in order.rows]

    for prefix in {text[:n] for text in texts for n in range(1, len(text) + 1)}:
        places = [i for i, text in enumerate(ordered) if text.startswith(prefix)]
        assert places == list(range(places[0], places[-1] + 1))


@given(st.integers(0, 30))
def test_rows_that_share_nothing_keep_their_order(num_rows: int) -> None:
    builder = ChainBuilder(SALT)
    builder.add(str(i).encode().rjust(CHUNK_BYTES) for i in range(num_rows))

    assert list(order_by_prefix(builder.build()).rows) == list(range(num_rows))


def test_a_salt_separates_equal_texts() -> None:
    one, other = ChainBuilder(1), ChainBuilder(2)
    for builder in (one, other):
        builder.add([b"x" * (3 * CHUNK_BYTES)])
    assert not set(one.build().keys.tolist()) & set(other.build().keys.tolist())


class QueueMachine(RuleBasedStateMachine):
    """Hand out, give back and finish rows at random against a plain model."""

    @initialize(texts=st.lists(words, min_size=1, max_size=12), num_done=st.integers(0, 3))
    def begin(self, texts: list[str], num_done: int) -> None:
        self.now_s = 0.0
        self.table = table_of(texts)
        self.order = order_by_prefix(self.table)
        done = range(min(num_done, len(texts)))
        nodes = build_radix_tree(self.order.shared_chunks)
        self.queue = RowQueue(self.order.rows, nodes, done)
        self.pending = {row: 0.0 for row in range(len(texts)) if row not in done}
        self.in_flight: set[int] = set()
        self.preferred: set[int] = set()

    @rule()
    def take(self) -> None:
        row = self.queue.peek(self.now_s)
        ready = {r for r, at in self.pending.items() if at <= self.now_s}
        assert (row in ready) if ready else (row is None)
        if row is not None:
            assert row in self.preferred or not self.preferred & ready
            self.queue.take(row)
            del self.pending[row]
            self.preferred.discard(row)
            self.in_flight.add(row)

    @precondition(lambda self: self.in_flight)
    @rule(delay_s=st.sampled_from([0.0, 1.0, 5.0]), pick=st.integers(0, 9))
    def give_back(self, delay_s: float, pick: int) -> None:
        row = sorted(self.in_flight)[pick % len(self.in_flight)]
        self.queue.give_back(row, ready_at_s=self.now_s + delay_s)
        self.in_flight.remove(row)
        self.pending[row] = self.now_s + delay_s
        self.preferred.add(row)

    @precondition(lambda self: self.in_flight)
    @rule(pick=st.integers(0, 9))
    def finish(self, pick: int) -> None:
        row = sorted(self.in_flight)[pick % len(self.in_flight)]
        self.queue.finish(row)
        self.in_flight.remove(row)

    @rule(picks=st.lists(st.integers(0, 11), max_size=4, unique=True))
    def prefer(self, picks: list[int]) -> None:
        rows = [row for row in picks if row < self.table.num_rows]
        self.queue.prefer(np.array(rows, dtype=np.int64))
        self.preferred |= self.pending.keys() & set(rows)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def accounts_balance(self) -> None:
        self.queue.check()
        assert self.queue.num_pending == len(self.pending)
        assert self.queue.num_in_flight == len(self.in_flight)
        assert self.queue.is_finished == (not self.pending and not self.in_flight)


TestQueueMachine = QueueMachine.TestCase
