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

from batchrun.routing.router import Terms

NUM_KEPT = 1_000
"""Decisions of a process, and of all that are read."""
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
            terms.decodes_s.item(place),
            terms.slot_s.item(place),
        )


class Decision(NamedTuple):
    """Where a call went, and the best engine that it did not go to.

    `rank` is the chosen engine's place in the ranking of `num_engines`, 0 the best: those before it
    could not be had. `told_prompt_tokens` and `told_cached_tokens` are what the reply told, NaN
    where it has not or did not.
    """

    at_s: float
    rank: int
    num_engines: int
    prompt_tokens: float
    piece_tokens: float
    delayed: float
    chosen: Weighed
    runner_up: Weighed
    told_prompt_tokens: float = _NOT_TOLD
    told_cached_tokens: float = _NOT_TOLD


_BODY = struct.Struct("=dqqdddQddddddQdddddddd")
_NUMBER = struct.Struct("=Q")
_TOLD = struct.Struct("=dd")
_BODY_AT = _NUMBER.size
_TOLD_AT = _BODY_AT + _BODY.size - _TOLD.size
_END_AT = _BODY_AT + _BODY.size
RECORD_BYTES = _END_AT + _NUMBER.size
RING_BYTES = RECORD_BYTES * NUM_KEPT
_SIDE = np.dtype([(name, "=u8" if name == "engine" else "=f8") for name in Weighed._fields])
_KINDS = {"rank": "=i8", "num_engines": "=i8", "chosen": _SIDE, "runner_up": _SIDE}
_RECORD = np.dtype([
    ("number", "=u8"),
    *((name, _KINDS.get(name, "=f8")) for name in Decision._fields),
    ("end", "=u8"),
])
"""What `_BODY` writes between the two numbers."""

Records = npt.NDArray[np.void]
"""Decisions as they were read: the fields of `Decision`."""


class DecisionRing:
    """The ring of this process, in `RING_BYTES` of memory; goes on behind what stands there.

    A record's number stands at both its ends: written first at the last, and last at the first.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        starts = range(0, RING_BYTES, RECORD_BYTES)
        self._number: int = max(_NUMBER.unpack_from(memory, start)[0] for start in starts)

    def note(self, decision: Decision) -> int:
        """Keep a decision; returns its number, for `told`."""
        at_s, rank, num, prompt, piece, delayed, chosen, runner_up, *told = decision
        number = self._number = self._number + 1
        memory, start = self._memory, (number % NUM_KEPT) * RECORD_BYTES
        _NUMBER.pack_into(memory, start + _END_AT, number)
        _BODY.pack_into(
            memory,
            start + _BODY_AT,
            *(at_s, rank, num, prompt, piece, delayed),
            *chosen,
            *runner_up,
            *told,
        )
        _NUMBER.pack_into(memory, start, number)
        return number

    def told(self, number: int, prompt_tokens: int, cached_tokens: int) -> None:
        """What the call's reply told; a decision that has left the ring is passed over."""
        start = (number % NUM_KEPT) * RECORD_BYTES
        if _NUMBER.unpack_from(self._memory, start)[0] == number:
            _TOLD.pack_into(self._memory, start + _TOLD_AT, prompt_tokens, cached_tokens)


def read_decisions(rings: npt.NDArray[np.uint8]) -> Records:
    """The last `NUM_KEPT` decisions of all rings, a row of bytes each, the newest first."""
    records = rings.copy().view(_RECORD).reshape(-1)
    whole = records[(records["number"] > 0) & (records["number"] == records["end"])]
    found: Records = whole[np.argsort(-whole["at_s"], kind="stable")[:NUM_KEPT]]
    return found


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
        off = np.abs(cached - told["chosen"]["cached_tokens"])
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
    delayed = float(record["delayed"])
    return {
        "age_s": max(0.0, now_s - float(record["at_s"])),
        "rank": int(record["rank"]),
        "num_engines": int(record["num_engines"]),
        "prompt_tokens": float(record["prompt_tokens"]),
        "told_prompt_tokens": _known(float(record["told_prompt_tokens"])),
        "told_cached_tokens": _known(float(record["told_cached_tokens"])),
        "chosen": _side(chosen, delayed, names),
        "runner_up": _side(runner_up, delayed, names) if runner_up.engine else None,
    }


def _side(weighed: Weighed, delayed: float, names: Mapping[int, str]) -> dict[str, object]:
    """Of `prefill_s` the call's own; `delays_s` is what that costs those who wait for it."""
    delays_s = weighed.prefill_s * (delayed - 1)
    seconds = {
        "queue_s": weighed.queue_s,
        "prefill_s": weighed.prefill_s,
        "delays_s": delays_s,
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
