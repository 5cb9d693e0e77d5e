"""Which engine holds which prefix, as far as a router knows: what it sent where, and when.

A table of pieces, a row for each and a column for each engine; an entry is when the piece was last
used there. An engine evicts what was used longest ago, so of its column as much counts as held as
its KV cache has room for. Everything is in arrays that several processes may share: no locks, the
last writer of an entry wins, and what is lost costs a hit and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import KeyArray

Floats = npt.NDArray[np.float64]

WAYS = 8
"""Places that a key may stand in: the one used longest ago gives way to a new one."""
SWEEP_SHARE = 0.02
"""An engine's column is looked at again when so much of its cache is new."""
REUSE_MEMORY = 512
"""Evicted pieces over which the share of those that came back is learnt."""

class Arrays(NamedTuple):
    """What processes share: a key and a number of uses a row, an instant a row and engine."""

    keys: KeyArray
    num_uses: npt.NDArray[np.uint32]
    used_at_s: Floats

    @classmethod
    def sizes(cls, num_pieces: int, num_engines: int) -> tuple[int, int, int]:
        """Bytes of each for so many pieces: a power of two, a multiple of `WAYS`."""
        return 8 * num_pieces, 4 * num_pieces, 8 * num_pieces * num_engines

    @classmethod
    def private(cls, num_pieces: int, num_engines: int) -> Arrays:
        """In this process alone."""
        return cls(
            np.zeros(num_pieces, np.uint64),
            np.zeros(num_pieces, np.uint32),
            np.zeros((num_pieces, num_engines), np.float64),
        )


@dataclass(slots=True)
class _Column:
    """What this process knows of one engine: since when it holds what was used there, how many
    pieces it has room for, and how many were new to it since the last look."""

    since_s: float = 0.0
    room_pieces: float = 0.0
    num_new: int = 0
    is_full: bool = False


class PrefixMap:
    """The pieces of prompts by engine. Instants are positive and on one clock of all that share."""

    def __init__(self, arrays: Arrays) -> None:
        self._keys, self._num_uses, self._used_at_s = arrays
        self._mask = np.uint64(len(self._keys) // WAYS - 1)
        self._ways = np.arange(WAYS, dtype=np.int64)
        self._columns = [_Column() for _ in range(self._used_at_s.shape[1])]
        self.mean_uses = 0.0
        """How often pieces that were evicted of late had been used."""
        self.reuse_share = 0.0
        """Of the pieces that were evicted of late, those that had been used more than once."""

    def hold(self, engine: int, room_pieces: float) -> None:
        """The engine has room for so many pieces."""
        self._columns[engine].room_pieces = room_pieces

    def is_full(self, engine: int) -> bool:
        """Whether a new piece there costs an old one."""
        return self._columns[engine].is_full

    def num_pieces(self, engine: int) -> int:
        """Pieces that it is taken to hold."""
        since_s = self._columns[engine].since_s
        return int(np.count_nonzero(self._used_at_s[:, engine] > since_s))

    def num_held(self, keys: KeyArray) -> npt.NDArray[np.int64]:
        """For each engine, how many leading pieces it holds. O(pieces x engines)."""
        num_engines = len(self._columns)
        if not len(keys):
            return np.zeros(num_engines, np.int64)
        places, is_known = self._find(keys)
        num_known = len(keys) if is_known.all() else int(np.argmin(is_known))
        if not num_known:
            return np.zeros(num_engines, np.int64)
        since_s = np.array([column.since_s for column in self._columns], np.float64)
        is_held = self._used_at_s[places[:num_known]] > since_s
        lacks = ~is_held
        found: npt.NDArray[np.int64] = np.where(
            lacks.any(axis=0), lacks.argmax(axis=0), num_known
        )
        return found

    def touch(self, engine: int, keys: KeyArray, now_s: float) -> None:
        """A prompt of these pieces goes to the engine, which will hold them."""
        if not len(keys):
            return
        places, is_known = self._find(keys)
        if not is_known.all():
            self._insert(keys[~is_known])
            places, is_known = self._find(keys)
            places = places[is_known]
        column = self._columns[engine]
        is_new = self._used_at_s[places, engine] <= column.since_s
        self._used_at_s[places, engine] = now_s
        self._num_uses[places] += 1
        column.num_new += int(np.count_nonzero(is_new))
        if column.num_new > SWEEP_SHARE * column.room_pieces:
            self._sweep(engine)

    def refresh(self, engine: int, keys: KeyArray, now_s: float) -> None:
        """The prompt's call has ended: until now nothing of it could be evicted."""
        places, is_known = self._find(keys)
        places = places[is_known]
        is_held = self._used_at_s[places, engine] > self._columns[engine].since_s
        self._used_at_s[places[is_held], engine] = now_s

    def clear(self, engine: int) -> None:
        """The engine holds nothing."""
        self._used_at_s[:, engine] = 0.0
        column = self._columns[engine]
        column.since_s, column.num_new, column.is_full = 0.0, 0, False

    def forget(self, engine: int, keys: KeyArray) -> None:
        """The engine holds these pieces no more."""
        places, is_known = self._find(keys)
        self._used_at_s[places[is_known], engine] = 0.0

    def _buckets(self, keys: KeyArray) -> npt.NDArray[np.int64]:
        first: npt.NDArray[np.int64] = (keys & self._mask).astype(np.int64) * WAYS
        return first

    def _find(self, keys: KeyArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The place of each key, and whether it is there."""
        rows = self._buckets(keys)[:, None] + self._ways
        is_its = self._keys[rows] == keys[:, None]
        way = is_its.argmax(axis=1)
        index = np.arange(len(keys))
        return rows[index, way], is_its[index, way]

    def _insert(self, keys: KeyArray) -> None:
        """One after the other, as two may want one place."""
        for first, key in zip(self._buckets(keys).tolist(), keys, strict=True):
            bucket = slice(first, first + WAYS)
            taken = self._keys[bucket]
            free = np.flatnonzero(taken == 0)
            if len(free):
                place = first + int(free[0])
            else:
                place = first + int(self._used_at_s[bucket].max(axis=1).argmin())
            self._used_at_s[place] = 0.0
            self._num_uses[place] = 0
            self._keys[place] = key

    def _sweep(self, engine: int) -> None:
        """Find out how far back the engine's cache reaches, and learn from what has left it."""
        column = self._columns[engine]
        column.num_new = 0
        used_at_s = self._used_at_s[:, engine]
        held = np.flatnonzero(used_at_s > column.since_s)
        over = len(held) - int(column.room_pieces)
        column.is_full = over > -SWEEP_SHARE * column.room_pieces
        if over <= 0:
            return
        order = np.argpartition(used_at_s[held], over - 1)[:over]
        column.since_s = float(used_at_s[held[order]].max())
        evicted = held[used_at_s[held] <= column.since_s]
        reused = float(np.count_nonzero(self._num_uses[evicted] > 1)) / len(evicted)
        weight = min(1.0, len(evicted) / REUSE_MEMORY)
        self.reuse_share += weight * (reused - self.reuse_share)
        self.mean_uses += weight * (float(self._num_uses[evicted].mean()) - self.mean_uses)
