"""`Trace`: when online calls arrived, and how long their prompts and answers were.

Traces are summed up in figures, scaled in time, in rate with the bursts kept, and in length, and
drawn again; a peak or windows that stand for the whole are cut out of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

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
        places = _places(self.offsets[chosen], counts)
        return PrefixBlocks(self.hashes[places], offsets, self.block_tokens)


def _places(first: Ints, counts: Ints) -> Ints:
    """`counts` places in a row from each of `first` on, one row after the other."""
    ends = np.cumsum(counts)
    places: Ints = np.arange(counts.sum()) + np.repeat(first - ends + counts, counts)
    return places


MAX_DAYS = 1_000
"""More than a trace lasts in which no time is mistaken."""


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
    if trace.duration_s > MAX_DAYS * 86_400:
        gaps_s = np.diff(times_s, prepend=0.0, append=trace.duration_s)
        return (
            f"it lasts {trace.duration_s / 86_400:,.6g} days, more than {MAX_DAYS:,}; by time, the "
            f"longest gap is after request {int(np.argmax(gaps_s))}: correct the time that is wrong"
        )
    if num and not (times_s[0] >= 0 and times_s[-1] < trace.duration_s):
        return "arrivals must lie in [0, duration)"
    checks = [
        (~(np.diff(times_s, prepend=0.0) >= 0), "arrives before the one above it"),
        (trace.num_prompt_tokens < 1, "has no prompt token"),
        (trace.num_output_tokens < 1, "has no output token"),
    ]
    if prefix is not None:
        if len(prefix) != num or prefix.block_tokens < 1:
            return "as many lists of prefix blocks as arrivals are needed, and a block size"
        full = -(-trace.num_prompt_tokens // prefix.block_tokens)
        is_over = np.diff(prefix.offsets) > full
        checks.append((is_over, "has more prefix blocks than its prompt has room for"))
    for is_wrong, what in checks:
        if is_wrong.any():
            return f"request {int(np.argmax(is_wrong)) + 1} {what}"
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

    Each call comes floor(factor) times, and once more with the chance of the rest. Copies arrive
    within `JITTER_S` of the call, so bursts and the tide keep their place, their length and their
    height over the mean. They are other callers: only the `COMMON_SHARE` blocks are shared.
    """
    _check("rate", factor)
    rng, num, num_whole = np.random.default_rng(seed), len(trace), math.floor(factor)
    places = [np.arange(num)] * num_whole
    times_s = [trace.arrival_s] * min(num_whole, 1)
    times_s += [_jittered(trace.arrival_s, trace.duration_s, rng) for _ in places[1:]]
    if rest := factor - num_whole:
        kept = np.flatnonzero(rng.random(num) < rest)
        kept_s = trace.arrival_s[kept]
        times_s.append(_jittered(kept_s, trace.duration_s, rng) if places else kept_s)
        places.append(kept)
    order = np.argsort(np.concatenate(times_s), kind="stable")
    chosen = np.concatenate(places)[order]
    return replace(
        trace,
        arrival_s=np.concatenate(times_s)[order],
        num_prompt_tokens=trace.num_prompt_tokens[chosen],
        num_output_tokens=trace.num_output_tokens[chosen],
        prefix=None if trace.prefix is None else _copied(trace.prefix, places).take(order),
    )


STRETCH_S = 30.0
"""So long a stretch of a trace is drawn again as it was: longer than a burst."""
TIDE_S = 600.0
"""It comes from up to so much earlier or later, where the tide is about the same."""


def redrawn(trace: Trace, seed: int) -> Trace:
    """Another draw of the same traffic: a moving block bootstrap (Kunsch, 1989) within the tide.

    Each stretch of `STRETCH_S` is one from within `TIDE_S` of it, gaps, lengths and prefixes of
    its calls as they were. So the rate's course, the bursts and the pairs of lengths stay, and
    which bursts meet is new. A call that comes twice is another caller's the second time.
    """
    rng, length_s = np.random.default_rng(seed), min(STRETCH_S, trace.duration_s)
    if not length_s:
        return trace
    to_s = np.arange(-rng.uniform(0, length_s), trace.duration_s, length_s)
    nearby_s = np.clip([to_s - TIDE_S, to_s + TIDE_S], 0, trace.duration_s - length_s)
    from_s = rng.uniform(*nearby_s)
    first, after = np.searchsorted(trace.arrival_s, [from_s, from_s + length_s])
    chosen = _places(first, after - first)
    at_s = trace.arrival_s[chosen] + np.repeat(to_s - from_s, after - first)
    inside = (at_s >= 0) & (at_s < trace.duration_s)
    chosen, at_s = chosen[inside], at_s[inside]
    order = np.argsort(at_s, kind="stable")
    chosen = chosen[order]
    return replace(
        trace,
        arrival_s=at_s[order],
        num_prompt_tokens=trace.num_prompt_tokens[chosen],
        num_output_tokens=trace.num_output_tokens[chosen],
        prefix=None if trace.prefix is None else _drawn_blocks(trace.prefix, chosen),
    )


