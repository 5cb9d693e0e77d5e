"""Parts of a trace: its peak, and windows that stand for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from batchrun.errors import InputError
from batchrun.traces.trace import Floats, Trace


class Load(StrEnum):
    """What makes a window heavy."""

    TOKENS = "tokens"
    REQUESTS = "requests"

    def weights(self, trace: Trace) -> Floats:
        """The weight of each call."""
        if self is Load.REQUESTS:
            return np.ones(len(trace))
        return trace.num_tokens.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds [start_s, end_s) of a trace; it stands for `weight_s` seconds of it."""

    start_s: float
    end_s: float
    weight_s: float

    def of(self, trace: Trace) -> Trace:
        """Its calls, timed from its start."""
        return trace.between(self.start_s, self.end_s)


def find_peak(trace: Trace, window_s: float, load: Load = Load.TOKENS) -> Window:
    """The window of `window_s` with the largest load, the earliest of equals; it stands for itself.

    It lies within the trace where that is long enough. O(n log n): a heaviest window can begin at
    an arrival. Raises InputError without a call or a length.
    """
    if not window_s > 0 or not len(trace):
        raise InputError(f"no peak of {window_s:g} s in {len(trace)} calls")
    times_s = trace.arrival_s
    sums = np.concatenate([[0.0], np.cumsum(load.weights(trace))])
    after = np.searchsorted(times_s, times_s + window_s, side="left")
    heaviest = int(np.argmax(sums[after] - sums[:-1]))
    start_s = min(float(times_s[heaviest]), max(0.0, trace.duration_s - window_s))
    return Window(start_s, start_s + window_s, window_s)


def stratified_windows(
    trace: Trace, num: int, window_s: float, *, seed: int | None = None
) -> Sequence[Window]:
    """`num` windows of `window_s`, one in each of `num` equal parts of the trace, its weight.

    In the middle of its part, or with a seed at a place drawn within it. Parts shorter than a
    window are whole windows. Sums over the trace are estimated by the windows' sums, each times
    `weight_s` over its length. Raises InputError.
    """
    if num < 1 or not window_s > 0 or not trace.duration_s:
        raise InputError(f"no {num} windows of {window_s:g} s in {trace.duration_s:g} s")
    part_s = trace.duration_s / num
    length_s = min(window_s, part_s)
    rng = None if seed is None else np.random.default_rng(seed)
    places = [0.5] * num if rng is None else rng.random(num)
    starts_s = [i * part_s + place * (part_s - length_s) for i, place in enumerate(places)]
    return [Window(start_s, start_s + length_s, part_s) for start_s in starts_s]


def counts_by_window(trace: Trace, window_s: float, load: Load = Load.REQUESTS) -> Floats:
    """The load of each window of `window_s` from the start on; the last may be cut off."""
    places = (trace.arrival_s // window_s).astype(np.int64)
    num = max(1, int(np.ceil(trace.duration_s / window_s)))
    return np.bincount(places, load.weights(trace), minlength=num).astype(np.float64)
