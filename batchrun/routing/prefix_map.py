"""Which engine holds which prefix, as far as a router knows: what it sent where, and when.

A table of pieces, with a row for each engine; an entry is when the piece was last used there. An
engine evicts what was used longest ago, so of its row as much counts as held as its KV cache has
room for. Everything is in arrays that several processes may share: no locks, the
last writer of an entry wins, and what is lost costs a hit and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import IntArray, KeyArray

Floats = npt.NDArray[np.float64]

WAYS = 8
"""Places that a key may stand in: the one used longest ago gives way to a new one."""
_WAYS = np.arange(WAYS)
SWEEP_SHARE = 0.02
"""An engine's row is looked at again when so much of its cache is new."""
REUSE_MEMORY = 512
"""Evicted pieces over which it is learnt how often they had been used."""


BETWEEN_S = 1e-6
"""Between the stamps of two pieces of a prompt, the later piece's being the older."""

_BEFORE_S = np.arange(1024, dtype=np.float64) * BETWEEN_S


class Arrays(NamedTuple):
    """What processes share: a key and a number of uses for each place, when each engine last used
    it, a row for each engine, and for each engine since when it holds what it used (`_SINCE` to
    `_ROOM`), and what was learnt from evictions (`_USES`), in its last row."""

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
            np.zeros((num_engines, num_pieces)),
            np.zeros((num_engines + 1, NUM_COLUMN_FIELDS)),
        )


NUM_COLUMN_FIELDS = 4
_SINCE, _NUM_NEW, _NUM_HELD, _ROOM = range(NUM_COLUMN_FIELDS)
_USES = 0


class _Found(NamedTuple):
    """The place of each key of a prompt, or one of its bucket, and whether it stands there; how
    many leading keys do."""

    places: IntArray
    is_known: npt.NDArray[np.bool_]
    num_known: int


