"""`Trace`: when online calls arrived, and how long their prompts and answers were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchrun.errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBlocks:
    """The prompts' leading blocks of `block_tokens` tokens, by hash: equal ones are shared KV.

    Request i has `hashes[offsets[i]:offsets[i + 1]]`, from its first block on.
    """

    hashes: Ints
    offsets: Ints
    block_tokens: int

    @classmethod
    def of(cls, by_request: Sequence[Sequence[int]], block_tokens: int) -> PrefixBlocks:
        """From a list of hashes for each request."""
        offsets = np.zeros(len(by_request) + 1, np.int64)
        np.cumsum([len(hashes) for hashes in by_request], out=offsets[1:])
        flat = [block for hashes in by_request for block in hashes]
        return cls(np.array(flat, np.int64), offsets, block_tokens)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of_request(self, index: int) -> Ints:
        """The hashes of one request."""
        return self.hashes[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: ArrayLike) -> PrefixBlocks:
        """Those of the requests at `indices`, in their order."""
        chosen = np.asarray(indices, np.int64)
        counts = np.diff(self.offsets)[chosen]
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], counts)
        return PrefixBlocks(self.hashes[places], offsets, self.block_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Online calls by arrival, in seconds from the trace's start.

    `arrival_s` rises (ties may be) within [0, `duration_s`); both token counts are 1 or more.
    `prefix` is None where the source tells nothing of shared prompts. The arrays are read only.
    `source` says where the trace comes from. Raises DataError when this does not hold.
    """

    arrival_s: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    duration_s: float
    prefix: PrefixBlocks | None = None
    source: str = ""

    def __post_init__(self) -> None:
        problem = _problem_of(self)
        if problem is not None:
            raise DataError(f"{self.source or 'trace'}: {problem}")
        for array in (self.arrival_s, self.num_prompt_tokens, self.num_output_tokens):
            array.flags.writeable = False

    @classmethod
    def of(
        cls,
        at_s: ArrayLike,
        num_prompt_tokens: ArrayLike,
        num_output_tokens: ArrayLike,
        *,
        prefix: PrefixBlocks | None = None,
        source: str = "",
    ) -> Trace:
        """From calls in any order and at any clock: sorted, the first arrives at 0.

        It lasts one mean gap longer than to its last arrival, so that calls / duration is its rate.
        """
        times_s = np.array(at_s, np.float64)
        if not np.isfinite(times_s).all():
            raise DataError(f"{source or 'trace'}: an arrival is no number")
        order = np.argsort(times_s, kind="stable")
        arrival_s = times_s[order]
        arrival_s -= arrival_s[0] if len(arrival_s) else 0.0
        return cls(
            arrival_s,
            np.asarray(num_prompt_tokens, np.int64)[order],
            np.asarray(num_output_tokens, np.int64)[order],
            _duration_s(arrival_s),
            None if prefix is None else prefix.take(order),
            source,
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def num_tokens(self) -> Ints:
        """Prompt and output tokens of each call."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second; 0 for a trace that lasts no time."""
        return len(self) / self.duration_s if self.duration_s else 0.0

    def take(self, indices: ArrayLike) -> Trace:
        """The calls at `indices`, which rise; the clock stays."""
        chosen = np.asarray(indices, np.int64)
        return replace(
            self,
            arrival_s=self.arrival_s[chosen],
            num_prompt_tokens=self.num_prompt_tokens[chosen],
            num_output_tokens=self.num_output_tokens[chosen],
            prefix=None if self.prefix is None else self.prefix.take(chosen),
        )

    def between(self, start_s: float, end_s: float) -> Trace:
        """The calls of [start_s, end_s), timed from `start_s`; it lasts `end_s - start_s`.

        Raises DataError when there is no time between the two or none of it is in the trace.
        """
        if not 0 <= start_s < end_s or start_s >= self.duration_s:
            name = self.source or "trace"
            raise DataError(
                f"{name}: no seconds {start_s:g} to {end_s:g} in it; it has 0 to "
                f"{self.duration_s:g}"
            )
        first, after = np.searchsorted(self.arrival_s, (start_s, end_s), side="left")
        part = self.take(np.arange(first, after))
        arrival_s = part.arrival_s - start_s
        return replace(part, arrival_s=arrival_s, duration_s=beyond(end_s - start_s, arrival_s))

    def shifted(self, later_s: float, duration_s: float) -> Trace:
        """All calls `later_s` later, in a trace that lasts `duration_s`."""
        arrival_s = self.arrival_s + later_s
        return replace(self, arrival_s=arrival_s, duration_s=beyond(duration_s, arrival_s))


def beyond(duration_s: float, arrival_s: Floats) -> float:
    """`duration_s`, or the next number after the last arrival where rounding has passed it."""
    return (
        max(duration_s, math.nextafter(arrival_s[-1], math.inf)) if len(arrival_s) else duration_s
    )


def _duration_s(arrival_s: Floats) -> float:
    if not len(arrival_s):
        return 0.0
    span_s = float(arrival_s[-1])
    return beyond(span_s + (span_s / (len(arrival_s) - 1) if span_s else 1.0), arrival_s)


def _problem_of(trace: Trace) -> str | None:
    """What is wrong with it, in a few words."""
    times_s, prefix = trace.arrival_s, trace.prefix
    num = len(times_s)
    if not len(trace.num_prompt_tokens) == len(trace.num_output_tokens) == num:
        return "as many prompt and output lengths as arrivals are needed"
    if not math.isfinite(trace.duration_s) or trace.duration_s < 0:
        return f"the duration is {trace.duration_s} s"
    if num and not (times_s[0] >= 0 and times_s[-1] < trace.duration_s):
        return "arrivals must lie in [0, duration)"
    for array, wrong, what in (
        (times_s[1:], ~(np.diff(times_s) >= 0), "arrives before the one above it"),
        (trace.num_prompt_tokens, trace.num_prompt_tokens < 1, "has no prompt token"),
        (trace.num_output_tokens, trace.num_output_tokens < 1, "has no output token"),
    ):
        if wrong.any():
            return f"request {int(np.argmax(wrong)) + 1 + num - len(array)} {what}"
    if prefix is not None and (len(prefix) != num or prefix.block_tokens < 1):
        return "as many lists of prefix blocks as arrivals are needed, and a block size"
    if prefix is not None:
        full = -(-trace.num_prompt_tokens // prefix.block_tokens)
        if (np.diff(prefix.offsets) > full).any():
            index = int(np.argmax(np.diff(prefix.offsets) > full))
            return f"request {index + 1} has more prefix blocks than its prompt has room for"
    return None
