"""Which engine holds which prefix, as far as a router knows: what it sent where, and when.

A table of pieces, with a row for each engine; an entry is when the piece was last used there. An
engine evicts what was used longest ago, so of its row as much counts as held as its KV cache has
room for. What else goes through that cache, such as offline rows, replies tell: a piece they lacked
had not been used for longer than the engine's cache reaches back. It reaches further for what calls
come back to, as an engine with our scheduler keeps that. Everything is in arrays that several
processes may share: no locks, the last writer of an entry wins, and what is lost costs a hit and no
more.
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
RETURN_MEMORY = 4096.0
"""Evicted pieces over which it is learnt how many of them are wanted again."""
PROVEN_HITS = 2
"""A piece that so many replies in a row had cached is one that calls come back to."""
GROW, SHRINK = 1.1, 0.9
"""What a cache's reach is multiplied by after a reply that had cached what was thought to be out of
reach, and after one that lacked what was thought to be within."""
LEAST_OF_HIT = 0.5
"""A reach is no less than so much of the time that a cached piece had not been used."""
LEAST_REACH_S = 0.2
ROUND_PIECES = 0.25
"""An engine caches whole blocks: so much of a piece may be missing where it had it."""
SAME_USE_S = 1e-3
"""Pieces whose last uses were no further apart were used by one prompt."""


BETWEEN_S = 1e-6
"""Between the stamps of two pieces of a prompt, the later piece's being the older."""

_BEFORE_S = np.arange(1024, dtype=np.float64) * BETWEEN_S


class Arrays(NamedTuple):
    """What processes share: a key and a number of uses for each place, how many replies in a row
    had it cached, when each engine last used it, a row for each engine, and for each engine what it
    holds of what it used (`_SINCE` to `_NUM_CLEARED`); the last row has what was learnt from
    evictions (`_USES` to `_NUM_RETURNED`) and, by `EngineBook`, from `answers`."""

    keys: KeyArray
    num_uses: npt.NDArray[np.uint32]
    num_hits: npt.NDArray[np.uint8]
    used_at_s: Floats
    columns: Floats

    @classmethod
    def private(cls, num_pieces: int, num_engines: int) -> Arrays:
        """In this process alone: a power of two of pieces, a multiple of `WAYS`."""
        return cls(
            np.zeros(num_pieces, np.uint64),
            np.zeros(num_pieces, np.uint32),
            np.zeros(num_pieces, np.uint8),
            np.zeros((num_engines, num_pieces)),
            np.zeros((num_engines + 1, NUM_COLUMN_FIELDS)),
        )


NUM_COLUMN_FIELDS = 7
_SINCE, _NUM_NEW, _NUM_HELD, _ROOM = range(4)
_REACHES_S = slice(4, 6)
"""For pieces that are not proven, and for those that are. 0: as far as there is room."""
_NUM_CLEARED = 6
_USES, _NUM_EVICTED, _NUM_RETURNED = range(3)


class _Found(NamedTuple):
    """The place of each key of a prompt, or one of its bucket, and whether it stands there; how
    many leading keys do."""

    places: IntArray
    is_known: npt.NDArray[np.bool_]
    num_known: int


class _Ranked(NamedTuple):
    """The last prompt that was looked up for several engines: `num_lost` of its pieces had been
    used by one of them, and none holds them."""

    keys: KeyArray
    found: _Found
    num_lost: int = 0


class Held(NamedTuple):
    """What an engine was taken to hold of a prompt before it was sent there: so many leading
    pieces; and of all that it had ever had, as many leading ones as there were, for how long each
    had not been used, and whether it was proven (1) or not (0). `stamp_s` is the prompt's own use,
    `num_cleared` tells whether the engine has lost all since; `num_lost` of its pieces had been
    evicted."""

    num: int
    idle_s: Floats
    kinds: IntArray
    sent_at_s: float = 0.0
    stamp_s: float = 0.0
    num_cleared: float = 0.0
    num_lost: int = 0


