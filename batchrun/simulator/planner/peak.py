"""The busiest window of a trace, and how many of its calls get the SLOs on so many engines."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from batchrun.config import STOCK_POLICY
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.records import Slo
from batchrun.simulator.simulation import SimulationPlan, simulate
from batchrun.simulator.traces.trace import Trace, TraceWindow, find_peak
from batchrun.types import ProgressSink

DEFAULT_TARGET = 0.99


@dataclass(frozen=True, slots=True)
class SloTarget:
    """The share `target` of a window's calls is to have a TTFT of at most `ttft_s`, and the same
    share a TPOT, the mean time between tokens, of at most `tpot_s`."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    target: float = DEFAULT_TARGET

    def may_miss(self, num_calls: int) -> int:
        """How many of so many calls may miss a bound."""
        return int((1 - self.target) * num_calls + 1e-9)


@dataclass(frozen=True, slots=True)
class Attainment:
    """What a window's calls got on `num_engines`.

    `num_timed` calls had two tokens or more by the end, and so a TPOT.
    """

    num_engines: int
    num_calls: int
    num_ttft_missed: int
    num_timed: int
    num_tpot_missed: int
    ttft_p99_s: float | None
    tpot_p99_s: float | None

    @property
    def ttft_share(self) -> float:
        """The share of calls within the TTFT bound."""
        return 1 - self.num_ttft_missed / self.num_calls

    @property
    def tpot_share(self) -> float:
        """The share of calls within the TPOT bound, of those that have one."""
        return 1 - self.num_tpot_missed / self.num_timed if self.num_timed else 1.0

    def holds(self, slo: SloTarget) -> bool:
        """Whether both bounds hold for the target share of calls."""
        return self.num_ttft_missed <= slo.may_miss(
            self.num_calls
        ) and self.num_tpot_missed <= slo.may_miss(self.num_timed)

    def record(self, slo: SloTarget) -> dict[str, object]:
        """As plain values."""
        return {
            "num_engines": self.num_engines,
            "holds": self.holds(slo),
            "num_calls": self.num_calls,
            "ttft_kept": self.ttft_share,
            "tpot_kept": self.tpot_share,
            "ttft_p99_s": self.ttft_p99_s,
            "tpot_p99_s": self.tpot_p99_s,
        }


PEAK_S = 300.0
WARMUP_S = 60.0
"""Calls that come so long before the window run when it begins."""
TAIL_S = 30.0
"""Simulated after the window, at least; the calls go on."""


@dataclass(frozen=True, slots=True, eq=False)
class PeakLoad:
    """The calls around the busiest window, timed from the warm-up's start.

    Calls of [judged_s[0], judged_s[1]) are judged. `numbers` are the calls' places in the trace,
    from 0. `num_refused` of the judged calls are longer than an engine's context: engines refuse
    them, however many there are.
    """

    window: TraceWindow
    calls: Trace
    judged_s: tuple[float, float]
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
    num_refused: int = 0

    def is_judged(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For each call."""
        at_s = self.calls.arrival_s
        return np.asarray((at_s >= self.judged_s[0]) & (at_s < self.judged_s[1]))

    @property
    def num_judged(self) -> int:
        """Judged calls, the refused ones among them."""
        return int(self.is_judged().sum()) + self.num_refused

    def within(self, most_tokens: int) -> PeakLoad:
        """Without the calls that an engine with so long a context refuses."""
        fits = self.calls.num_tokens <= most_tokens
        num_refused = int((self.is_judged() & ~fits).sum())
        kept = self.calls.take(np.flatnonzero(fits))
        return replace(self, calls=kept, numbers=self.numbers[fits], num_refused=num_refused)


def peak_load(trace: Trace, window_s: float, slo: SloTarget) -> PeakLoad:
    """The window of `window_s` with the most tokens, `WARMUP_S` before and `TAIL_S` after it.

    What is simulated does not depend on the SLOs, unless the TTFT bound is above `TAIL_S`.
    """
    window = find_peak(trace, window_s)
    from_s = max(0.0, window.start_s - WARMUP_S)
    to_s = window.end_s + max(TAIL_S, slo.ttft_s)
    first, after = np.searchsorted(trace.arrival_s, (from_s, to_s), side="left")
    judged_s = (window.start_s - from_s, window.end_s - from_s)
    return PeakLoad(window, trace.between(from_s, to_s), judged_s, np.arange(first, after))


def attainment(
    load: PeakLoad,
    engine: EnginePlan,
    num_engines: int,
    slo: SloTarget,
    progress: ProgressSink | None = None,
) -> Attainment:
    """Simulate the load alone on so many engines.

    Under vLLM's own scheduler: without offline rows batchrun's does the same, step for step, and
    so nothing that happens depends on the bounds.
    """
    plan = SimulationPlan(
        load.judged_s[1] + max(TAIL_S, slo.ttft_s),
        load.calls,
        num_engines=num_engines,
        engine=replace(engine, policy=STOCK_POLICY, believed=()),
        slo=Slo(slo.ttft_s, slo.tpot_s),
        judged_s=load.judged_s,
    )
    online = simulate(plan, progress=progress).online
    # Shares are whole numbers of calls over the judged ones.
    num_kept = round((online.ttft_kept or 0.0) * online.num_judged)
    num_tpot_missed = round((1 - (online.tpot_kept or 0.0)) * online.num_timed)
    return Attainment(
        num_engines,
        load.num_judged,
        load.num_judged - num_kept,
        online.num_timed,
        num_tpot_missed,
        online.ttft_p99_s,
        online.tpot_p99_s,
    )
