"""Rates over time: a series of windows with arrivals per second, and calls drawn from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from batchrun.errors import DataError
from batchrun.simulator.traces.trace import Floats, Ints, Trace, beyond

MAX_CALLS = 50_000_000
"""More are not drawn: they would not fit into memory."""


class GapFamily(StrEnum):
    """How the gaps between arrivals are distributed. Shape 1 is exponential in both."""

    GAMMA = "gamma"
    WEIBULL = "weibull"


CHAT_LENGTHS = {
    "prompt_median_tokens": 200.0,
    "prompt_sigma": 1.0,
    "output_median_tokens": 148.0,
    "output_sigma": 0.8,
}
"""Log-normal lengths of prompts and answers where none are given: those of the scenario a100-8b."""


@dataclass(frozen=True, slots=True, eq=False)
class RateSeries:
    """One source of calls. A window lasts from its `start_s` to the next start, the last to
    `end_s`.

    Columns of `windows`: `start_s`, `rate_per_s`, the `family` and the `shape` of the distribution
    of gaps (its mean follows from the rate), and those of `CHAT_LENGTHS`: median and sigma of the
    logarithm. Raises DataError unless starts rise and rates are 0 or more.
    """

    windows: pl.DataFrame
    end_s: float

    def __post_init__(self) -> None:
        rates = self.windows["rate_per_s"].to_numpy()
        if not (np.isfinite(self.edges_s).all() and (np.diff(self.edges_s) > 0).all()):
            raise DataError("rates: each window must begin after the one before it")
        if not (np.isfinite(rates).all() and (rates >= 0).all()):
            raise DataError("rates: a rate must be 0 or more")

    @classmethod
    def steady(
        cls, start_s: ArrayLike, end_s: float, rate_per_s: ArrayLike, *, cv: float = 1.0
    ) -> RateSeries:
        """Rates with gamma gaps of one coefficient of variation, and a chat's lengths."""
        columns = {"start_s": start_s, "rate_per_s": rate_per_s}
        arrays = {name: np.asarray(values, np.float64) for name, values in columns.items()}
        usual = {"family": GapFamily.GAMMA.value, "shape": 1 / cv**2, **CHAT_LENGTHS}
        windows = pl.DataFrame(arrays).with_columns(**{n: pl.lit(v) for n, v in usual.items()})
        return cls(windows, end_s)

    @property
    def edges_s(self) -> Floats:
        """Where windows begin, and where the last one ends."""
        return np.append(self.windows["start_s"].to_numpy(), self.end_s)

    @property
    def expected_calls(self) -> float:
        """How many calls a draw has on average."""
        return float(np.diff(self.edges_s) @ self.windows["rate_per_s"].to_numpy())

    def scaled(self, factor: float) -> RateSeries:
        """The same course at `factor` times the rate."""
        return replace(self, windows=self.windows.with_columns(pl.col("rate_per_s") * factor))

    def between(self, start_s: float, end_s: float) -> RateSeries:
        """The course of [start_s, end_s), timed from `start_s`. Raises DataError if it has none."""
        edges_s = self.edges_s
        is_kept = (edges_s[1:] > start_s) & (edges_s[:-1] < end_s)
        if not is_kept.any():
            raise DataError(
                f"rates: no seconds {start_s:g} to {end_s:g}; there are {edges_s[0]:g} to "
                f"{self.end_s:g}"
            )
        starts_s = pl.col("start_s").clip(start_s) - start_s
        windows = self.windows.filter(is_kept).with_columns(starts_s)
        return RateSeries(windows, min(float(edges_s[1:][is_kept][-1]), end_s) - start_s)

    def draw_arrivals(self, rng: np.random.Generator) -> tuple[Floats, Ints]:
        """Arrivals in seconds, and how many are in each window.

        A renewal process whose gaps have mean 1 runs on a clock that goes at the window's rate:
        what is left of a gap at a window's end is waited for in the next. So the expected count of
        a window is rate * length, and gaps keep their coefficient of variation.
        """
        edges_s = self.edges_s
        times_s: list[Floats] = []
        waiting = float(rng.exponential())
        windows = self.windows.select("rate_per_s", "family", "shape").iter_rows()
        for i, (rate, family, shape) in enumerate(windows):
            length = rate * (edges_s[i + 1] - edges_s[i])
            points, waiting = _renewals(waiting, length, _gaps(rng, family, shape))
            times_s.append(edges_s[i] + points / rate if rate else points)
        counts = np.array([len(each) for each in times_s], np.int64)
        return np.concatenate([*times_s, []]), counts

    def draw_lengths(self, counts: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Prompt and output tokens of so many calls in each window."""
        prompts, outputs = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        windows = self.windows.select(list(CHAT_LENGTHS)).iter_rows()
        for (prompt, prompt_sigma, output, output_sigma), count in zip(
            windows, counts, strict=True
        ):
            prompts.append(_draw_tokens(prompt, prompt_sigma, count, rng))
            outputs.append(_draw_tokens(output, output_sigma, count, rng))
        return np.concatenate(prompts), np.concatenate(outputs)


def _gaps(rng: np.random.Generator, family: str, shape: float) -> Callable[[int], Floats]:
    """Draws gaps of mean 1."""
    if family == GapFamily.WEIBULL:
        return lambda num: rng.weibull(shape, num) / math.gamma(1 + 1 / shape)
    return lambda num: rng.gamma(shape, 1 / shape, num)


def _renewals(first: float, length: float, gaps: Callable[[int], Floats]) -> tuple[Floats, float]:
    """Points in [0, length) of which the first is at `first`, and how far past it the next is."""
    parts: list[Floats] = []
    at = first
    while at < length:
        drawn = gaps(int(length - at) + 16)
        points = at + np.concatenate([[0.0], np.cumsum(drawn)])
        parts.append(points[:-1][points[:-1] < length])
        at = float(points[-1]) if points[-1] < length else float(points[points >= length][0])
    return np.concatenate([*parts, []]), at - length


def _draw_tokens(median: float, sigma: float, num: int, rng: np.random.Generator) -> Ints:
    drawn = np.rint(median * np.exp(sigma * rng.standard_normal(num)))
    return np.clip(drawn, 1, 2**31).astype(np.int64)


def draw_trace(
    series: Sequence[RateSeries], *, seed: int, like: Trace | None = None, source: str = ""
) -> Trace:
    """Calls of all sources together, from `start_s` 0 on; the same seed gives the same trace.

    Lengths are drawn from the series', or as whole calls (both lengths and the prefix blocks
    together) from the trace `like`. Raises DataError for more than `MAX_CALLS`.
    """
    expected = sum(each.expected_calls for each in series)
    if expected > MAX_CALLS:
        raise DataError(
            f"{source or 'rates'}: about {expected:,.0f} calls; at most {MAX_CALLS:,} are drawn: "
            "scale the rate down or take fewer seconds"
        )
    rng = np.random.default_rng(seed)
    arrivals = [each.draw_arrivals(rng) for each in series]
    at_s = np.concatenate([times_s for times_s, _ in arrivals])
    order = np.argsort(at_s, kind="stable")
    at_s = at_s[order]
    end_s = beyond(max(each.end_s for each in series), at_s)
    if like is None:
        drawn = zip(series, arrivals, strict=True)
        lengths = [each.draw_lengths(counts, rng) for each, (_, counts) in drawn]
        prompts, outputs = (np.concatenate(each)[order] for each in zip(*lengths, strict=True))
        return Trace(at_s, prompts, outputs, end_s, source=source)
    if len(at_s) and not len(like):
        raise DataError(f"{like.source or 'trace'}: has no calls to draw from")
    chosen = rng.integers(len(like), size=len(at_s)) if len(at_s) else np.empty(0, np.int64)
    prefix = None if like.prefix is None else like.prefix.take(chosen)
    prompts, outputs = like.num_prompt_tokens[chosen], like.num_output_tokens[chosen]
    return Trace(at_s, prompts, outputs, end_s, prefix, source)
