"""How much of a trace an engine can serve: the rate is scaled until online calls alone are in time.

Echo scales the arrivals of its trace before the runs "so that it will not violate the SLO in a
workload only including online tasks" (sections 7.1 and 7.2); how it searches is not told. We
bisect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from batchrun.errors import InputError
from batchrun.traces.scaling import scale_rate
from batchrun.traces.trace import Trace


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
