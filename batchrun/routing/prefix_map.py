"""Which engine holds which prefix, as far as a router knows: what it sent where, and when.

A table of pieces, a row for each and a column for each engine; an entry is when the piece was last
used there. An engine evicts what was used longest ago, so of its column as much counts as held as
its KV cache has room for. Everything is in arrays that several processes may share: no locks, the
last writer of an entry wins, and what is lost costs a hit and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""Evicted pieces over which it is learnt how often they had been used."""


BETWEEN_S = 1e-6
"""Between the stamps of two pieces of a prompt, the later piece's being the older."""


class Arrays(NamedTuple):
    """What processes share: a key and a number of uses for each place, when each engine last used
    it, and for each engine since when it holds what it used (`_SINCE` to `_ROOM`), and what was
    learnt from evictions (`_USES`), in its last row."""

    keys: KeyArray
    num_uses: npt.NDArray[np.uint32]
    used_at_s: Floats
    columns: Floats

    @classmethod
    def private(cls, num_pieces: int, num_engines: int) -> Arrays:
        """In this process alone: a power of two of pieces, a multiple of `WAYS`."""
        return cls(
            np.zeros(num_pieces, np.uint64),
            np.zeros(num_pieces, np.uint32),
            np.zeros((num_pieces, num_engines)),
            np.zeros((num_engines + 1, NUM_COLUMN_FIELDS)),
        )


NUM_COLUMN_FIELDS = 4
_SINCE, _NUM_NEW, _NUM_HELD, _ROOM = range(NUM_COLUMN_FIELDS)
_USES = 0


class PrefixMap:
    """The pieces of prompts by engine. Instants are positive and on one clock of all that share."""

    def __init__(self, arrays: Arrays) -> None:
        self._keys, self._num_uses, self._used_at_s, columns = arrays
        self._columns, self._learnt = columns[:-1], columns[-1]
        self._mask = np.uint64(len(self._keys) // WAYS - 1)
        self._ways = np.arange(WAYS, dtype=np.int64)

    @property
    def mean_uses(self) -> float:
        """How often pieces that were evicted of late had been used."""
        return float(self._learnt[_USES])

    def evicted_share(self, engine: int, num_new: float) -> float:
        """Of so many new pieces there, the share that would each cost an old one."""
        since_new, held, room = self._columns[engine, _NUM_NEW:].tolist()
        over = held + since_new + num_new - room
        return min(1.0, max(0.0, over / num_new)) if room and num_new > 0 else 0.0

    def num_pieces(self, engine: int) -> int:
        """Pieces that it is taken to hold."""
        since_s = self._columns[engine, _SINCE]
        return int(np.count_nonzero(self._used_at_s[:, engine] > since_s))

    def num_held(self, keys: KeyArray, engines: Sequence[int]) -> npt.NDArray[np.int64]:
        """For each of these engines, how many leading pieces it holds. O(pieces x engines)."""
        places, is_known = self._find(keys)
        num_known = len(keys) if is_known.all() else int(np.argmin(is_known))
        if not num_known:
            return np.zeros(len(engines), np.int64)
        used_at_s = self._used_at_s[places[:num_known, None], engines]
        lacks = used_at_s <= self._columns[engines, _SINCE]
        found: npt.NDArray[np.int64] = np.where(lacks.any(axis=0), lacks.argmax(axis=0), num_known)
        return found

    def touch(self, engine: int, keys: KeyArray, now_s: float, *, room_pieces: float) -> int:
        """A prompt of these pieces goes to the engine, which has room for so many; tells how many
        leading pieces it held before."""
        if not len(keys):
            return 0
        places, is_known = self._find(keys)
        used_at_s = _stamps(len(keys), now_s)
        places, new_keys = places[is_known], keys[~is_known]
        column = self._columns[engine]
        is_held = is_known.copy()
        is_held[is_known] = self._used_at_s[places, engine] > column[_SINCE]
        self._used_at_s[places, engine] = used_at_s[is_known]
        self._num_uses[places] += 1
        self._insert(new_keys, engine, used_at_s[~is_known])
        column[_NUM_NEW] += np.count_nonzero(~is_held)
        change = column[_NUM_NEW] + abs(room_pieces - column[_ROOM])
        if change > SWEEP_SHARE * room_pieces:
            self._sweep(engine, room_pieces)
        return len(keys) if is_held.all() else int(is_held.argmin())

    def refresh(self, engine: int, keys: KeyArray, now_s: float) -> None:
        """The prompt's call has ended: until now nothing of it could be evicted."""
        places, is_known = self._find(keys)
        places, used_at_s = places[is_known], _stamps(len(keys), now_s)[is_known]
        is_held = self._used_at_s[places, engine] > self._columns[engine, _SINCE]
        self._used_at_s[places[is_held], engine] = used_at_s[is_held]

    def clear(self, engine: int) -> None:
        """The engine holds nothing."""
        self._used_at_s[:, engine] = 0.0
        self._columns[engine] = 0.0

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

    def _insert(self, keys: KeyArray, engine: int, used_at_s: Floats) -> None:
        """One after the other, as two may want one place."""
        for first, key, at_s in zip(
            self._buckets(keys).tolist(), keys, used_at_s.tolist(), strict=True
        ):
            bucket = slice(first, first + WAYS)
            free = np.flatnonzero(self._keys[bucket] == 0)
            if len(free):
                place = first + int(free[0])
            else:
                place = first + int(self._used_at_s[bucket].max(axis=1).argmin())
            self._used_at_s[place] = 0.0
            self._used_at_s[place, engine] = at_s
            self._num_uses[place] = 1
            self._keys[place] = key

    def _sweep(self, engine: int, room_pieces: float) -> None:
        """Find out how far back the engine's cache reaches, and learn from what has left it."""
        column = self._columns[engine]
        column[_NUM_NEW], column[_ROOM] = 0, room_pieces
        used_at_s = self._used_at_s[:, engine]
        held = np.flatnonzero(used_at_s > column[_SINCE])
        over = len(held) - int(room_pieces)
        column[_NUM_HELD] = min(len(held), int(room_pieces))
        if over <= 0:
            return
        order = np.argpartition(used_at_s[held], over - 1)[:over]
        column[_SINCE] = used_at_s[held[order]].max()
        evicted = held[used_at_s[held] <= column[_SINCE]]
        weight = min(1.0, len(evicted) / REUSE_MEMORY)
        self._learnt[_USES] += weight * (self._num_uses[evicted].mean() - self._learnt[_USES])


def _stamps(num: int, now_s: float) -> Floats:
    """When the pieces of a prompt were used: its end a little before its beginning, since an
    engine evicts prompts from the end."""
    return now_s - np.arange(num, dtype=np.float64) * BETWEEN_S
