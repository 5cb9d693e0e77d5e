"""From the records of a run to one flat record of figures (design section 11)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from batchrun.vllm_plugin.virtual.engine import VirtualEngine
from batchrun.vllm_plugin.virtual.requests import RequestRecord

Figures = dict[str, object]


@dataclass(frozen=True, slots=True)
class Slo:
    """What online users were promised, in seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05


def summarize(engine: VirtualEngine, slo: Slo) -> Figures:
    """The figures of the run so far. All but `plan_ms` repeat exactly.

    Online figures count every call whose TTFT bound has passed; one without its first token by
    then is a miss, and its TTFT is the time waited so far. Means and percentiles of nothing are
    None. A wait is the time from arrival to the first admission, or to now.
    """
    end_s = engine.now_s
    online = [r for r in engine.records.values() if r.is_online]
    offline = [r for r in engine.records.values() if not r.is_online]
    judged = [r for r in online if r.arrival_at_s <= end_s - slo.ttft_s]
    totals = engine.totals
    computed = totals.num_online_computed_tokens + totals.num_offline_computed_tokens
    return {
        "duration_s": end_s,
        **_offline_figures(offline, end_s),
        **_online_figures(judged, slo, end_s),
        "computed_tokens_per_s": computed / end_s,
        "offline_computed_tokens_per_s": totals.num_offline_computed_tokens / end_s,
        "prefix_hit_rate": _hit_rate(offline),
        "online_longest_wait_s": _longest_wait_s(online, end_s),
        "offline_longest_wait_s": _longest_wait_s(offline, end_s),
        "online_preemptions": sum(r.num_preemptions for r in online),
        "offline_preemptions": sum(r.num_preemptions for r in offline),
        "steps": totals.num_steps,
        "empty_steps": totals.num_empty_steps,
        "busy_share": totals.busy_s / end_s,
        "online_step_share": _ratio(totals.online_share_sum, totals.num_steps),
        "plan_ms": _percentile([1e3 * s for s in totals.planning_wall_s], 50),
    }


def online_percentiles(engine: VirtualEngine, slo: Slo) -> dict[str, list[float]]:
    """The percentiles 0 to 100 of TTFT and TPOT over the calls that `summarize` judges."""
    end_s = engine.now_s
    records = [
        r for r in engine.records.values() if r.is_online and r.arrival_at_s <= end_s - slo.ttft_s
    ]
    values = {
        "ttft_percentiles_s": [_ttft_s(r, end_s) for r in records],
        "tpot_percentiles_s": [_tpot_s(r) for r in records if len(r.token_times_s) > 1],
    }
    return {
        name: np.percentile(series, np.arange(101)).tolist() if series else []
        for name, series in values.items()
    }


def _offline_figures(records: Sequence[RequestRecord], end_s: float) -> Figures:
    """Served tokens: prompt (hits included) and output of the rows that are done."""
    done = [r for r in records if r.finished_at_s is not None and r.finish_reason != "abort"]
    served = sum(r.num_prompt_tokens + len(r.output_token_ids) for r in done)
    return {
        "offline_tokens_per_s": served / end_s,
        "offline_rows_per_s": len(done) / end_s,
        "offline_rows": len(done),
    }


def _online_figures(records: Sequence[RequestRecord], slo: Slo, end_s: float) -> Figures:
    ttft = [_ttft_s(r, end_s) for r in records]
    tpot = [_tpot_s(r) for r in records if len(r.token_times_s) > 1]
    is_prompt = [bool(r.token_times_s) and _ttft_s(r, end_s) <= slo.ttft_s for r in records]
    return {
        "online_requests": len(records),
        "ttft_p50_s": _percentile(ttft, 50),
        "ttft_p99_s": _percentile(ttft, 99),
        "tpot_p50_s": _percentile(tpot, 50),
        "tpot_p99_s": _percentile(tpot, 99),
        "slo_ttft": _mean(is_prompt),
        "slo_tpot": _mean([value <= slo.tpot_s for value in tpot]),
        "slo_deadline": _mean([_keeps_deadlines(r, slo, end_s) for r in records]),
    }


def _ttft_s(record: RequestRecord, end_s: float) -> float:
    first_s = record.token_times_s[0] if record.token_times_s else end_s
    return first_s - record.arrival_at_s


def _tpot_s(record: RequestRecord) -> float:
    times = record.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1)


def _keeps_deadlines(record: RequestRecord, slo: Slo, end_s: float) -> bool:
    """Echo's deadline: token i by arrival + TTFT + i * TPOT, one that is overdue included."""
    first_due_s = record.arrival_at_s + slo.ttft_s
    times = record.token_times_s
    if record.finished_at_s is None and first_due_s + len(times) * slo.tpot_s < end_s:
        return False
    return all(at_s <= first_due_s + i * slo.tpot_s for i, at_s in enumerate(times))


def _hit_rate(records: Sequence[RequestRecord]) -> float | None:
    """Hit tokens by prompt tokens, over first admissions."""
    admitted = [r for r in records if r.admitted_at_s is not None]
    hits = sum(r.num_hit_tokens for r in admitted)
    return _ratio(hits, sum(r.num_prompt_tokens for r in admitted))


def _longest_wait_s(records: Iterable[RequestRecord], end_s: float) -> float | None:
    waits = [
        (end_s if r.admitted_at_s is None else r.admitted_at_s) - r.arrival_at_s for r in records
    ]
    return max(waits, default=None)


def _mean(values: Sequence[float]) -> float | None:
    return _ratio(sum(values), len(values))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
