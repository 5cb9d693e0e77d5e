"""What a trace is like, in figures.

How much of a trace an engine can serve: the rate is scaled until online calls alone are in time.

Echo scales the arrivals of its trace before the runs "so that it will not violate the SLO in a
workload only including online tasks" (sections 7.1 and 7.2); how it searches is not told. We
bisect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from batchrun.errors import InputError
from batchrun.simulator.traces.trace import Floats, Ints, Load, Trace, Window, find_peak, scale_rate

PEAK_S = 300.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution: mean, median, 95th and 99th percentile, largest."""

    mean: float
    p50: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Floats | Ints) -> Spread:
        """Of one value or more."""
        p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99))
        return cls(float(np.mean(values)), float(p50), float(p95), float(p99), float(values.max()))


@dataclass(frozen=True, slots=True)
class Peak:
    """The heaviest window by tokens, and its rates over the trace's means."""

    window: Window
    rate_per_s: float
    tokens_per_s: float
    rate_over_mean: float
    tokens_over_mean: float


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """`gap_s` and `gap_cv` are of the times between arrivals, None with fewer than two.

    `gap_cv` is the coefficient of variation: 1 for Poisson arrivals, more where they are bursty.
    `prefix_hit_rate` is the share of prompt tokens in blocks that an earlier call had, None where
    the trace tells nothing of prefixes.
    """

    source: str
    num_requests: int
    duration_s: float
    rate_per_s: float
    prompt_tokens: Spread
    output_tokens: Spread
    gap_s: Spread | None
    gap_cv: float | None
    peak: Peak
    prefix_hit_rate: float | None


def summarize_trace(trace: Trace, *, peak_s: float = PEAK_S) -> TraceSummary:
    """Figures of a trace with one call or more; its peak is over `peak_s`, or all it lasts."""
    gaps_s = np.diff(trace.arrival_s)
    mean_s = float(gaps_s.mean()) if len(gaps_s) else 0.0
    return TraceSummary(
        source=trace.source,
        num_requests=len(trace),
        duration_s=trace.duration_s,
        rate_per_s=trace.rate_per_s,
        prompt_tokens=Spread.of(trace.num_prompt_tokens),
        output_tokens=Spread.of(trace.num_output_tokens),
        gap_s=Spread.of(gaps_s) if len(gaps_s) else None,
        gap_cv=float(gaps_s.std()) / mean_s if mean_s else None,
        peak=_peak(trace, min(peak_s, trace.duration_s)),
        prefix_hit_rate=None if trace.prefix is None else prefix_hit_rate(trace),
    )


def _peak(trace: Trace, window_s: float) -> Peak:
    window = find_peak(trace, window_s, Load.TOKENS)
    part = window.of(trace)
    tokens_per_s = float(part.num_tokens.sum()) / window_s
    mean_tokens_per_s = float(trace.num_tokens.sum()) / trace.duration_s
    rate_per_s = len(part) / window_s
    return Peak(
        window,
        rate_per_s,
        tokens_per_s,
        rate_per_s / trace.rate_per_s,
        tokens_per_s / mean_tokens_per_s,
    )


def prefix_hit_rate(trace: Trace) -> float:
    """Share of prompt tokens that a cache without bound would find: leading blocks seen before."""
    assert trace.prefix is not None
    seen: set[int] = set()
    num_hit_tokens = 0
    for index, num_tokens in enumerate(trace.num_prompt_tokens.tolist()):
        hashes = trace.prefix.of_request(index).tolist()
        num_hits = _leading(hashes, seen)
        num_hit_tokens += min(num_hits * trace.prefix.block_tokens, num_tokens)
        seen.update(hashes[num_hits:])
    return num_hit_tokens / int(trace.num_prompt_tokens.sum())


def _leading(hashes: Iterable[int], seen: set[int]) -> int:
    num = 0
    for block in hashes:
        if block not in seen:
            return num
        num += 1
    return num


@dataclass(frozen=True, slots=True)
class RateSearch:
    """Factors from `least` to `most` are tried, until known to `precision` (a share of it)."""

    least: float = 1 / 64
    most: float = 64.0
    precision: float = 0.02


@dataclass(frozen=True, slots=True)
class Fitted:
    """The largest factor that was seen to hold, its trace, and the smallest seen to fail.

    `too_much` is None when even the largest factor tried held.
    """

    factor: float
    trace: Trace
    too_much: float | None
    num_tries: int


def fit_rate(
    trace: Trace,
    meets_slo: Callable[[Trace], bool],
    *,
    seed: int,
    search: RateSearch = RateSearch(),
) -> Fitted:
    """The largest rate factor at which `meets_slo` holds, by bisection on a logarithmic scale.

    Begins at 1 and doubles or halves until the border is between two factors. A larger factor's
    calls contain those of a smaller one of the same seed only below 1, so near the border the
    answer may depend on the seed. Raises InputError when even `search.least` fails.
    """
    holds: float | None = None
    fails: float | None = None
    fitted, factor, num_tries = trace, min(max(1.0, search.least), search.most), 0
    while True:
        candidate = scale_rate(trace, factor, seed=seed)
        num_tries += 1
        if meets_slo(candidate):
            holds, fitted = factor, candidate
        else:
            fails = factor
        if holds is None and factor <= search.least:
            raise InputError(
                f"{trace.source or 'trace'}: the promises are broken even at {search.least:g} "
                "times its rate"
            )
        if holds is not None and (holds >= search.most or _is_close(holds, fails, search)):
            return Fitted(holds, fitted, fails, num_tries)
        factor = _next(holds, fails, search)


def _is_close(holds: float, fails: float | None, search: RateSearch) -> bool:
    return fails is not None and fails <= holds * (1 + search.precision)


def _next(holds: float | None, fails: float | None, search: RateSearch) -> float:
    if holds is None:
        return max(search.least, (fails or 1.0) / 2)
    if fails is None:
        return min(search.most, holds * 2)
    return math.sqrt(holds * fails)