class PrefixMap:
    """The pieces of prompts by engine. Instants are positive and on one clock of all that share."""

    def __init__(self, arrays: Arrays) -> None:
        self._keys, self._num_uses, self._num_hits, self._used_at_s, columns = arrays
        self._columns, self._learnt = columns[:-1], columns[-1]
        self.answers = self._learnt[_NUM_RETURNED + 1 :]
        self._buckets = self._keys.reshape(-1, WAYS)
        self._mask = np.uint64(len(self._buckets) - 1)
        self._ranked: _Ranked | None = None

    @property
    def mean_uses(self) -> float:
        """How often pieces that were evicted of late had been used."""
        return float(self._learnt[_USES])

    @property
    def returned_share(self) -> float:
        """Of the pieces that engines evicted of late, the share that they were asked for again."""
        num_evicted, num_returned = self._learnt[_NUM_EVICTED : _NUM_RETURNED + 1].tolist()
        return min(1.0, num_returned / num_evicted) if num_evicted else 0.0

    def evicted_shares(self, engines: IntArray, num_new: Floats) -> Floats:
        """Of so many new pieces in each of these engines, the share that would each cost an old
        one."""
        since_new, held, room = self._columns.take(engines, axis=0)[:, _NUM_NEW : _ROOM + 1].T
        over = held + since_new + num_new - room
        costly = np.minimum(1.0, np.maximum(0.0, over / np.maximum(num_new, 1e-9)))
        return np.asarray(costly * (room > 0.0))

    def num_pieces(self, engine: int, now_s: float) -> int:
        """Pieces that it is taken to hold."""
        return len(self._held(engine, now_s))

    def num_held(self, keys: KeyArray, engines: Sequence[int] | IntArray, now_s: float) -> IntArray:
        """For each of these engines, how many leading pieces it holds. O(pieces x engines)."""
        rows, found = np.asarray(engines), self._find(keys)
        self._ranked = _Ranked(keys, found)
        places, _, num_known = found
        if not num_known:
            return np.zeros(len(rows), np.int64)
        known = places[:num_known]
        starts = rows * self._used_at_s.shape[1]
        used_at_s = self._used_at_s.reshape(-1).take(starts[:, None] + known)
        since_s = self._since_s(rows, now_s).take(self._kinds(known), axis=1)
        # The column behind the last is lacked by all.
        lacks = np.ones((len(rows), num_known + 1), np.bool_)
        np.less_equal(used_at_s, since_s, out=lacks[:, :-1])
        held: IntArray = lacks.argmax(axis=1)
        most = max(held.tolist())
        if most < num_known:
            num_lost = np.count_nonzero(used_at_s[:, most:].any(axis=0))
            self._ranked = _Ranked(keys, found, int(num_lost))
        return held

    def used_until_s(self, keys: KeyArray, engines: IntArray) -> float:
        """When the last use of a prompt's known beginning ends in these engines; 0: none is known.
        Rows of others are not even read: that would make memory of them."""
        places, _, num_known = self._looked_up(keys).found
        return float(self._used_at_s[engines, places[num_known - 1]].max()) if num_known else 0.0

    def touch(
        self, engine: int, keys: KeyArray, now_s: float, *, room_pieces: float, stays_s: float = 0.0
    ) -> Held:
        """A prompt of these pieces goes to the engine, which has room for so many; it stays there
        for about so long, in which nothing of it is evicted. Tells what was held before."""
        if not len(keys):
            return _NOTHING
        ranked, self._ranked = self._looked_up(keys), None
        places, is_known, num_known = ranked.found
        self._learnt[_NUM_RETURNED] += ranked.num_lost
        stamps = _stamps(len(keys), now_s + stays_s)
        used_at_s, column = self._used_at_s[engine], self._columns[engine]
        known = places if num_known == len(keys) else places[is_known]
        before_s, kinds = used_at_s[known], self._kinds(known)
        is_held = before_s > self._since_s_of(engine, now_s).take(kinds)
        self._num_uses[known] += 1
        if len(known) == len(keys):
            used_at_s[known] = stamps
        else:
            used_at_s[known] = stamps[is_known]
            self._insert(keys[~is_known], engine, stamps[~is_known])
        num_new = float(column[_NUM_NEW]) + len(keys) - int(np.count_nonzero(is_held))
        column[_NUM_NEW] = num_new
        if num_new + abs(room_pieces - float(column[_ROOM])) > SWEEP_SHARE * room_pieces:
            self._sweep(engine, room_pieces, now_s)
        num_had = _num_leading(before_s[:num_known] > 0.0)
        idle_s = now_s - before_s[:num_had]
        return Held(
            _num_leading(is_held[:num_known]),
            idle_s,
            kinds[:num_had],
            now_s,
            float(stamps[0]),
            float(column[_NUM_CLEARED]),
            ranked.num_lost,
        )

    def answered(
        self, engine: int, keys: KeyArray, before: Held, now_s: float, num_cached: float | None
    ) -> None:
        """The call of a prompt that was sent when so much was held has been answered: until now
        nothing of it could be evicted. It had so many pieces cached; None: nobody has told."""
        if not len(keys) or self._columns[engine, _NUM_CLEARED] != before.num_cleared:
            return
        places, is_known, _ = self._find(keys)
        known, used_at_s = places[is_known], self._used_at_s[engine]
        before_s = used_at_s[known]
        stamps = _stamps(len(keys), now_s)[is_known]
        used_at_s[known] = np.where(before_s > self._columns[engine, _SINCE], stamps, before_s)
        if num_cached is not None:
            self._learn(engine, known, np.flatnonzero(is_known), before, num_cached)

    def withdraw(self, engine: int, keys: KeyArray, before: Held) -> None:
        """The call was never begun: what it alone has used there is as it was before."""
        if not len(keys) or self._columns[engine, _NUM_CLEARED] != before.num_cleared:
            return
        places, is_known, _ = self._find(keys)
        former_s = np.zeros(len(keys))
        former_s[: len(before.idle_s)] = before.sent_at_s - before.idle_s
        used_at_s = self._used_at_s[engine]
        is_own = is_known & (used_at_s[places] == _stamps(len(keys), before.stamp_s))
        used_at_s[places[is_own]] = former_s[is_own]
        self._columns[engine, _NUM_HELD] -= np.count_nonzero(is_own[before.num :])
        self._learnt[_NUM_RETURNED] -= min(before.num_lost, self._learnt[_NUM_RETURNED])

    def _learn(
        self, engine: int, places: IntArray, numbers: IntArray, before: Held, num_cached: float
    ) -> None:
        """Find out how far back the engine's cache reaches, and which pieces calls come back to.
        `places` are those of the prompt's pieces of these `numbers`."""
        num, num_had = int(num_cached + ROUND_PIECES), len(before.idle_s)
        reaches_s = self._columns[engine, _REACHES_S]
        for kind in (0, 1):
            hit_s = before.idle_s[:num][before.kinds[:num] == kind].max(initial=0.0)
            if 0.0 < reaches_s[kind] < hit_s:
                reaches_s[kind] = max(GROW * reaches_s[kind], LEAST_OF_HIT * hit_s)
        is_clear = num < num_had
        if 0 < num < num_had:
            # Bytes tell tokens only roughly: of pieces that one prompt used, all may be there.
            is_clear = bool(before.idle_s[num] > before.idle_s[num - 1] + SAME_USE_S)
        if is_clear and num < before.num:
            kind, lost_s = int(before.kinds[num]), float(before.idle_s[num])
            reach_s = float(reaches_s[kind])
            if lost_s > 0 and (not reach_s or lost_s < reach_s):
                reaches_s[kind] = max(LEAST_REACH_S, SHRINK * reach_s if reach_s else lost_s)
        hits = self._num_hits[places]
        is_lost = (numbers >= num) & (numbers < num_had) & is_clear
        more = np.where(numbers < num, np.minimum(hits, PROVEN_HITS) + 1, hits)
        self._num_hits[places] = np.where(is_lost, 0, more)

    def clear(self, engine: int) -> None:
        """The engine holds nothing."""
        num_cleared = self._columns[engine, _NUM_CLEARED]
        self._used_at_s[engine] = 0.0
        self._columns[engine] = 0.0
        self._columns[engine, _NUM_CLEARED] = num_cleared + 1

    def _buckets_of(self, keys: KeyArray) -> IntArray:
        return (keys & self._mask).view(np.int64)

    def _looked_up(self, keys: KeyArray) -> _Ranked:
        """Most prompts were looked up just now, by `num_held`."""
        if self._ranked is not None and self._ranked.keys is keys:
            return self._ranked
        return _Ranked(keys, self._find(keys))

    def _find(self, keys: KeyArray) -> _Found:
        """Where the keys stand."""
        buckets = self._buckets_of(keys)
        ways = (self._buckets.take(buckets, axis=0) == keys[:, None]).argmax(axis=1)
        places = buckets * WAYS + ways
        is_known = self._keys.take(places) == keys
        return _Found(places, is_known, _num_leading(is_known))

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
            self._num_hits[places] = 0
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

    def _kinds(self, places: IntArray) -> IntArray:
        """Of the pieces in these places: 1 for those that are proven, 0 for the others."""
        return (self._num_hits.take(places) >= PROVEN_HITS).view(np.int8)

    def _since_s(self, engines: IntArray, now_s: float) -> Floats:
        """When a piece must have been used to be held, by engine and kind."""
        columns = self._columns.take(engines, axis=0)
        reaches_s = columns[:, _REACHES_S]
        return np.maximum((now_s - reaches_s) * (reaches_s > 0.0), columns[:, _SINCE, None])

    def _since_s_of(self, engine: int, now_s: float) -> Floats:
        """The same for one engine, by kind."""
        column = self._columns[engine].tolist()
        reaches_s = [reach_s or now_s for reach_s in column[_REACHES_S]]
        return np.array([max(column[_SINCE], now_s - reach_s) for reach_s in reaches_s])

    def _held(self, engine: int, now_s: float) -> IntArray:
        """The places of all pieces that it is taken to hold."""
        used_at_s = self._used_at_s[engine]
        since_s = self._since_s_of(engine, now_s)
        places = np.flatnonzero(used_at_s > since_s.min())
        held: IntArray = places[used_at_s[places] > since_s.take(self._kinds(places))]
        return held

    def _sweep(self, engine: int, room_pieces: float, now_s: float) -> None:
        """Find out what the engine's cache has room for, and learn from what has left it."""
        column = self._columns[engine]
        num_before = float(column[_NUM_HELD] + column[_NUM_NEW])
        column[_NUM_NEW], column[_ROOM] = 0, room_pieces
        used_at_s, held = self._used_at_s[engine], self._held(engine, now_s)
        room = self._num_fitting(room_pieces)
        over = len(held) - room
        column[_NUM_HELD] = num_held = min(len(held), room)
        self._note_evicted(num_before - num_held)
        if over <= 0:
            return
        held_at_s = used_at_s[held]
        column[_SINCE] = min(now_s, np.partition(held_at_s, over - 1)[over - 1])
        evicted = held[held_at_s <= column[_SINCE]]
        if not len(evicted):
            return
        weight = min(1.0, len(evicted) / REUSE_MEMORY)
        self._learnt[_USES] += weight * (self._num_uses[evicted].mean() - self._learnt[_USES])

    def _num_fitting(self, room_pieces: float) -> int:
        """How many pieces stay where there is so much room."""
        return int(room_pieces)

    def _note_evicted(self, num: float) -> None:
        """So many pieces have left an engine, or were thought to have; what was long ago counts
        less."""
        num_evicted = max(0.0, self._learnt[_NUM_EVICTED] + num)
        self._learnt[_NUM_EVICTED] = num_evicted
        if num_evicted > RETURN_MEMORY:
            self._learnt[_NUM_EVICTED : _NUM_RETURNED + 1] *= RETURN_MEMORY / num_evicted


_NOTHING = Held(0, np.empty(0), np.empty(0, np.int64))


def _num_leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many are set before the first that is not."""
    first = int(flags.argmin()) if len(flags) else 0
    return first if first < len(flags) and not flags[first] else len(flags)


def _stamps(num: int, now_s: float) -> Floats:
    """When the pieces of a prompt were used: its end a little before its beginning, since an
    engine evicts prompts from the end."""
    if num <= len(_BEFORE_S):
        return now_s - _BEFORE_S[:num]
    return now_s - np.arange(num, dtype=np.float64) * BETWEEN_S