class PrefixMap:
    """The pieces of prompts by engine. Instants are positive and on one clock of all that share."""

    def __init__(self, arrays: Arrays) -> None:
        self._keys, self._num_uses, self._used_at_s, columns = arrays
        self._columns, self._learnt = columns[:-1], columns[-1]
        self._buckets = self._keys.reshape(-1, WAYS)
        self._mask = np.uint64(len(self._buckets) - 1)
        self._ranked: tuple[KeyArray, _Found] | None = None

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
        return int(np.count_nonzero(self._used_at_s[engine] > since_s))

    def num_held(self, keys: KeyArray, engines: Sequence[int] | IntArray) -> IntArray:
        """For each of these engines, how many leading pieces it holds. O(pieces x engines)."""
        rows, found = np.asarray(engines), self._find(keys)
        self._ranked = keys, found
        places, _, num_known = found
        if not num_known:
            return np.zeros(len(rows), np.int64)
        starts = rows * self._used_at_s.shape[1]
        used_at_s = self._used_at_s.reshape(-1).take(starts[:, None] + places[:num_known])
        lacks = used_at_s <= self._columns[rows, _SINCE][:, None]
        first = lacks.argmax(axis=1)
        held: IntArray = np.where(lacks.any(axis=1), first, num_known)
        return held

    def touch(self, engine: int, keys: KeyArray, now_s: float, *, room_pieces: float) -> int:
        """A prompt of these pieces goes to the engine, which has room for so many; tells how many
        leading pieces it held before."""
        if not len(keys):
            return 0
        # Most prompts were looked up just now, by `num_held`.
        ranked, self._ranked = self._ranked, None
        is_found = ranked is not None and ranked[0] is keys
        places, is_known, num_known = ranked[1] if ranked and is_found else self._find(keys)
        stamps = _stamps(len(keys), now_s)
        used_at_s, column = self._used_at_s[engine], self._columns[engine]
        if num_known == len(keys):
            is_held = used_at_s[places] > column[_SINCE]
            used_at_s[places] = stamps
            self._num_uses[places] += 1
        else:
            known, is_held = places[is_known], is_known.copy()
            is_held[is_known] = used_at_s[known] > column[_SINCE]
            used_at_s[known] = stamps[is_known]
            self._num_uses[known] += 1
            self._insert(keys[~is_known], engine, stamps[~is_known])
        num_held = int(np.count_nonzero(is_held))
        num_new = float(column[_NUM_NEW]) + len(keys) - num_held
        column[_NUM_NEW] = num_new
        if num_new + abs(room_pieces - float(column[_ROOM])) > SWEEP_SHARE * room_pieces:
            self._sweep(engine, room_pieces)
        return num_held if num_held == len(keys) else int(is_held.argmin())

    def refresh(self, engine: int, keys: KeyArray, now_s: float) -> None:
        """The prompt's call has ended: until now nothing of it could be evicted."""
        if not len(keys):
            return
        places, is_known, _ = self._find(keys)
        used_at_s = self._used_at_s[engine]
        is_held = is_known & (used_at_s[places] > self._columns[engine, _SINCE])
        used_at_s[places[is_held]] = _stamps(len(keys), now_s)[is_held]

    def clear(self, engine: int) -> None:
        """The engine holds nothing."""
        self._used_at_s[engine] = 0.0
        self._columns[engine] = 0.0

    def _buckets_of(self, keys: KeyArray) -> IntArray:
        return (keys & self._mask).view(np.int64)

    def _find(self, keys: KeyArray) -> _Found:
        """Where the keys stand."""
        buckets = self._buckets_of(keys)
        is_its = self._buckets[buckets] == keys[:, None]
        ways = is_its.argmax(axis=1)
        is_known = is_its.any(axis=1)
        num_known = len(keys) if is_known.all() else int(is_known.argmin())
        return _Found(buckets * WAYS + ways, is_known, num_known)

    def _insert(self, keys: KeyArray, engine: int, used_at_s: Floats) -> None:
        """All at once, but for those that want places in one bucket: they go one after another."""
        in_use = np.flatnonzero(self._columns[:, _ROOM])
        num_engines = 1 + max(engine, int(in_use[-1]) if len(in_use) else 0)
        buckets, left = self._buckets_of(keys), np.arange(len(keys))
        while len(left):
            turn = left
            if len(left) > 1:
                turn = left[np.unique(buckets[left], return_index=True)[1]]
            places = self._free_places(buckets[turn], num_engines)
            self._used_at_s[:num_engines, places] = 0.0
            self._used_at_s[engine, places] = used_at_s[turn]
            self._num_uses[places] = 1
            self._keys[places] = keys[turn]
            left = left[:0] if len(turn) == len(left) else np.setdiff1d(left, turn)

    def _free_places(self, buckets: IntArray, num_engines: int) -> IntArray:
        """A place in each of these buckets: one that is free, else the one used longest ago. No
        engine from `num_engines` on has used any."""
        is_taken = self._buckets[buckets] != 0
        ways = is_taken.argmin(axis=1)
        is_full = is_taken.all(axis=1)
        if is_full.any():
            places = buckets[is_full, None] * WAYS + _WAYS
            ways[is_full] = self._used_at_s[:num_engines, places].max(axis=0).argmin(axis=1)
        free: IntArray = buckets * WAYS + ways
        return free

    def _sweep(self, engine: int, room_pieces: float) -> None:
        """Find out how far back the engine's cache reaches, and learn from what has left it."""
        column = self._columns[engine]
        column[_NUM_NEW], column[_ROOM] = 0, room_pieces
        used_at_s = self._used_at_s[engine]
        held = np.flatnonzero(used_at_s > column[_SINCE])
        over = len(held) - int(room_pieces)
        column[_NUM_HELD] = min(len(held), int(room_pieces))
        if over <= 0:
            return
        held_at_s = used_at_s[held]
        column[_SINCE] = np.partition(held_at_s, over - 1)[over - 1]
        evicted = held[held_at_s <= column[_SINCE]]
        weight = min(1.0, len(evicted) / REUSE_MEMORY)
        self._learnt[_USES] += weight * (self._num_uses[evicted].mean() - self._learnt[_USES])


def _stamps(num: int, now_s: float) -> Floats:
    """When the pieces of a prompt were used: its end a little before its beginning, since an
    engine evicts prompts from the end."""
    if num <= len(_BEFORE_S):
        return now_s - _BEFORE_S[:num]
    return now_s - np.arange(num, dtype=np.float64) * BETWEEN_S
