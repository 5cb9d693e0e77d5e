"""`Trace`: when online calls arrived, and how long their prompts and answers were.

Traces are scaled in time, in rate with the bursts kept, and in length; a peak or windows that stand
for the whole are cut out of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchrun.errors import DataError, InputError

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


JITTER_S = 0.5
"""A copy of a call arrives up to so long before or after it."""
COMMON_SHARE = 0.1
"""A prefix block that this share of all calls have is common to all callers: a system prompt."""


def scale_time(trace: Trace, factor: float) -> Trace:
    """The same calls over `factor` times the time: 2 lasts twice as long, at half the rate.

    So Echo scales its trace (section 7.1). Raises InputError unless `factor` is above 0.
    """
    _check("time", factor)
    arrival_s = trace.arrival_s * factor
    duration_s = beyond(trace.duration_s * factor, arrival_s)
    return replace(trace, arrival_s=arrival_s, duration_s=duration_s)


def scale_rate(trace: Trace, factor: float, *, seed: int) -> Trace:
    """`factor` times the calls in the same time. Raises InputError unless it is above 0.

    Below 1 each call stays with that chance. Above 1 each call comes floor(factor) times, and once
    more with the chance of the rest; copies arrive within `JITTER_S` of the call. So the rate's
    course is multiplied at every scale above a second: bursts and the tide keep their place, their
    length and their height over the mean. Thinned, counts get the noise of fewer independent
    callers; copied, their coefficient of variation stays. The copies are other callers: only the
    `COMMON_SHARE` blocks are shared with them.
    """
    _check("rate", factor)
    rng = np.random.default_rng(seed)
    parts = [_copy(trace, number, rng) for number in range(1, math.floor(factor))]
    if factor >= 1:
        parts.insert(0, trace)
    rest = factor - math.floor(factor)
    if rest:
        kept = trace.take(np.flatnonzero(rng.random(len(trace)) < rest))
        parts.append(_copy(kept, len(parts), rng, whole=trace) if parts else kept)
    return superpose(parts) if len(parts) > 1 else parts[0]


def superpose(traces: Sequence[Trace]) -> Trace:
    """All calls on one clock; it lasts as long as the longest.

    Prefix blocks stay where all traces have them, of one size; equal hashes are then equal blocks.
    """
    times_s = np.concatenate([trace.arrival_s for trace in traces])
    order = np.argsort(times_s, kind="stable")
    return Trace(
        times_s[order],
        np.concatenate([trace.num_prompt_tokens for trace in traces])[order],
        np.concatenate([trace.num_output_tokens for trace in traces])[order],
        max(trace.duration_s for trace in traces),
        _joined([trace.prefix for trace in traces], order),
        ", ".join(dict.fromkeys(trace.source for trace in traces if trace.source)),
    )


def scale_lengths(trace: Trace, factor: float) -> Trace:
    """Both lengths of each call times `factor`, at least 1; what prompts share is not kept."""
    _check("lengths", factor)

    def scaled(lengths: Ints) -> Ints:
        tokens: Ints = np.clip(np.rint(lengths * factor), 1, 2**62).astype(np.int64, copy=False)
        return tokens

    return replace(
        trace,
        num_prompt_tokens=scaled(trace.num_prompt_tokens),
        num_output_tokens=scaled(trace.num_output_tokens),
        prefix=None,
    )


def _check(what: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise InputError(f"the factor of the {what} must be above 0, not {factor:g}")


def _copy(
    calls: Trace, number: int, rng: np.random.Generator, *, whole: Trace | None = None
) -> Trace:
    """The calls again, a little earlier or later, of other callers."""
    whole = whole or calls
    moved_s = calls.arrival_s + rng.uniform(-JITTER_S, JITTER_S, len(calls))
    times_s = _reflected(moved_s, calls.duration_s)
    order = np.argsort(times_s, kind="stable")
    prefix = None
    if calls.prefix is not None and whole.prefix is not None:
        prefix = _of_others(calls.prefix, whole.prefix, number).take(order)
    return replace(
        calls,
        arrival_s=times_s[order],
        num_prompt_tokens=calls.num_prompt_tokens[order],
        num_output_tokens=calls.num_output_tokens[order],
        prefix=prefix,
    )


def _reflected(times_s: Floats, duration_s: float) -> Floats:
    """Within [0, duration): what is outside comes back by as much."""
    last_s = math.nextafter(duration_s, 0)
    inside: Floats = np.abs(times_s)
    return np.clip(np.where(inside > last_s, 2 * last_s - inside, inside), 0, last_s)


def _of_others(prefix: PrefixBlocks, whole: PrefixBlocks, number: int) -> PrefixBlocks:
    """The blocks renumbered, but for those that are common in the whole trace."""
    known, counts = np.unique(whole.hashes, return_counts=True)
    own = known[counts < COMMON_SHARE * len(whole)]
    top = int(known[-1]) + 1 if len(known) else 0
    # Numbers above those of the trace, a stretch for each copy.
    is_own = np.isin(prefix.hashes, own)
    places = np.searchsorted(known, prefix.hashes)
    hashes = np.where(is_own, top + (number - 1) * len(known) + places, prefix.hashes)
    return replace(prefix, hashes=hashes)


def _joined(prefixes: Sequence[PrefixBlocks | None], order: Ints) -> PrefixBlocks | None:
    given = [prefix for prefix in prefixes if prefix is not None]
    if len(given) < len(prefixes) or len({prefix.block_tokens for prefix in given}) != 1:
        return None
    counts = np.concatenate([np.diff(prefix.offsets) for prefix in given])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    hashes = np.concatenate([prefix.hashes for prefix in given])
    return PrefixBlocks(hashes, offsets, given[0].block_tokens).take(order)


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """Seconds [start_s, end_s) of a trace; it stands for `weight_s` seconds of it."""

    start_s: float
    end_s: float
    weight_s: float

    def of(self, trace: Trace) -> Trace:
        """Its calls, timed from its start."""
        return trace.between(self.start_s, self.end_s)


def find_peak(trace: Trace, window_s: float) -> TraceWindow:
    """The window of `window_s` with the most tokens, the earliest of equals; it stands for itself.

    It lies within the trace where that is long enough. O(n log n): a heaviest window can begin at
    an arrival. Raises InputError without a call or a length.
    """
    if not window_s > 0 or not len(trace):
        raise InputError(f"no peak of {window_s:g} s in {len(trace)} calls")
    times_s = trace.arrival_s
    sums = np.concatenate([[0.0], np.cumsum(trace.num_tokens, dtype=np.float64)])
    after = np.searchsorted(times_s, times_s + window_s, side="left")
    heaviest = int(np.argmax(sums[after] - sums[:-1]))
    start_s = min(float(times_s[heaviest]), max(0.0, trace.duration_s - window_s))
    return TraceWindow(start_s, start_s + window_s, window_s)


def stratified_windows(trace: Trace, num: int, window_s: float) -> Sequence[TraceWindow]:
    """`num` windows of `window_s`, one in the middle of each of `num` equal parts, its weight.

    Parts shorter than a window are whole windows. Sums over the trace are estimated by the windows'
    sums, each times `weight_s` over its length. Raises InputError.
    """
    if num < 1 or not window_s > 0 or not trace.duration_s:
        raise InputError(f"no {num} windows of {window_s:g} s in {trace.duration_s:g} s")
    part_s = trace.duration_s / num
    length_s = min(window_s, part_s)
    starts_s = [i * part_s + 0.5 * (part_s - length_s) for i in range(num)]
    return [TraceWindow(start_s, start_s + length_s, part_s) for start_s in starts_s]