def _drawn_blocks(prefix: PrefixBlocks, chosen: Ints) -> PrefixBlocks:
    """The blocks of the calls `chosen`, some more than once: each time by another caller."""
    by_call = np.argsort(chosen, kind="stable")
    num_before = np.empty_like(chosen)
    num_before[by_call] = np.arange(len(chosen)) - np.searchsorted(chosen[by_call], chosen[by_call])
    by_caller = np.argsort(num_before, kind="stable")
    places = np.split(chosen[by_caller], np.cumsum(np.bincount(num_before))[:-1])
    return _copied(prefix, places).take(np.argsort(by_caller))


def _check(what: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise InputError(f"the factor of the {what} must be above 0, not {factor:g}")


def _jittered(times_s: Floats, duration_s: float, rng: np.random.Generator) -> Floats:
    """A little earlier or later; what is then outside [0, duration) comes back by as much."""
    last_s = math.nextafter(duration_s, 0)
    inside: Floats = np.abs(times_s + rng.uniform(-JITTER_S, JITTER_S, len(times_s)))
    return np.clip(np.where(inside > last_s, 2 * last_s - inside, inside), 0, last_s)


def _copied(prefix: PrefixBlocks, places: Sequence[Ints]) -> PrefixBlocks:
    """The blocks of the calls at `places`, one array after the other.

    All but the first are of other callers: their blocks are renumbered, a stretch above the trace's
    own numbers for each copy, but for those that are common in the whole trace.
    """
    known, counts = np.unique(prefix.hashes, return_counts=True)
    own = known[counts < COMMON_SHARE * len(prefix)]
    top = int(known[-1]) + 1 if len(known) else 0
    copies = prefix.take(np.concatenate(places))
    numbers = np.repeat(np.arange(len(places)), [len(each) for each in places])
    numbers = np.repeat(numbers, np.diff(copies.offsets))
    renumbered = top + (numbers - 1) * len(known) + np.searchsorted(known, copies.hashes)
    is_other = (numbers > 0) & np.isin(copies.hashes, own)
    return replace(copies, hashes=np.where(is_other, renumbered, copies.hashes))


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


def cached_tokens(trace: Trace) -> Ints:
    """Prompt tokens of each call that a cache without bound would find: leading blocks seen before.

    0 where the trace tells nothing of prefixes.
    """
    found = np.zeros(len(trace), np.int64)
    if trace.prefix is None:
        return found
    seen: set[int] = set()
    for index in range(len(trace)):
        blocks = trace.prefix.of_request(index).tolist()
        found[index] = sum(1 for _ in takewhile(seen.__contains__, blocks))
        seen.update(blocks)
    return np.minimum(found * trace.prefix.block_tokens, trace.num_prompt_tokens)


def prefix_hit_rate(trace: Trace) -> float:
    """The share of prompt tokens that a cache without bound would find."""
    return int(cached_tokens(trace).sum()) / int(trace.num_prompt_tokens.sum())


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution: mean, median, 95th and 99th percentile, largest."""

    mean: float
    p50: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Floats | Ints) -> Quantiles:
        """Of one value or more."""
        return cls(float(values.mean()), *np.quantile(values, (0.5, 0.95, 0.99, 1.0)).tolist())


@dataclass(frozen=True, slots=True)
class Peak:
    """The heaviest window by tokens, and its rates over the trace's means."""

    window: TraceWindow
    rate_per_s: float
    tokens_per_s: float
    rate_over_mean: float
    tokens_over_mean: float


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """`gap_s` and `gap_cv` are of the times between arrivals, None with fewer than two.

    `gap_cv` is the coefficient of variation: 1 for Poisson arrivals, more where they are bursty.
    `prefix_hit_rate` is None where the trace tells nothing of prefixes.
    """

    source: str
    num_requests: int
    duration_s: float
    rate_per_s: float
    prompt_tokens: Quantiles
    output_tokens: Quantiles
    gap_s: Quantiles | None
    gap_cv: float | None
    peak: Peak
    prefix_hit_rate: float | None


def summarize_trace(trace: Trace, *, peak_s: float = 300.0) -> TraceSummary:
    """Figures of a trace with one call or more; its peak is over `peak_s`, or all it lasts."""
    gaps_s = np.diff(trace.arrival_s)
    mean_s = float(gaps_s.mean()) if len(gaps_s) else 0.0
    window_s = min(peak_s, trace.duration_s)
    window = find_peak(trace, window_s)
    part = window.of(trace)
    rate_per_s, tokens_per_s = len(part) / window_s, float(part.num_tokens.sum()) / window_s
    mean_tokens_per_s = float(trace.num_tokens.sum()) / trace.duration_s
    rates_over_mean = rate_per_s / trace.rate_per_s, tokens_per_s / mean_tokens_per_s
    return TraceSummary(
        source=trace.source,
        num_requests=len(trace),
        duration_s=trace.duration_s,
        rate_per_s=trace.rate_per_s,
        prompt_tokens=Quantiles.of(trace.num_prompt_tokens),
        output_tokens=Quantiles.of(trace.num_output_tokens),
        gap_s=Quantiles.of(gaps_s) if len(gaps_s) else None,
        gap_cv=float(gaps_s.std()) / mean_s if mean_s else None,
        peak=Peak(window, rate_per_s, tokens_per_s, *rates_over_mean),
        prefix_hit_rate=None if trace.prefix is None else prefix_hit_rate(trace),
    )
