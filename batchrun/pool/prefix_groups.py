"""Prefix groups: the rows that one engine should run, and which engine has which of them.

Engines pull groups, the large ones first, so that a fast one gets more of them; who finds none left
takes rows off the engine that would be done last. A part of a group is an interval of a job's
planned order. Work is in seconds of a usual engine; engines of another speed take work / speed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchrun.pool.prefix_keys import ChainTable, IntArray
from batchrun.pool.radix_tree import NO_NODE, FloatArray, PrefixOrder, RadixTree, nearest_marked

MOST_BEHIND = 8
"""So many times its key portion is what a group has behind it, or nearly so: that bounds what
another engine computes again to an eighth."""

KEY_DEPTH = 2
"""A key portion goes more than so many times as deep, in chunks, as what is above it."""


def key_nodes(nodes: RadixTree) -> IntArray:
    """For each node the one that is the key portion of the rows right below it, or NO_NODE: the
    deepest of their path that is longer than all above it together (Preble, section 3)."""
    above = np.append(nodes.depths, 0)[nodes.parents]
    return nearest_marked(nodes.parents, nodes.depths > KEY_DEPTH * above)


def group_rows(order: PrefixOrder, nodes: RadixTree, chains: ChainTable) -> IntArray:
    """The prefix group of each row of `chains`, numbered from 0 as they come in `order`, whose tree
    is `nodes`. Rows that are not in the order have 0.

    The rows of one key portion are a group, so what all rows of a job begin with makes no group of
    the documents behind it. Rows that have far more behind their key portion than it takes are as
    many groups as that pays for. A row that shares nothing is a group.
    """
    key_of = np.append(key_nodes(nodes), NO_NODE)[nodes.innermost]
    has_key = np.flatnonzero(key_of != NO_NODE)
    key = key_of[has_key]
    cached = np.maximum(order.shared_chunks[has_key], nodes.depths[key])
    behind = 1 + chains.lengths[order.rows[has_key]] - cached
    parts = _cut(key, behind, MOST_BEHIND * nodes.depths)
    numbers = np.arange(len(order.rows)) + parts.max(initial=-1) + 1
    numbers[has_key] = parts
    _, firsts, places = np.unique(numbers, return_index=True, return_inverse=True)
    groups = np.zeros(chains.num_rows, dtype=np.int64)
    groups[order.rows] = np.argsort(np.argsort(firsts))[places]
    return groups


def _cut(key: IntArray, sizes: IntArray, most: IntArray) -> IntArray:
    """Numbers for items that are equal where they are of one part: those of each key, in order, are
    cut evenly into as many parts as they have whole `most[key]` of size, one at least."""
    totals = np.bincount(key, sizes, len(most)).astype(np.int64)
    num_parts = np.maximum(totals // np.maximum(most, 1), 1)
    by_key = np.argsort(key, kind="stable")
    before = np.cumsum(sizes[by_key]) - sizes[by_key]
    before -= (np.cumsum(totals) - totals)[key[by_key]]
    first_part = np.cumsum(num_parts) - num_parts
    parts = np.empty(len(key), dtype=np.int64)
    of = key[by_key]
    parts[by_key] = first_part[of] + before * num_parts[of] // np.maximum(totals[of], 1)
    return parts


LARGE_S = 8.0
"""Groups of more work than this go first where there are several engines, the largest first."""
SHARE_PARTS = 4
"""An engine pulls no more at a time than this part of its share of what is left."""
WORTH_PREFIXES = 1.5
"""Rows go to another engine when their work is so many times that of their prefix."""
LEAST_MOVED_S = 0.5
"""Less work than that stays where it is."""
NOBODY = -1


class EngineWork(Protocol):
    """An engine: the work of the rows that it has, and its speed."""

    @property
    def work_s(self) -> float: ...

    @property
    def speed(self) -> float: ...


@dataclass(slots=True, eq=False)
class Part:
    """The rows of a group from one position of the planned order to another (exclusive).

    `source` is where it was cut from; None: from a group that no engine had.
    """

    group: int
    next: int
    end: int
    source: Part | None = None


class GroupParts:
    """Which engine runs which rows of a job: groups that no engine has, and a part for each engine.

    Rows are named by their position in the planned order; `pending` tells of each whether it waits
    here (0) or not.
    """

    def __init__(
        self, pending: bytearray, group_of: IntArray, work_s: FloatArray, found_s: FloatArray
    ) -> None:
        """Of each position: its group, the work of its row, and what it would take to compute the
        prefix that the row is to find."""
        self._pending = pending
        self._starts = np.flatnonzero(np.diff(group_of, prepend=-1)).astype(np.int32)
        self._work_s = np.concatenate(([0.0], np.cumsum(work_s)))
        behind = found_s.astype(np.float32)
        behind[self._starts] = np.inf
        prefix_s = np.minimum.reduceat(behind, self._starts) if len(behind) else behind
        self._prefix_s = np.where(np.isfinite(prefix_s), prefix_s, 0)
        self._owner = np.full(len(self._starts), NOBODY, np.int16)
        self._next_group = 0
        self._large: list[tuple[float, int]] | None = None
        self._free: list[Part] = []
        self._parts: dict[int, Part] = {}
        self.left_s = float(work_s[np.frombuffer(pending, np.uint8) == 0].sum())

    def work_s(self, position: int) -> float:
        """The work of a row, in seconds of a usual engine."""
        return float(self._work_s[position + 1] - self._work_s[position])

    def group_at(self, position: int) -> int:
        """The group of a row, numbered as they stand in the planned order."""
        return int(np.searchsorted(self._starts, position, "right")) - 1

    def owner_at(self, position: int) -> int:
        """The engine that had rows of this one's group last, or NOBODY."""
        return int(self._owner[self.group_at(position)])

    def hand_over(self, position: int, engine: int) -> None:
        """Rows of this one's group, which another engine had, go to this one now."""
        group = self.group_at(position)
        if self._owner[group] != NOBODY:
            self._owner[group] = engine

    def current(self, engine: int) -> int | None:
        """The next row of the part that the engine has; None when that is handed out."""
        part = self._parts.get(engine)
        if part is None:
            return None
        part.next = self._find(part.next, part.end)
        if part.next < part.end:
            return part.next
        del self._parts[engine]
        return None

    def choose(self, engine: int, loads: Mapping[int, EngineWork]) -> Part | None:
        """What an engine without a part should pull; None when nothing is worth it."""
        free = max(self._living(), key=self._rest_s, default=None)
        if free is not None:
            return self._cut(Part(free.group, free.next, free.end, free), engine, loads)
        group = self._unowned(are_several=len(loads) > 1)
        if group is not None:
            start, end = self._bounds(group)
            return self._cut(Part(group, self._find(start, end), end), engine, loads)
        return self._half_of_another(engine, loads)

    def pull(self, engine: int, part: Part) -> None:
        """The engine takes the part that `choose` just returned."""
        source = part.source
        self._owner[part.group] = engine
        self._parts[engine] = part
        if source is None:
            end = self._bounds(part.group)[1]
            if part.end < end:
                self._free.append(Part(part.group, part.end, end))
        elif source in self._free:
            source.next = part.end
        else:
            source.end = part.next

    def lose(self, living: Mapping[int, EngineWork]) -> None:
        """Engines that are not among the living have no part any more: others may pull it."""
        for engine in self._parts.keys() - living.keys():
            self._free.append(self._parts.pop(engine))

    def worth_moving_s(
        self, group: int, ends_s: float, owner: EngineWork, engine: EngineWork
    ) -> float:
        """So much work of the owner, which would be done in `ends_s`, that with it on the engine
        both are done together; 0 where that is not worth another copy of the group's prefix."""
        prefix_s = float(self._prefix_s[group])
        mine_s = (engine.work_s + prefix_s) / engine.speed
        work_s = (ends_s - mine_s) / (1 / engine.speed + 1 / owner.speed)
        return work_s if work_s > max(WORTH_PREFIXES * prefix_s, LEAST_MOVED_S) else 0.0

    def _find(self, start: int, end: int) -> int:
        """The first row that waits; `end` where there is none."""
        found = self._pending.find(0, start, end)
        return end if found < 0 else found

    def _bounds(self, group: int) -> tuple[int, int]:
        is_last = group + 1 == len(self._starts)
        end = len(self._pending) if is_last else int(self._starts[group + 1])
        return int(self._starts[group]), end

    def _rest_s(self, part: Part) -> float:
        return float(self._work_s[part.end] - self._work_s[part.next])

    def _living(self) -> Iterator[Part]:
        """Parts of no engine, with rows that wait."""
        for part in [*self._free]:
            part.next = self._find(part.next, part.end)
            if part.next < part.end:
                yield part
            else:
                self._free.remove(part)

    def _unowned(self, *, are_several: bool) -> int | None:
        """The first group that no engine has had, in planned order; of several engines' the
        largest of the large ones."""
        if are_several:
            if self._large is None:
                self._large = self._sorted_by_size()
            while self._large:
                group = self._large[0][1]
                start, end = self._bounds(group)
                if self._owner[group] == NOBODY and self._find(start, end) < end:
                    return group
                heapq.heappop(self._large)
        while self._next_group < len(self._starts):
            start, end = self._bounds(self._next_group)
            if self._owner[self._next_group] == NOBODY and self._find(start, end) < end:
                return self._next_group
            self._next_group += 1
        return None

    def _sorted_by_size(self) -> list[tuple[float, int]]:
        ends = np.append(self._starts[1:], len(self._pending))
        sizes_s = self._work_s[ends] - self._work_s[self._starts]
        large = np.flatnonzero(sizes_s > LARGE_S)
        return sorted(zip((-sizes_s[large]).tolist(), large.tolist(), strict=True))

    def _cut(self, part: Part, engine: int, loads: Mapping[int, EngineWork]) -> Part:
        """The part, or its first rows where it is much of what the engine should do."""
        if len(loads) == 1:
            return part
        share_s = self.left_s * loads[engine].speed / sum(load.speed for load in loads.values())
        least_s = max(WORTH_PREFIXES * float(self._prefix_s[part.group]), LEAST_MOVED_S)
        most_s = max(share_s / SHARE_PARTS, least_s)
        if self._rest_s(part) >= 2 * most_s:
            at = np.searchsorted(self._work_s, self._work_s[part.next] + most_s)
            part.end = min(max(int(at), part.next + 1), part.end)
        return part

    def _half_of_another(self, engine: int, loads: Mapping[int, EngineWork]) -> Part | None:
        """Of the engine that would be done last, so many rows that both are done together."""
        ends_s = {
            each: (loads[each].work_s + self._rest_s(part)) / loads[each].speed
            for each, part in self._parts.items()
            if each != engine
        }
        if not ends_s:
            return None
        owner = max(ends_s, key=ends_s.__getitem__)
        part = self._parts[owner]
        work_s = self.worth_moving_s(part.group, ends_s[owner], loads[owner], loads[engine])
        if not work_s:
            return None
        wanted = self._work_s[part.end] - work_s
        start = max(int(np.searchsorted(self._work_s, wanted)), part.next + 1)
        start = self._find(start, part.end)
        return None if start >= part.end else Part(part.group, start, part.end, part)
