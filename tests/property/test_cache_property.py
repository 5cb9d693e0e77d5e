"""The cache under random use: no block lost, counts exact, nothing kept that cannot be reached."""

from __future__ import annotations

from collections import Counter

from cache_builders import Block, SmallCache, chain_of, row_hint
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batchrun.cache.eviction import EVICTIONS
from batchrun.cache.free_queue import TieredFreeQueue
from batchrun.cache.reuse import LEASE_S
from batchrun.hints import NodeHint, RowHint

NUM_BLOCKS = 9
NUM_TIERS = 4
some_ids = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)


class QueueMachine(RuleBasedStateMachine):
    """The queue beside a model of plain lists, whose operations are spelled out.

    Each tier has two: blocks that rose into it, then those that were freed into it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tiers = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.blocks = [Block(i) for i in range(NUM_BLOCKS)]
        self.queue = TieredFreeQueue(self.blocks, NUM_TIERS, lambda b: self.tiers[b.block_id])
        self.risen: list[list[int]] = [[] for _ in range(NUM_TIERS)]
        self.freed: list[list[int]] = [[] for _ in range(NUM_TIERS)]
        self.freed[0] = list(range(NUM_BLOCKS))

    @property
    def free(self) -> list[int]:
        return [block_id for blocks in self.lists for block_id in blocks]

    @property
    def lists(self) -> list[list[int]]:
        return [blocks for both in zip(self.risen, self.freed, strict=True) for blocks in both]

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1), tier=st.integers(0, NUM_TIERS - 1))
    def a_tier_changes(self, block_id: int, tier: int) -> None:
        self.tiers[block_id] = tier

    @rule(n=st.integers(0, NUM_BLOCKS))
    def hand_out(self, n: int) -> None:
        n = min(n, len(self.free))
        taken = [self._pop_from_model() for _ in range(n)]
        assert [block.block_id for block in self.queue.popleft_n(n)] == taken

    def _pop_from_model(self) -> int:
        while True:
            index = next(i for i, blocks in enumerate(self.lists) if blocks)
            block_id = self.lists[index].pop(0)
            if self.tiers[block_id] <= index // 2:
                return block_id
            self.risen[self.tiers[block_id]].append(block_id)

    @rule(ids=some_ids)
    def put_back(self, ids: list[int]) -> None:
        ids = [block_id for block_id in ids if block_id not in self.free]
        self.queue.append_n([self.blocks[block_id] for block_id in ids])
        for block_id in ids:
            self.freed[self.tiers[block_id]].append(block_id)

    @rule(ids=some_ids)
    def put_back_first(self, ids: list[int]) -> None:
        ids = [block_id for block_id in ids if block_id not in self.free]
        self.tiers.update(dict.fromkeys(ids, 0))
        self.queue.prepend_n([self.blocks[block_id] for block_id in ids])
        self.risen[0][:0] = ids

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take_out_of_the_middle(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.free))
        self.queue.remove(self.blocks[block_id])
        next(blocks for blocks in self.lists if block_id in blocks).remove(block_id)

    @rule(ids=some_ids)
    def file_again(self, ids: list[int]) -> None:
        self.queue.retier(ids)
        for block_id in ids:
            for blocks in self.lists:
                if block_id in blocks:
                    blocks.remove(block_id)
                    self.freed[self.tiers[block_id]].append(block_id)
                    break

    @invariant()
    def the_two_agree(self) -> None:
        assert [block.block_id for block in self.queue.get_all_free_blocks()] == self.free
        assert self.queue.num_free_blocks == len(self.free)
        assert self.queue.free_by_tier() == [
            len(risen) + len(freed) for risen, freed in zip(self.risen, self.freed, strict=True)
        ]
        self.queue.check()


TestQueue = QueueMachine.TestCase

OFFLINE_ROWS = [
    f"{doc}{part}{row}" for doc in ("aaa", "aab", "bcd") for part in "xy" for row in "12"
]
"""A job with nested prefixes, in its planned order: documents, parts, rows."""


class CacheMachine(RuleBasedStateMachine):
    """One engine's cache, driven as the plug-in drives it."""

    @initialize(name=st.sampled_from(sorted(EVICTIONS)), num_blocks=st.integers(6, 16))
    def start(self, name: str, num_blocks: int) -> None:
        self.cache = SmallCache(EVICTIONS[name], num_blocks)
        self.now_s = 0.0
        self.epoch = 1
        self.unsent = list(range(len(OFFLINE_ROWS)))
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.online: list[str] = []
        self.num_online = 0

    def _hint(self, row: int) -> RowHint:
        """What the daemon says: a node for every prefix that some row still to come shares."""
        text = OFFLINE_ROWS[row]
        nodes = []
        for depth in range(1, len(text)):
            later = [r for r in self.unsent if OFFLINE_ROWS[r].startswith(text[:depth])]
            node_id = int.from_bytes(text[:depth].encode())
            nodes.append(NodeHint(node_id, len(later), min(later, default=0)))
        return row_hint(row, row, tuple(nodes), self.epoch)

    @precondition(lambda self: self.unsent)
    @rule(data=st.data())
    def the_daemon_sends_a_row(self, data: st.DataObject) -> None:
        row = self.unsent.pop(data.draw(st.integers(0, min(2, len(self.unsent) - 1))))
        chain = chain_of(OFFLINE_ROWS[row])
        self.cache.refile(self.cache.reuse.announce(f"{row}", self._hint(row), chain, self.now_s))
        self.waiting.append(row)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_row_is_admitted(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.waiting))
        if self.cache.admit(f"{row}", chain_of(OFFLINE_ROWS[row])) is not None:
            self.waiting.remove(row)
            self.running.append(row)
            self.cache.reuse.advance(min(self.running))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_running_row_ends(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.running))
        self.running.remove(row)
        self.cache.reuse.finished(f"{row}")
        self.cache.free(f"{row}", is_online=False)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_running_row_is_preempted(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.running))
        self.running.remove(row)
        self.waiting.append(row)
        self.cache.free(f"{row}", is_online=False)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiting_row_is_aborted(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(row)
        self.cache.refile(self.cache.reuse.finished(f"{row}"))

    @rule(text=st.sampled_from(["aaq", "aar", "stu", "stv", "st", "b"]))
    def an_online_request_comes(self, text: str) -> None:
        name = f"online-{self.num_online}"
        num_hits = self.cache.admit(name, chain_of(text))
        if num_hits is not None:
            self.num_online += 1
            self.online.append(name)
            self.cache.refile_keys(self.cache.online.hit(chain_of(text)[:num_hits], self.now_s))

    @precondition(lambda self: self.online)
    @rule(data=st.data())
    def an_online_request_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.online))
        self.online.remove(name)
        self.cache.free(name, is_online=True)

    @rule()
    def the_daemon_is_alive(self) -> None:
        self.cache.refile(self.cache.reuse.renew(self.epoch, self.now_s))

    @rule(span_s=st.sampled_from([1.0, LEASE_S / 2, 5 * LEASE_S]))
    def time_passes(self, span_s: float) -> None:
        self.now_s += span_s
        self.cache.refile(self.cache.reuse.expire(self.now_s))
        self.cache.refile_keys(self.cache.online.expire(self.now_s))

    @rule()
    def the_daemon_starts_anew(self) -> None:
        self.epoch += 1
        self.cache.refile(self.cache.reuse.renew(self.epoch, self.now_s))

    @invariant()
    def accounts_balance(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()


def test_no_block_is_lost_and_no_cached_child_is_left_without_its_parent() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=150, stateful_step_count=60, deadline=None)
    )


