"""The pool under random jobs: the order is a depth-first walk, and no row is lost or doubled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchrun.pool import CHUNK_BYTES, RowQueue, chunk_chain, order_by_prefix

words = st.lists(st.sampled_from("abc"), max_size=5).map("".join)


def chain_of(word: str) -> npt.NDArray[np.uint64]:
    """A text of one chunk per letter."""
    return chunk_chain("".join(letter * CHUNK_BYTES for letter in word).encode(), salt=7)


def shared_letters(one: str, other: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@given(st.lists(words, max_size=40))
def test_each_row_runs_right_after_the_row_it_shares_most_with(texts: list[str]) -> None:
    order = order_by_prefix([chain_of(text) for text in texts])

    assert sorted(order.rows) == list(range(len(texts)))
    for i in range(1, len(texts)):
        mine = texts[order.rows[i]]
        best = max(shared_letters(mine, texts[order.rows[j]]) for j in range(i))
        assert order.shared_chunks[i] == shared_letters(mine, texts[order.rows[i - 1]]) == best


@given(st.lists(words, max_size=40))
def test_the_rows_of_every_prefix_are_contiguous(texts: list[str]) -> None:
    order = order_by_prefix([chain_of(text) for text in texts])
    ordered = [texts[row] for row in order.rows]

    for prefix in {text[:n] for text in texts for n in range(1, len(text) + 1)}:
        places = [i for i, text in enumerate(ordered) if text.startswith(prefix)]
        assert places == list(range(places[0], places[-1] + 1))


@given(st.integers(0, 30))
def test_rows_that_share_nothing_keep_their_order(num_rows: int) -> None:
    chains = [chunk_chain(str(i).encode().rjust(CHUNK_BYTES), salt=0) for i in range(num_rows)]

    assert list(order_by_prefix(chains).rows) == list(range(num_rows))


def test_a_salt_separates_equal_texts() -> None:
    text = b"x" * (3 * CHUNK_BYTES)
    assert not set(chunk_chain(text, 1)) & set(chunk_chain(text, 2))


class QueueMachine(RuleBasedStateMachine):
    """Hand out, give back and finish rows at random against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.queue = RowQueue(np.array([3, 1, 4, 0, 2, 5]), done=[4])
        self.pending = {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 5: 0.0}
        self.in_flight: set[int] = set()

    @rule()
    def take(self) -> None:
        row = self.queue.peek(self.now_s)
        ready = {r for r, at in self.pending.items() if at <= self.now_s}
        assert (row in ready) if ready else (row is None)
        if row is not None:
            self.queue.take(row)
            del self.pending[row]
            self.in_flight.add(row)

    @precondition(lambda self: self.in_flight)
    @rule(delay_s=st.sampled_from([0.0, 1.0, 5.0]), pick=st.integers(0, 9))
    def give_back(self, delay_s: float, pick: int) -> None:
        row = sorted(self.in_flight)[pick % len(self.in_flight)]
        self.queue.give_back(row, ready_at_s=self.now_s + delay_s)
        self.in_flight.remove(row)
        self.pending[row] = self.now_s + delay_s

    @precondition(lambda self: self.in_flight)
    @rule(pick=st.integers(0, 9))
    def finish(self, pick: int) -> None:
        row = sorted(self.in_flight)[pick % len(self.in_flight)]
        self.queue.finish(row)
        self.in_flight.remove(row)

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
