"""Rates over time: a series of windows with arrivals per second, and calls drawn from it.

Files of rates: ServeGen's, one csv for each client and tars of them, and our own csv.
"""

from __future__ import annotations

import math
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from batchrun.errors import DataError
from batchrun.simulator.traces.tables import Column, CsvText, opened
from batchrun.simulator.traces.trace import Floats, Ints, Trace, beyond

MAX_CALLS = 50_000_000
"""More are not drawn: they would not fit into memory."""


class GapFamily(StrEnum):
    """How the gaps between arrivals are distributed. Shape 1 is exponential in both."""

    GAMMA = "gamma"
    WEIBULL = "weibull"


@dataclass(frozen=True, slots=True)
class MedianTokens:
    """Numbers of tokens: log-normal, with the median and the sigma of the logarithm, 1 or more."""

    median: float
    sigma: float

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """`num` numbers."""
        drawn = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(num)))
        return np.clip(drawn, 1, 2**31).astype(np.int64)


@dataclass(frozen=True, slots=True)
class CallLengths:
    """What prompts and answers are drawn from; the default is a chat's (scenario a100-8b)."""

    prompt: MedianTokens = MedianTokens(200.0, 1.0)
    output: MedianTokens = MedianTokens(148.0, 0.8)


@dataclass(frozen=True, slots=True, eq=False)
class RateSeries:
    """One source of calls. Window i lasts from `start_s[i]` to the next start, the last to `end_s`.

    `shape` is that of the gaps' distribution in each window (its mean follows from the rate), and
    `lengths` is one for each window. Raises DataError unless starts rise and rates are 0 or more.
    """

    start_s: Floats
    end_s: float
    rate_per_s: Floats
    shape: Floats
    family: Sequence[GapFamily]
    lengths: Sequence[CallLengths]

    def __post_init__(self) -> None:
        edges_s = np.append(self.start_s, self.end_s)
        if not (np.isfinite(edges_s).all() and (np.diff(edges_s) > 0).all()):
            raise DataError("rates: each window must begin after the one before it")
        if not (np.isfinite(self.rate_per_s).all() and (self.rate_per_s >= 0).all()):
            raise DataError("rates: a rate must be 0 or more")

    @classmethod
    def steady(
        cls, start_s: ArrayLike, end_s: float, rate_per_s: ArrayLike, *, cv: float = 1.0
    ) -> RateSeries:
        """Rates with gamma gaps of one coefficient of variation, and a chat's lengths."""
        starts_s, rates = np.asarray(start_s, np.float64), np.asarray(rate_per_s, np.float64)
        num = len(starts_s)
        families = [GapFamily.GAMMA] * num
        shape = np.full(num, 1 / cv**2)
        return cls(starts_s, end_s, rates, shape, families, [CallLengths()] * num)

    @property
    def expected_calls(self) -> float:
        """How many calls a draw has on average."""
        return float(np.diff(np.append(self.start_s, self.end_s)) @ self.rate_per_s)

    def scaled(self, factor: float) -> RateSeries:
        """The same course at `factor` times the rate."""
        return replace(self, rate_per_s=self.rate_per_s * factor)

    def between(self, start_s: float, end_s: float) -> RateSeries:
        """The course of [start_s, end_s), timed from `start_s`. Raises DataError if it has none."""
        edges_s = np.append(self.start_s, self.end_s)
        kept = np.flatnonzero((edges_s[1:] > start_s) & (edges_s[:-1] < end_s))
        if not len(kept):
            raise DataError(
                f"rates: no seconds {start_s:g} to {end_s:g}; there are {edges_s[0]:g} to "
                f"{self.end_s:g}"
            )
        return RateSeries(
            np.maximum(self.start_s[kept], start_s) - start_s,
            min(edges_s[kept[-1] + 1], end_s) - start_s,
            self.rate_per_s[kept],
            self.shape[kept],
            [self.family[i] for i in kept],
            [self.lengths[i] for i in kept],
        )

    def draw_arrivals(self, rng: np.random.Generator) -> tuple[Floats, Ints]:
        """Arrivals in seconds, and the window of each.

        A renewal process whose gaps have mean 1 runs on a clock that goes at the window's rate:
        what is left of a gap at a window's end is waited for in the next. So the expected count of
        a window is rate * length, and gaps keep their coefficient of variation.
        """
        edges_s = np.append(self.start_s, self.end_s)
        times_s: list[Floats] = []
        waiting = float(rng.exponential())
        for i, rate in enumerate(self.rate_per_s):
            length = rate * (edges_s[i + 1] - edges_s[i])
            points, waiting = _renewals(waiting, length, self._gaps(i, rng))
            times_s.append(edges_s[i] + points / rate if rate else points)
        counts = [len(each) for each in times_s]
        return np.concatenate([*times_s, []]), np.repeat(np.arange(len(counts)), counts)

    def _gaps(self, window: int, rng: np.random.Generator) -> _Gaps:
        return _Gaps(rng, self.family[window], float(self.shape[window]))


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Gaps of mean 1."""

    rng: np.random.Generator
    family: GapFamily
    shape: float

    def draw(self, num: int) -> Floats:
        if self.family is GapFamily.WEIBULL:
            return self.rng.weibull(self.shape, num) / math.gamma(1 + 1 / self.shape)
        return self.rng.gamma(self.shape, 1 / self.shape, num)


def _renewals(first: float, length: float, gaps: _Gaps) -> tuple[Floats, float]:
    """Points in [0, length) of which the first is at `first`, and how far past it the next is."""
    parts: list[Floats] = []
    at = first
    while at < length:
        drawn = gaps.draw(int(length - at) + 16)
        points = at + np.concatenate([[0.0], np.cumsum(drawn)])
        parts.append(points[:-1][points[:-1] < length])
        at = float(points[-1]) if points[-1] < length else float(points[points >= length][0])
    return np.concatenate([*parts, []]), at - length


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
    end_s = beyond(max(each.end_s for each in series), at_s[order])
    if like is not None:
        return _like(at_s[order], end_s, like, rng, source)
    lengths = [
        _draw_lengths(s, windows, rng) for s, (_, windows) in zip(series, arrivals, strict=True)
    ]
    prompts, outputs = (np.concatenate([each[i] for each in lengths])[order] for i in (0, 1))
    return Trace(at_s[order], prompts, outputs, end_s, source=source)


def _like(at_s: Floats, end_s: float, like: Trace, rng: np.random.Generator, source: str) -> Trace:
    if len(at_s) and not len(like):
        raise DataError(f"{like.source or 'trace'}: has no calls to draw from")
    chosen = rng.integers(len(like), size=len(at_s)) if len(at_s) else np.empty(0, np.int64)
    return Trace(
        at_s,
        like.num_prompt_tokens[chosen],
        like.num_output_tokens[chosen],
        end_s,
        None if like.prefix is None else like.prefix.take(chosen),
        source,
    )


def _draw_lengths(series: RateSeries, windows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Prompt and output tokens of calls that arrive in `windows`, which rise."""
    prompts, outputs = np.empty(len(windows), np.int64), np.empty(len(windows), np.int64)
    counts = np.bincount(windows, minlength=len(series.lengths))
    after = np.cumsum(counts)
    for window, lengths in enumerate(series.lengths):
        part = slice(after[window] - counts[window], after[window])
        prompts[part] = lengths.prompt.draw(int(counts[window]), rng)
        outputs[part] = lengths.output.draw(int(counts[window]), rng)
    return prompts, outputs


