"""Why calls went where they went: the last decisions of each process, in memory that all share.

Each process writes a ring of records of one size, without a lock; who reads takes all rings. What
is being written over while it is read is left out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.router import Terms

NUM_KEPT = 1_000
"""Decisions of a process, and of all that are read."""
NUM_KEYS = 1 << 15
"""Keys of prompts that a process keeps beside its decisions."""
KEYS_AT_RISK = 1 << 12
"""Of these so many of the oldest may be written over while they are read."""
_NOT_TOLD = math.nan


class Weighed(NamedTuple):
    """What was known of an engine when it was ranked.

    `engine` is the digest of its identity, 0 for none; the others are as in `Terms`, and NaN under
    a router that does not weigh seconds.
    """

    engine: int = 0
    cached_tokens: float = math.nan
    calls: float = math.nan
    queue_s: float = math.nan
    prefill_s: float = math.nan
    delays_s: float = math.nan
    evicted_s: float = math.nan
    decodes_s: float = math.nan
    slot_s: float = math.nan

    @classmethod
    def of(cls, engine: int, terms: Terms, place: int) -> Weighed:
        """The engine that stands at this place of what was ranked."""
        return cls(
            engine,
            terms.cached.item(place),
            terms.calls.item(place),
            terms.queue_s.item(place),
            terms.prefill_s.item(place),
            terms.delays_s.item(place),
            terms.evicted_s.item(place),
            terms.decodes_s.item(place),
            terms.slot_s.item(place),
        )


class Decision(NamedTuple):
    """Where a call went, and the best engine that it did not go to.

    `rank` is the chosen engine's place in the ranking of `num_engines`, 0 the best: those before it
    could not be had. The prompt's `num_keys` keys stand from `first_key` on in the ring of keys,
    which goes round. What the reply told is NaN where it has not or did not; so is `ended_at_s`
    while the call runs.
    """

    at_s: float
    rank: int
    num_engines: int
    prompt_tokens: float
    piece_tokens: float
    chosen: Weighed
    runner_up: Weighed
    num_keys: int = 0
    first_key: int = 0
    told_prompt_tokens: float = _NOT_TOLD
    told_cached_tokens: float = _NOT_TOLD
    told_output_tokens: float = _NOT_TOLD
    ended_at_s: float = _NOT_TOLD


_BODY = struct.Struct("=dqqddQddddddddQddddddddqqdddd")
_NUMBER = struct.Struct("=Q")
_TOLD = struct.Struct("=dddd")
_BODY_AT = _NUMBER.size
_TOLD_AT = _BODY_AT + _BODY.size - _TOLD.size
_END_AT = _BODY_AT + _BODY.size
RECORD_BYTES = _END_AT + _NUMBER.size
RING_BYTES = RECORD_BYTES * NUM_KEPT
_SIDE = np.dtype([(name, "=u8" if name == "engine" else "=f8") for name in Weighed._fields])
_KINDS = {
    **dict.fromkeys(("rank", "num_engines", "num_keys", "first_key"), "=i8"),
    "chosen": _SIDE,
    "runner_up": _SIDE,
}
_RECORD = np.dtype([
    ("number", "=u8"),
    *((name, _KINDS.get(name, "=f8")) for name in Decision._fields),
    ("end", "=u8"),
])
"""What `_BODY` writes between the two numbers."""

Records = npt.NDArray[np.void]
"""Decisions as they were read: the fields of `Decision`."""


class DecisionRing:
    """The ring of this process, in `RING_BYTES` of memory, with one of `NUM_KEYS` keys; goes on
    behind what stands there, of which nothing runs any more.

    A record's number stands at both its ends: written first at the last, and last at the first.
    """

    def __init__(self, memory: memoryview, keys: KeyArray) -> None:
        self._memory = memory
        self._keys = keys
        records = np.frombuffer(memory, _RECORD)
        self._next_key = int((records["first_key"] + records["num_keys"]).max())
        is_lost = np.isnan(records["ended_at_s"])
        records["ended_at_s"][is_lost] = records["at_s"][is_lost]
        records["told_output_tokens"][is_lost] = 0.0
        starts = range(0, RING_BYTES, RECORD_BYTES)
        self._number: int = max(_NUMBER.unpack_from(memory, start)[0] for start in starts)

    def note(self, decision: Decision, keys: KeyArray) -> int:
        """Keep a decision and the keys of its prompt; returns its number, for `told`."""
        at_s, rank, num, prompt, piece, chosen, runner_up, *_ = decision
        first_key = self._keep(keys)
        number = self._number = self._number + 1
        memory, start = self._memory, (number % NUM_KEPT) * RECORD_BYTES
        _NUMBER.pack_into(memory, start + _END_AT, number)
        _BODY.pack_into(
            memory,
            start + _BODY_AT,
            *(at_s, rank, num, prompt, piece),
            *chosen,
            *runner_up,
            *(len(keys), first_key),
            *(_NOT_TOLD,) * 4,
        )
        _NUMBER.pack_into(memory, start, number)
        return number

    def ended(
        self,
        number: int,
        prompt_tokens: float,
        cached_tokens: float,
        output_tokens: float,
        at_s: float,
    ) -> None:
        """What the call's reply told, NaN for nothing; a decision that has left the ring is passed
        over."""
        start = (number % NUM_KEPT) * RECORD_BYTES
        if _NUMBER.unpack_from(self._memory, start)[0] == number:
            told = (prompt_tokens, cached_tokens, output_tokens, at_s)
            _TOLD.pack_into(self._memory, start + _TOLD_AT, *told)

    def _keep(self, keys: KeyArray) -> int:
        """Where they stand: in one piece."""
        first, num = self._next_key, len(keys)
        if first % NUM_KEYS + num > NUM_KEYS:
            first += NUM_KEYS - first % NUM_KEYS
        self._keys[first % NUM_KEYS : first % NUM_KEYS + num] = keys
        self._next_key = first + num
        return first


def read_decisions(rings: npt.NDArray[np.uint8]) -> Records:
    """The last `NUM_KEPT` decisions of all rings, a row of bytes each, the newest first."""
    records = rings.copy().view(_RECORD).reshape(-1)
    whole = records[(records["number"] > 0) & (records["number"] == records["end"])]
    found: Records = whole[np.argsort(-whole["at_s"], kind="stable")[:NUM_KEPT]]
    return found


class EndedCall(NamedTuple):
    """A call as the gateway saw it; where a reply told nothing, tokens are by its bytes and pieces.

    `keys` are those of its prompt's pieces, of `piece_tokens` tokens each.
    """

    worker: int
    number: int
    age_s: float
    ended_at_s: float
    prompt_tokens: int
    output_tokens: int
    piece_tokens: float
    keys: list[int]


class EndedCalls(NamedTuple):
    """Calls that have ended, how many were decided since the gateway's start, how many run, and for
    how long the oldest of these has, None where none runs."""

    calls: list[EndedCall]
    num_decided: int
    num_running: int
    oldest_running_s: float | None


def ended_calls(
    rings: npt.NDArray[np.uint8], keys: npt.NDArray[np.uint64], since_s: float, now_s: float
) -> EndedCalls:
    """The calls of all rings that ended after this. Those whose keys have been written over are
    left out."""
    found: list[EndedCall] = []
    records = rings.copy().view(_RECORD)
    kept = keys.copy()
    is_whole = (records["number"] > 0) & (records["number"] == records["end"])
    running = records["at_s"][is_whole & np.isnan(records["ended_at_s"])]
    for worker, its in enumerate(records):
        oldest_key = (its["first_key"] + its["num_keys"]).max() - NUM_KEYS + KEYS_AT_RISK
        is_new = is_whole[worker] & (its["ended_at_s"] > since_s) & (its["first_key"] >= oldest_key)
        found += [_ended(worker, record, kept[worker], now_s) for record in its[is_new]]
    oldest_s = float(now_s - running.min()) if len(running) else None
    return EndedCalls(found, int(records["number"].max(axis=1).sum()), len(running), oldest_s)


def _ended(worker: int, record: np.void, keys: KeyArray, now_s: float) -> EndedCall:
    told, first = float(record["told_prompt_tokens"]), int(record["first_key"]) % NUM_KEYS
    return EndedCall(
        worker,
        int(record["number"]),
        now_s - float(record["at_s"]),
        float(record["ended_at_s"]),
        int(record["prompt_tokens"] if math.isnan(told) else told),
        int(record["told_output_tokens"]),
        float(record["piece_tokens"]),
        keys[first : first + int(record["num_keys"])].tolist(),
    )


@dataclass(slots=True)
class EngineRouting:
    """Of the last decisions those for one engine, and what replies told of cached tokens.

    `hit_rate` is their share of the prompts; `agreement` the share of calls whose cached tokens
    were foretold to within a piece. None: nobody told.
    """

    engine: str
    num_calls: int = 0
    num_pieces: int = 0
    hit_rate: float | None = None
    agreement: float | None = None


def figures_of(
    records: Records, names: Mapping[int, str], num_pieces: Mapping[int, int]
) -> list[EngineRouting]:
    """By engine of `names` (by digest), of which each is taken to hold so many pieces."""
    return [
        _figures_of(records[records["chosen"]["engine"] == digest], name, num_pieces[digest])
        for digest, name in names.items()
    ]


def _figures_of(its: Records, name: str, num_pieces: int) -> EngineRouting:
    told = its[~np.isnan(its["told_cached_tokens"])]
    found = EngineRouting(name, len(its), num_pieces)
    if len(told):
        cached = told["told_cached_tokens"]
        scaled = cached * told["prompt_tokens"] / told["told_prompt_tokens"]
        off = np.abs(scaled - told["chosen"]["cached_tokens"])
        found.hit_rate = float(cached.sum() / told["told_prompt_tokens"].sum())
        found.agreement = float((off <= told["piece_tokens"]).mean())
    return found


def imbalance_of(figures: Sequence[EngineRouting]) -> float | None:
    """Calls of the busiest engine over the mean; None without calls."""
    counts = [each.num_calls for each in figures]
    return max(counts) * len(counts) / sum(counts) if any(counts) else None


def document_of(
    router: str,
    figures: Sequence[EngineRouting],
    records: Records,
    names: Mapping[int, str],
    now_s: float,
) -> dict[str, object]:
    """What `batchrun engine explain` and the page show, as a JSON object."""
    return {
        "router": router,
        "imbalance": imbalance_of(figures),
        "engines": [asdict(each) for each in figures],
        "decisions": [_shown(each, names, now_s) for each in records],
    }


def _shown(record: np.void, names: Mapping[int, str], now_s: float) -> dict[str, object]:
    chosen, runner_up = Weighed(*record["chosen"].item()), Weighed(*record["runner_up"].item())
    return {
        "age_s": max(0.0, now_s - float(record["at_s"])),
        "rank": int(record["rank"]),
        "num_engines": int(record["num_engines"]),
        "prompt_tokens": float(record["prompt_tokens"]),
        "told_prompt_tokens": _known(float(record["told_prompt_tokens"])),
        "told_cached_tokens": _known(float(record["told_cached_tokens"])),
        "chosen": _side(chosen, names),
        "runner_up": _side(runner_up, names) if runner_up.engine else None,
    }


def _side(weighed: Weighed, names: Mapping[int, str]) -> dict[str, object]:
    """Of `prefill_s` the call's own; `delays_s` is what that costs those who wait for it."""
    seconds = {
        "queue_s": weighed.queue_s,
        "prefill_s": weighed.prefill_s,
        "delays_s": weighed.delays_s,
        "evicted_s": weighed.evicted_s,
        "decodes_s": weighed.decodes_s,
        "slot_s": weighed.slot_s,
    }
    return {
        "engine": names.get(weighed.engine),
        "cached_tokens": _known(weighed.cached_tokens),
        "calls": _known(weighed.calls),
        "price_s": _known(sum(seconds.values())),
        **{name: _known(value) for name, value in seconds.items()},
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