@given(st.permutations(OFFLINE_ROWS), st.integers(0, len(OFFLINE_ROWS)), st.data())
def test_counts_and_ranks_are_those_of_the_rows_without_a_result(
    sent: list[str], num_sent: int, data: st.DataObject
) -> None:
    """Exact wherever two rows in the engine, or all that are left, tell how far a node reaches."""
    cache = SmallCache(EVICTIONS["next-use"], 4)
    for i in range(num_sent):
        hint = row_hint(i, i, tuple(_nodes_of(sent, i)))
        cache.reuse.announce(f"{i}", hint, chain_of(sent[i]), 0.0)
    ended = data.draw(st.sets(st.integers(0, max(0, num_sent - 1)))) if num_sent else set()
    for i in ended:
        cache.reuse.finished(f"{i}")
    cache.reuse.check()

    left = [i for i in range(len(sent)) if i not in ended]
    announced = Counter(key for text in sent[:num_sent] for key in chain_of(text))
    forks = {
        key for key in announced if len({t[len(key)] for t in _under(sent[:num_sent], key)}) > 1
    }
    for key in forks:
        rows = [i for i in left if sent[i].startswith(key.decode())]
        node = cache.reuse.blocks.get(key)
        assert (node.reuse_count if node else 0) == len(rows)
        assert (node.next_rank if node else None) == (min(rows) if rows else None)
    for i in range(num_sent):
        if i not in ended:
            assert all(cache.reuse.blocks[key].reuse_count for key in chain_of(sent[i]))


def _under(texts: list[str], key: bytes) -> list[str]:
    return [t for t in texts if t.startswith(key.decode()) and len(t) > len(key)]


def _nodes_of(order: list[str], sent_now: int) -> list[NodeHint]:
    """Nodes of the row at a place of the planned order, when all before it have been sent."""
    text = order[sent_now]
    nodes = []
    for depth in range(1, len(text)):
        later = [i for i in range(sent_now + 1, len(order)) if order[i].startswith(text[:depth])]
        node_id = int.from_bytes(text[:depth].encode())
        nodes.append(NodeHint(node_id, len(later), min(later, default=0)))
    return nodes
