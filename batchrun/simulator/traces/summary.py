"""What a trace is like, in figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from batchrun.simulator.traces.trace import Floats, Ints, Trace, TraceWindow, find_peak

PEAK_S = 300.0


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
        p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99))
        return cls(float(np.mean(values)), float(p50), float(p95), float(p99), float(values.max()))


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
    `prefix_hit_rate` is the share of prompt tokens in blocks that an earlier call had, None where
    the trace tells nothing of prefixes.
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


def summarize_trace(trace: Trace, *, peak_s: float = PEAK_S) -> TraceSummary:
    """Figures of a trace with one call or more; its peak is over `peak_s`, or all it lasts."""
    gaps_s = np.diff(trace.arrival_s)
    mean_s = float(gaps_s.mean()) if len(gaps_s) else 0.0
    return TraceSummary(
        source=trace.source,
        num_requests=len(trace),
        duration_s=trace.duration_s,
        rate_per_s=trace.rate_per_s,
        prompt_tokens=Quantiles.of(trace.num_prompt_tokens),
        output_tokens=Quantiles.of(trace.num_output_tokens),
        gap_s=Quantiles.of(gaps_s) if len(gaps_s) else None,
        gap_cv=float(gaps_s.std()) / mean_s if mean_s else None,
        peak=_peak(trace, min(peak_s, trace.duration_s)),
        prefix_hit_rate=None if trace.prefix is None else prefix_hit_rate(trace),
    )


def _peak(trace: Trace, window_s: float) -> Peak:
    window = find_peak(trace, window_s)
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