REQUIRED = ("time_s", "rate_per_s")
_CHAT = CallLengths()
OPTIONAL = {
    "cv": 1.0,
    "prompt_median_tokens": _CHAT.prompt.median,
    "prompt_sigma": _CHAT.prompt.sigma,
    "output_median_tokens": _CHAT.output.median,
    "output_sigma": _CHAT.output.sigma,
}
"""Columns of our own layout that may be missing or empty, and what is then taken."""
_ABOVE_0 = frozenset({"cv", "prompt_median_tokens", "output_median_tokens"})

_FAMILY = pl.col("family").str.strip_chars().str.to_lowercase()
_RATE, _SHAPE = Column.number("rate"), Column.number("shape", above=0)
_IS_IDLE = (_RATE.value == 0) | _FAMILY.is_null() | (_FAMILY == "")
_SERVEGEN = {
    "start": Column.number("start"),
    "rate": _RATE,
    "family": Column(
        pl
        .when(_IS_IDLE)
        .then(pl.lit(GapFamily.GAMMA.value))
        .otherwise(pl.when(_FAMILY.is_in(list(GapFamily))).then(_FAMILY)),
        "Gamma or Weibull",
    ),
    "shape": Column(pl.when(_IS_IDLE).then(1.0).otherwise(_SHAPE.value), _SHAPE.what),
}
"""A window without calls has neither family nor shape."""
_SERVEGEN_NAMES = ("start", "rate", "cv", "family", "shape", "scale")

