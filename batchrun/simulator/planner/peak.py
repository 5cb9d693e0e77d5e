"""The busiest part of a trace, and what of it is simulated and judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from batchrun.simulator.planner.kinds import SloTarget
from batchrun.simulator.traces.trace import Ints, Trace, TraceWindow, find_peak

PEAK_S = 300.0
WARMUP_S = 60.0
"""Calls that come so long before the window run when it begins."""
BURST_S = 30.0
TAIL_S = 30.0
"""Simulated after the window, at least; the calls go on."""


@dataclass(frozen=True, slots=True, eq=False)
class PeakLoad:
    """The calls around the busiest window, timed from the warm-up's start.

    Calls of [judged_s[0], judged_s[1]) are judged. `numbers` are the calls' places in the trace,
    from 0. `num_refused` of the judged calls are longer than an engine's context: engines refuse
    them, however many there are. `draw` is 0 for the trace as given.
    """

    window: TraceWindow
    calls: Trace
    judged_s: tuple[float, float]
    numbers: Ints
    num_refused: int = 0
    draw: int = 0

    def is_judged(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For each call."""
        at_s = self.calls.arrival_s
        return np.asarray((at_s >= self.judged_s[0]) & (at_s < self.judged_s[1]))

    @property
    def num_judged(self) -> int:
        """Judged calls, the refused ones among them."""
        return int(self.is_judged().sum()) + self.num_refused

    @property
    def num_judged_tokens(self) -> int:
        """Prompt and answer tokens of the judged calls."""
        return int(self.calls.num_tokens[self.is_judged()].sum())

    @property
    def num_burst_tokens(self) -> int:
        """Those of the heaviest `BURST_S` among them."""
        judged = self.calls.take(np.flatnonzero(self.is_judged()))
        if not len(judged):
            return 0
        burst = find_peak(judged, BURST_S)
        return int(judged.between(burst.start_s, burst.end_s).num_tokens.sum())

    def part(self, share: float) -> PeakLoad:
        """So much of its calls."""
        chosen = choose_part(len(self.calls), share, self.draw)
        return replace(
            self,
            calls=self.calls.take(chosen),
            numbers=self.numbers[chosen],
            num_refused=int(share * self.num_refused),
        )

    def within(self, most_tokens: int) -> PeakLoad:
        """Without the calls that an engine with so long a context refuses."""
        fits = self.calls.num_tokens <= most_tokens
        num_refused = int((self.is_judged() & ~fits).sum())
        kept = self.calls.take(np.flatnonzero(fits))
        return replace(self, calls=kept, numbers=self.numbers[fits], num_refused=num_refused)


def choose_part(num_calls: int, share: float, seed: int) -> Ints:
    """Places of so much of the calls, chosen by chance: those of a larger share have those of a
    smaller one among them."""
    return np.flatnonzero(np.random.default_rng(seed).random(num_calls) < share)


def peak_load(trace: Trace, window_s: float, slo: SloTarget, draw: int = 0) -> PeakLoad:
    """The window of `window_s` with the most tokens, all of a shorter trace; `WARMUP_S` before and
    `TAIL_S` after it.

    What is simulated does not depend on the SLOs, unless the TTFT bound is above `TAIL_S`.
    """
    window = find_peak(trace, min(window_s, trace.duration_s) or window_s)
    from_s = max(0.0, window.start_s - WARMUP_S)
    to_s = window.end_s + max(TAIL_S, slo.ttft_s)
    first, after = np.searchsorted(trace.arrival_s, (from_s, to_s), side="left")
    judged_s = (window.start_s - from_s, window.end_s - from_s)
    numbers = np.arange(first, after)
    return PeakLoad(window, trace.between(from_s, to_s), judged_s, numbers, draw=draw)
