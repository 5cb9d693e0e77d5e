"""Change how much or how fast: in time, and in rate with the bursts kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchrun.errors import InputError
from batchrun.traces.trace import Floats, Ints, PrefixBlocks, Trace, beyond

JITTER_S = 0.5
"""A copy of a call arrives up to so long before or after it."""
COMMON_SHARE = 0.1
"""A prefix block that this share of all calls have is common to all callers: a system prompt."""


def scale_time(trace: Trace, factor: float) -> Trace:
    """The same calls over `factor` times the time: 2 lasts twice as long, at half the rate.

    So Echo scales its trace (section 7.1). Raises InputError unless `factor` is above 0.
    """
    _check("time", factor)
    arrival_s = trace.arrival_s * factor
    duration_s = beyond(trace.duration_s * factor, arrival_s)
    return replace(trace, arrival_s=arrival_s, duration_s=duration_s)


def scale_rate(trace: Trace, factor: float, *, seed: int) -> Trace:
    """`factor` times the calls in the same time. Raises InputError unless it is above 0.

    Below 1 each call stays with that chance. Above 1 each call comes floor(factor) times, and once
    more with the chance of the rest; copies arrive within `JITTER_S` of the call. So the rate's
    course is multiplied at every scale above a second: bursts and the tide keep their place, their
    length and their height over the mean. Thinned, counts get the noise of fewer independent
    callers; copied, their coefficient of variation stays. The copies are other callers: only the
    `COMMON_SHARE` blocks are shared with them.
    """
    _check("rate", factor)
    rng = np.random.default_rng(seed)
    parts = [_copy(trace, number, rng) for number in range(1, math.floor(factor))]
    if factor >= 1:
        parts.insert(0, trace)
    rest = factor - math.floor(factor)
    if rest:
        kept = trace.take(np.flatnonzero(rng.random(len(trace)) < rest))
        parts.append(_copy(kept, len(parts), rng, whole=trace) if parts else kept)
    return superpose(parts) if len(parts) > 1 else parts[0]


def superpose(traces: Sequence[Trace]) -> Trace:
    """All calls on one clock; it lasts as long as the longest.

    Prefix blocks stay where all traces have them, of one size; equal hashes are then equal blocks.
    """
    times_s = np.concatenate([trace.arrival_s for trace in traces])
    order = np.argsort(times_s, kind="stable")
    return Trace(
        times_s[order],
        np.concatenate([trace.num_prompt_tokens for trace in traces])[order],
        np.concatenate([trace.num_output_tokens for trace in traces])[order],
        max(trace.duration_s for trace in traces),
        _joined([trace.prefix for trace in traces], order),
        ", ".join(dict.fromkeys(trace.source for trace in traces if trace.source)),
    )


def scale_lengths(trace: Trace, factor: float) -> Trace:
    """Both lengths of each call times `factor`, at least 1; what prompts share is not kept."""
    _check("lengths", factor)

    def scaled(lengths: Ints) -> Ints:
        tokens: Ints = np.clip(np.rint(lengths * factor), 1, 2**62).astype(np.int64, copy=False)
        return tokens

    return replace(
        trace,
        num_prompt_tokens=scaled(trace.num_prompt_tokens),
        num_output_tokens=scaled(trace.num_output_tokens),
        prefix=None,
    )


def _check(what: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise InputError(f"the factor of the {what} must be above 0, not {factor:g}")


def _copy(
    calls: Trace, number: int, rng: np.random.Generator, *, whole: Trace | None = None
) -> Trace:
    """The calls again, a little earlier or later, of other callers."""
    whole = whole or calls
    moved_s = calls.arrival_s + rng.uniform(-JITTER_S, JITTER_S, len(calls))
    times_s = _reflected(moved_s, calls.duration_s)
    order = np.argsort(times_s, kind="stable")
    prefix = None
    if calls.prefix is not None and whole.prefix is not None:
        prefix = _of_others(calls.prefix, whole.prefix, number).take(order)
    return replace(
        calls,
        arrival_s=times_s[order],
        num_prompt_tokens=calls.num_prompt_tokens[order],
        num_output_tokens=calls.num_output_tokens[order],
        prefix=prefix,
    )


def _reflected(times_s: Floats, duration_s: float) -> Floats:
    """Within [0, duration): what is outside comes back by as much."""
    last_s = math.nextafter(duration_s, 0)
    inside: Floats = np.abs(times_s)
    return np.clip(np.where(inside > last_s, 2 * last_s - inside, inside), 0, last_s)


def _of_others(prefix: PrefixBlocks, whole: PrefixBlocks, number: int) -> PrefixBlocks:
    """The blocks renumbered, but for those that are common in the whole trace."""
    known, counts = np.unique(whole.hashes, return_counts=True)
    own = known[counts < COMMON_SHARE * len(whole)]
    top = int(known[-1]) + 1 if len(known) else 0
    # Numbers above those of the trace, a stretch for each copy.
    is_own = np.isin(prefix.hashes, own)
    places = np.searchsorted(known, prefix.hashes)
    hashes = np.where(is_own, top + (number - 1) * len(known) + places, prefix.hashes)
    return replace(prefix, hashes=hashes)


def _joined(prefixes: Sequence[PrefixBlocks | None], order: Ints) -> PrefixBlocks | None:
    given = [prefix for prefix in prefixes if prefix is not None]
    if len(given) < len(prefixes) or len({prefix.block_tokens for prefix in given}) != 1:
        return None
    counts = np.concatenate([np.diff(prefix.offsets) for prefix in given])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    hashes = np.concatenate([prefix.hashes for prefix in given])
    return PrefixBlocks(hashes, offsets, given[0].block_tokens).take(order)