MAX_MEMBERS = 10_000
MAX_MEMBER_BYTES = 16 << 20


def read_rates_csv(path: Path) -> list[RateSeries]:
    """Our own layout: a header with `REQUIRED` and any of `OPTIONAL`. Raises DataError.

    The last window is as long as the one before it.
    """
    text = CsvText.with_header(path)
    known = [*REQUIRED, *OPTIONAL]
    for name in text.names:
        if name not in known or text.names.count(name) > 1:
            raise DataError(
                f"{path}: line {text.num_skipped}: column {name!r}; each of {', '.join(known)} may "
                "stand once"
            )
    columns = {
        name: Column.number(name, above=0 if name in _ABOVE_0 else None, default=OPTIONAL.get(name))
        for name in (*REQUIRED, *text.names)
    }
    usual = {name: pl.lit(value) for name, value in OPTIONAL.items() if name not in text.names}
    rows = text.read(columns).with_columns(**usual)
    lengths = [
        CallLengths(MedianTokens(*prompt_output[:2]), MedianTokens(*prompt_output[2:]))
        for prompt_output in rows.select(list(OPTIONAL)[1:]).iter_rows()
    ]
    windows = rows.select(
        "time_s", "rate_per_s", family=pl.lit(GapFamily.GAMMA.value), shape=1 / pl.col("cv") ** 2
    )
    return [_series(path, windows, lengths)]


def read_servegen_csv(path: Path) -> list[RateSeries]:
    """One client of ServeGen: start, rate, cv, family, shape, scale, no header."""
    with opened(path) as file:
        return [_client(path, file.read())]


def read_servegen_tar(path: Path) -> list[RateSeries]:
    """All `*-trace.csv` of a tar, each a client. Nothing is unpacked to the disk."""
    series = []
    try:
        with opened(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for number, member in enumerate(archive):
                if number >= MAX_MEMBERS:
                    raise DataError(f"{path}: more than {MAX_MEMBERS} files in it")
                if member.isfile() and member.name.endswith("-trace.csv"):
                    content = archive.extractfile(member)
                    assert content is not None
                    text = content.read(MAX_MEMBER_BYTES + 1)
                    if len(text) > MAX_MEMBER_BYTES:
                        raise DataError(
                            f"{path}: {member.name} has more than {MAX_MEMBER_BYTES} bytes"
                        )
                    series.append(_client(path / member.name, text))
    except tarfile.TarError as error:
        raise DataError(f"{path}: cannot read the tar: {error}") from error
    if not series:
        raise DataError(f"{path}: no *-trace.csv in it")
    return series


def _client(path: Path, content: bytes) -> RateSeries:
    windows = CsvText(path, content, _SERVEGEN_NAMES).read(_SERVEGEN)
    return _series(path, windows, [CallLengths()] * len(windows))


def _series(path: Path, windows: pl.DataFrame, lengths: Sequence[CallLengths]) -> RateSeries:
    """`windows` has start, rate, family and shape of each, in this order."""
    if len(windows) < 2:
        raise DataError(f"{path}: at least two windows are needed to know how long one is")
    start_s, rates, families, shapes = (column.to_numpy() for column in windows)
    for place in np.flatnonzero(np.diff(start_s) <= 0)[:1]:
        raise DataError(
            f"{path}: the window at {start_s[place + 1]:g} s does not follow the others"
        )
    end_s = float(2 * start_s[-1] - start_s[-2])
    return RateSeries(start_s, end_s, rates, shapes, [GapFamily(f) for f in families], lengths)
