"""The shipped router in plain steps: an engine at a time, a piece at a time, no arrays of engines.

What is quicker must rank the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.cost import HOT_CALLS
from batchrun.routing.engine_book import FIELDS, Call, EngineBook, EngineTraits, Load
from batchrun.routing.prefix_map import (
    BETWEEN_S,
    GROW,
    LEAST_OF_HIT,
    LEAST_REACH_S,
    PROVEN_HITS,
    RETURN_MEMORY,
    REUSE_MEMORY,
    ROUND_PIECES,
    SAME_USE_S,
    SHRINK,
    SWEEP_SHARE,
    WAYS,
    Floats,
    Held,
    PrefixMap,
)
from batchrun.routing.router import Router

SINCE, NUM_NEW, NUM_HELD, ROOM = range(4)


class PlainMap(PrefixMap):
    """One piece after the other, in rows of pieces."""

    def __init__(self, num_pieces: int, num_engines: int) -> None:
        self.keys = np.zeros(num_pieces, np.uint64)
        self.num_uses = np.zeros(num_pieces, np.uint32)
        self.num_hits = np.zeros(num_pieces, np.int64)
        self.reaches_s = np.zeros((num_engines, 2))
        self.num_cleared = np.zeros(num_engines)
        self.used_at_s = np.zeros((num_pieces, num_engines))
        self.columns = np.zeros((num_engines, 4))
        self.learnt, self.answers = 0.0, np.zeros(4)
        self.num_evicted = self.num_returned = 0.0
        self.lost: tuple[KeyArray, int] = np.empty(0, np.uint64), 0
        self.mask = np.uint64(len(self.keys) // WAYS - 1)
        self.ways = np.arange(WAYS, dtype=np.int64)

    @property
    def mean_uses(self) -> float:
        """How often pieces that were evicted of late had been used."""
        return self.learnt

    @property
    def returned_share(self) -> float:
        """Of what was evicted of late, the share that was wanted again."""
        return min(1.0, self.num_returned / self.num_evicted) if self.num_evicted else 0.0

    def evicted_share(self, engine: int, num_new: float) -> float:
        """Of so many new pieces there, the share that would each cost an old one."""
        since_new, held, room = self.columns[engine, NUM_NEW : ROOM + 1].tolist()
        over = held + since_new + num_new - room
        return min(1.0, max(0.0, over / num_new)) if room and num_new > 0 else 0.0

    def num_pieces(self, engine: int, now_s: float) -> int:
        """Pieces that it is taken to hold."""
        return sum(self.is_held(engine, place, now_s) for place in range(len(self.keys)))

    def is_held(self, engine: int, place: int, now_s: float) -> bool:
        """Whether the engine is taken to hold the piece in this place."""
        used_at_s = float(self.used_at_s[place, engine])
        reach_s = float(self.reaches_s[engine, self.kind_of(place)])
        is_in_reach = not reach_s or used_at_s > now_s - reach_s
        return is_in_reach and used_at_s > self.columns[engine, SINCE]

    def kind_of(self, place: int) -> int:
        """1: it is proven, 0: it is not."""
        return int(self.num_hits[place] >= PROVEN_HITS)

    def num_held(
        self, keys: KeyArray, engines: Sequence[int] | npt.NDArray[np.int64], now_s: float
    ) -> npt.NDArray[np.int64]:
        """For each of these engines, how many leading pieces it holds. O(pieces x engines)."""
        places, is_known = self.find(keys)
        found = np.zeros(len(engines), np.int64)
        for number, engine in enumerate(engines):
            for place, is_there in zip(places.tolist(), is_known, strict=True):
                if not is_there or not self.is_held(engine, place, now_s):
                    break
                found[number] += 1
        of_known = places[: len(keys) if is_known.all() else int(is_known.argmin())].tolist()
        lost = [
            place
            for place in of_known[max(found) :]
            if any(self.used_at_s[place, engine] for engine in engines)
        ]
        self.lost = keys, len(lost)
        return found

    def used_until_s(self, keys: KeyArray, engines: npt.NDArray[np.int64]) -> float:
        """When the last use of what is known of a prompt's beginning ends."""
        places, is_known = self.find(keys)
        until_s = 0.0
        for place, is_there in zip(places.tolist(), is_known, strict=True):
            if not is_there:
                break
            until_s = float(self.used_at_s[place][engines].max())
        return until_s

    def touch(
        self, engine: int, keys: KeyArray, now_s: float, *, room_pieces: float, stays_s: float = 0.0
    ) -> Held:
        """A prompt of these pieces goes to the engine, which has room for so many; it stays there
        for about so long. Tells what was held before."""
        if not len(keys):
            return Held(0, np.empty(0), np.empty(0, np.int64))
        num_lost = self.lost[1] if self.lost[0] is keys else 0
        (num_held,) = self.num_held(keys, [engine], now_s)
        self.lost = np.empty(0, np.uint64), 0
        self.num_returned += num_lost
        places, is_known = self.find(keys)
        idle_s: list[float] = []
        for place, is_there in zip(places.tolist(), is_known, strict=True):
            if not is_there or not self.used_at_s[place, engine]:
                break
            idle_s.append(now_s - float(self.used_at_s[place, engine]))
        kinds = [self.kind_of(place) for place in places[: len(idle_s)].tolist()]
        used_at_s = stamps(len(keys), now_s + stays_s)
        places, new_keys = places[is_known], keys[~is_known]
        column = self.columns[engine]
        is_held = is_known.copy()
        is_held[is_known] = [self.is_held(engine, place, now_s) for place in places.tolist()]
        self.used_at_s[places, engine] = used_at_s[is_known]
        self.num_uses[places] += 1
        self.insert(new_keys, engine, used_at_s[~is_known])
        column[NUM_NEW] += np.count_nonzero(~is_held)
        change = column[NUM_NEW] + abs(room_pieces - column[ROOM])
        if change > SWEEP_SHARE * room_pieces:
            self.sweep(engine, room_pieces, now_s)
        cleared = float(self.num_cleared[engine])
        known = np.array(idle_s), np.array(kinds, np.int64)
        return Held(int(num_held), *known, now_s, float(used_at_s[0]), cleared, num_lost)

    def answered(
        self, engine: int, keys: KeyArray, before: Held, now_s: float, num_cached: float | None
    ) -> None:
        """The call has been answered: until now nothing of it could be evicted."""
        if self.num_cleared[engine] != before.num_cleared:
            return
        places, is_known = self.find(keys)
        for place, is_there, stamp in zip(
            places.tolist(), is_known, stamps(len(keys), now_s), strict=True
        ):
            used_at_s = self.used_at_s[place, engine]
            if is_there and used_at_s > self.columns[engine, SINCE]:
                self.used_at_s[place, engine] = stamp
        if num_cached is not None:
            self.learn(engine, keys, before, num_cached)

    def withdraw(self, engine: int, keys: KeyArray, before: Held) -> None:
        """The call was never begun: what it alone has used there is as it was before."""
        if self.num_cleared[engine] != before.num_cleared:
            return
        places, is_known = self.find(keys)
        own = stamps(len(keys), before.stamp_s)
        self.num_returned = max(0.0, self.num_returned - before.num_lost)
        for number, place in enumerate(places.tolist()):
            if is_known[number] and self.used_at_s[place, engine] == own[number]:
                had = number < len(before.idle_s)
                former_s = before.sent_at_s - before.idle_s[number] if had else 0.0
                self.used_at_s[place, engine] = former_s
                self.columns[engine, NUM_HELD] -= number >= before.num

    def learn(self, engine: int, keys: KeyArray, before: Held, num_cached: float) -> None:
        """The engine had so many pieces of a prompt cached: how far back does its cache reach?"""
        had = list(zip(before.idle_s.tolist(), before.kinds.tolist(), strict=True))
        num, reaches_s = int(num_cached + ROUND_PIECES), self.reaches_s[engine]
        for kind in (0, 1):
            hit_s = max([idle_s for idle_s, each in had[:num] if each == kind], default=0.0)
            if reaches_s[kind] and hit_s > reaches_s[kind]:
                reaches_s[kind] = max(GROW * reaches_s[kind], LEAST_OF_HIT * hit_s)
        is_clear = num < len(had)
        if num and is_clear:
            is_clear = had[num][0] - had[num - 1][0] > SAME_USE_S
        if is_clear and num < before.num and had[num][0] > 0:
            lost_s, kind = had[num]
            if not reaches_s[kind]:
                reaches_s[kind] = max(LEAST_REACH_S, lost_s)
            elif lost_s < reaches_s[kind]:
                reaches_s[kind] = max(LEAST_REACH_S, SHRINK * reaches_s[kind])
        places, is_known = self.find(keys)
        for number, place in enumerate(places.tolist()):
            if is_known[number] and number < num:
                self.num_hits[place] += 1
            elif is_known[number] and number < len(had) and is_clear:
                self.num_hits[place] = 0

    def clear(self, engine: int) -> None:
        """The engine holds nothing."""
        self.used_at_s[:, engine] = 0.0
        self.columns[engine] = 0.0
        self.reaches_s[engine] = 0.0
        self.num_cleared[engine] += 1

    def first_of(self, keys: KeyArray) -> npt.NDArray[np.int64]:
        first: npt.NDArray[np.int64] = (keys & self.mask).astype(np.int64) * WAYS
        return first

    def find(self, keys: KeyArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The place of each key, and whether it is there."""
        rows = self.first_of(keys)[:, None] + self.ways
        is_its = self.keys[rows] == keys[:, None]
        way = is_its.argmax(axis=1)
        index = np.arange(len(keys))
        return rows[index, way], is_its[index, way]

    def insert(self, keys: KeyArray, engine: int, used_at_s: Floats) -> None:
        """One after the other, as two may want one place."""
        for first, key, at_s in zip(
            self.first_of(keys).tolist(), keys, used_at_s.tolist(), strict=True
        ):
            bucket = slice(first, first + WAYS)
            free = np.flatnonzero(self.keys[bucket] == 0)
            if len(free):
                place = first + int(free[0])
            else:
                place = first + int(self.used_at_s[bucket].max(axis=1).argmin())
            self.used_at_s[place] = 0.0
            self.used_at_s[place, engine] = at_s
            self.num_uses[place], self.num_hits[place] = 1, 0
            self.keys[place] = key

    def sweep(self, engine: int, room_pieces: float, now_s: float) -> None:
        """Find out what the engine's cache has room for, and learn from what has left it."""
        column = self.columns[engine]
        num_before = float(column[NUM_HELD] + column[NUM_NEW])
        column[NUM_NEW], column[ROOM] = 0, room_pieces
        used_at_s = self.used_at_s[:, engine]
        places = range(len(self.keys))
        held = np.array([i for i in places if self.is_held(engine, i, now_s)], np.int64)
        over = len(held) - int(room_pieces)
        column[NUM_HELD] = min(len(held), int(room_pieces))
        self.num_evicted = max(0.0, self.num_evicted + num_before - column[NUM_HELD])
        if self.num_evicted > RETURN_MEMORY:
            self.num_returned *= RETURN_MEMORY / self.num_evicted
            self.num_evicted = RETURN_MEMORY
        if over <= 0:
            return
        order = np.argpartition(used_at_s[held], over - 1)[:over]
        column[SINCE] = min(now_s, used_at_s[held[order]].max())
        evicted = held[used_at_s[held] <= column[SINCE]]
        if not len(evicted):
            return
        weight = min(1.0, len(evicted) / REUSE_MEMORY)
        self.learnt += weight * (float(self.num_uses[evicted].mean()) - self.learnt)


def stamps(num: int, now_s: float) -> Floats:
    """When the pieces of a prompt were used: its end a little before its beginning, since an
    engine evicts prompts from the end."""
    return now_s - np.arange(num, dtype=np.float64) * BETWEEN_S


class PlainBook(EngineBook):
    """The book over a plain map."""

    def __init__(self, traits: Sequence[EngineTraits], num_pieces: int) -> None:
        self.all_loads = np.zeros((1, len(traits), len(FIELDS)))
        super().__init__(PlainMap(num_pieces, len(traits)), self.all_loads)
        for number, each in enumerate(traits):
            self.introduce(number, each)

    def loads(self, engines: Sequence[int], now_s: float) -> dict[int, Load]:
        """See `EngineBook`."""
        found = {}
        for engine in engines:
            calls, prompt, waiting, tokens, waiting_s, at_s = self.all_loads[0, engine].tolist()
            left_s = max(0.0, waiting_s - max(0.0, now_s - at_s)) if waiting > 0 else 0.0
            found[engine] = Load(int(calls), int(prompt), int(waiting), int(tokens), left_s)
        return found

    def cached_tokens(self, call: Call, engines: Sequence[int], now_s: float) -> dict[int, int]:
        """See `EngineBook`."""
        held = self.prefixes.num_held(call.keys, engines, now_s).tolist()
        return {engine: call.tokens_of(num) for engine, num in zip(engines, held, strict=True)}


class PlainCost(Router):
    """Queue + own prefill, with whom it delays + what it evicts + its decodes + its slot."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        book = self.book
        loads, cached = book.loads(engines, now_s), book.cached_tokens(call, engines, now_s)
        num_calls = sum(load.calls for load in loads.values())
        sharing = max(
            1.0, min(book.num_sharing(call, np.asarray(engines), now_s), num_calls) / HOT_CALLS
        )

        def price(engine: int) -> tuple[float, int, int]:
            load = loads[engine]
            own_s = book.traits[engine].prices.prefill_s(call.prompt_tokens, cached[engine])
            num_new = (call.prompt_tokens - cached[engine]) / call.piece_tokens
            prefixes = book.prefixes
            assert isinstance(prefixes, PlainMap)
            evicted = prefixes.evicted_share(engine, num_new) * prefixes.returned_share
            decode_s = self.decode_s_of(engine, load)
            lost_s = own_s * evicted
            delays_s = num_calls / len(loads) * (lost_s + (own_s - lost_s) / sharing)
            seconds = load.waiting_s + (own_s + delays_s) + lost_s + decode_s
            return seconds, load.calls, self.num_sent[engine]

        return sorted(engines, key=price)

    def decode_s_of(self, engine: int, load: Load) -> float:
        """The call's own decodes, what they add to those of others, and the wait for a slot."""
        traits, answer = self.book.traits[engine], self.book.answer_tokens
        prices = traits.prices
        step_s = prices.decode_s(load.calls + 1, load.prompt_tokens + load.calls * answer / 2)
        added_s = prices.call_s + (self.book.prompt_tokens + answer / 2) * prices.context_token_s
        over = load.calls + 1 - traits.max_running
        slot_s = max(0, over) * answer * step_s / traits.max_running
        return answer * step_s + load.calls * answer / 2 * added_s + slot_s
