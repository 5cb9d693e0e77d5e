"""What co-location benchmarks on real engines report of online calls (design section 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from batchrun.simulator.replay import OnlineResult
from benchmarks.replay import summarize

Figures = dict[str, object]


@dataclass(frozen=True, slots=True)
class Promise:
    """What online callers were promised, in seconds."""

    ttft_s: float
    tpot_s: float


def online_figures(results: Sequence[OnlineResult], promise: Promise) -> Figures:
    """Figures over ALL arrived calls; one without its first token missed every bound.

    `slo_attainment` is the share that kept both bounds, `slo_deadline` the share that kept Echo's:
    token i by arrival + TTFT + i * TPOT. Shares and percentiles of nothing are None.
    """
    summary = summarize(results, slo_ttft_s=promise.ttft_s, slo_tpot_s=promise.tpot_s)
    met = [keeps_deadlines(result, promise) for result in results]
    waits_s = [result.e2e_s if result.ttft_s is None else result.ttft_s for result in results]
    return {
        **summary,
        "slo_deadline": sum(met) / len(met) if met else None,
        "online_longest_wait_s": max(waits_s, default=None),
        "slo_ttft_bound_s": promise.ttft_s,
        "slo_tpot_bound_s": promise.tpot_s,
    }


def keeps_deadlines(result: OnlineResult, promise: Promise) -> bool:
    """Whether the call was answered and each token came by Echo's deadline."""
    if result.error is not None or result.ttft_s is None:
        return False
    times_s = accumulate(result.itl_s, initial=result.ttft_s)
    return all(at_s <= promise.ttft_s + i * promise.tpot_s for i, at_s in enumerate(times_s))
