"""What came of online calls, and the figures made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OnlineResult:
    """One call. Instants are seconds from the trace's start, durations from the planned arrival.

    `ttft_s` is None when no token came; `e2e_s` and the counts cover what came before an `error`.
    """

    arrived_at_s: float
    ttft_s: float | None
    e2e_s: float
    itl_s: tuple[float, ...]
    num_output_tokens: int
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """(end-to-end - TTFT) / (output tokens - 1); None under two tokens or after an error."""
        if self.error is not None or self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    def meets_ttft(self, bound_s: float) -> bool:
        """Whether the first token came within the bound."""
        return self.ttft_s is not None and self.ttft_s <= bound_s

    def meets_tpot(self, bound_s: float) -> bool:
        """Whether the call was answered and its mean gap held; one token has no gap to miss."""
        return self.error is None and (self.tpot_s is None or self.tpot_s <= bound_s)


Summary = dict[str, float | int | None]


def summarize(results: Sequence[OnlineResult], *, slo_ttft_s: float, slo_tpot_s: float) -> Summary:
    """Percentiles and the shares of ALL arrived calls that met the bounds.

    A call without a first token counts as an endless TTFT; a percentile that falls on one is
    None. Shares are None when no call arrived.
    """
    ttfts_s = [math.inf if r.ttft_s is None else r.ttft_s for r in results]
    tpots_s = [r.tpot_s for r in results if r.tpot_s is not None]
    itls_s = [gap_s for r in results for gap_s in r.itl_s]
    ttft_met = [r.meets_ttft(slo_ttft_s) for r in results]
    tpot_met = [r.meets_tpot(slo_tpot_s) for r in results]
    num_answered = sum(r.error is None for r in results)
    return {
        "arrived": len(results),
        "answered": num_answered,
        "failed": len(results) - num_answered,
        "ttft_p50_s": percentile(ttfts_s, 0.50),
        "ttft_p99_s": percentile(ttfts_s, 0.99),
        "tpot_p50_s": percentile(tpots_s, 0.50),
        "tpot_p99_s": percentile(tpots_s, 0.99),
        "itl_p50_s": percentile(itls_s, 0.50),
        "itl_p99_s": percentile(itls_s, 0.99),
        "slo_ttft": _share(ttft_met),
        "slo_tpot": _share(tpot_met),
        "slo_attainment": _share([a and b for a, b in zip(ttft_met, tpot_met, strict=True)]),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    if not values:
        return None
    rank = max(1, math.ceil(share * len(values)))
    value = sorted(values)[rank - 1]
    return None if math.isinf(value) else value


def _share(met: Sequence[bool]) -> float | None:
    return sum(met) / len(met) if met else None
