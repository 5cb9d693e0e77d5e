"""What `status` shows of a job, whether a daemon runs it or not, and of an engine's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from batchrun.daemon.engine_link import EngineLink
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.prices import read_spent
from batchrun.jobs.on_done import about_job, read_tellings
from batchrun.pool.deadlines import Outlook
from batchrun.pool.pace import Completion
from batchrun.store import jobs, results
from batchrun.store.database import Store
from batchrun.store.jobs import Counts, JobRecord
from batchrun.wire import ClassTelemetry, CostTelemetry, LatencyTelemetry, Telemetry


def with_deadline(record: JobRecord, job_s: float | None) -> JobRecord:
    """A job that has not ended with its deadline: after `job_s` where it has none of its own."""
    if record.expires_at is not None or job_s is None or record.state.is_terminal:
        return record
    return replace(record, expires_at=record.created_at + job_s)


def view_job(
    record: JobRecord,
    counts: Counts,
    *,
    active: ActiveJob | None = None,
    predicted: tuple[Outlook | None, Completion | None] = (None, None),
    stage: str | None = None,
    now_s: float = 0.0,
) -> dict[str, object]:
    """One job as a flat JSON object; `active`, `predicted` and `now_s` (monotonic) where a daemon
    runs it. Rates cover the last half minute; shares are 0 to 1.

    `hit_rate` is what the engines returned, `best_hit_rate` what an unlimited prefix cache reaches
    by shared pieces of 256 bytes, or `hit_rate` where that is more; both are None while unknown, as
    are the seconds to the job's end: `eta_s` is the best guess, by the rows of the last half minute
    until the end can be predicted, and `eta_low_s` to `eta_high_s` holds nine times of ten.
    `cache_agreement` compares the cached tokens that were predicted for the rows done with those
    that came back. `is_deadline_kept` and `deadline_outlook` are None without a deadline or a
    forecast.
    """
    outlook, completion = predicted
    agreement = active.cache_agreement if active else None
    rows_per_s, served, computed = active.pace.rates(now_s) if active else (0.0, 0.0, 0.0)
    prompt = counts.num_prompt_tokens
    hit_rate = counts.num_cached_tokens / prompt if prompt else None
    return {
        **about_job(record, counts),
        "stage": stage,
        "output_path": record.output_path,
        "expires_at": record.expires_at,
        "num_in_flight": active.queue.num_in_flight if active else 0,
        "rows_per_s": rows_per_s,
        "served_tokens_per_s": served,
        "computed_tokens_per_s": computed,
        "hit_rate": hit_rate,
        "best_hit_rate": max(active.plan.shared_share, hit_rate or 0.0) if active else None,
        "estimate_error": active.plan.tokens.mape if active else None,
        "cache_agreement": agreement.share if agreement and agreement.num_rows else None,
        "is_cached_less_than_planned": agreement is not None and agreement.warns,
        "is_deadline_kept": outlook.is_kept if outlook else None,
        "deadline_outlook": str(outlook) if outlook else None,
        "eta_s": expected_left_s(record.num_rows - counts.num_done, rows_per_s, completion),
        "eta_low_s": completion.low_s if completion else None,
        "eta_high_s": completion.high_s if completion else None,
    }


MOST_ENDED = 1_000
"""Of the jobs that have ended, `status` tells of as many: a home may have had any number of them,
and the daemon has other work."""


def view_stored(
    store: Store, job: str | None = None, job_s: float | None = None
) -> dict[str, object]:
    """The jobs as the store alone has them, oldest first, and how many more have ended; among them
    the one that `job` means. `job_s` is `timeouts.job`. Raises UnknownJobError, StoreError."""
    records, num_more = jobs.list_shown(store, MOST_ENDED, job)
    records = [with_deadline(record, job_s) for record in records]
    return {"jobs": _view_records(store, records), "num_more_ended": num_more}


def view_stored_job(store: Store, job: str) -> dict[str, object]:
    """One job, by id, prefix or name, as the store has it. Raises UnknownJobError, StoreError."""
    return _view_records(store, [jobs.get(store, job)])[0]


def _view_records(store: Store, records: Sequence[JobRecord]) -> list[dict[str, object]]:
    tellings, spent_s = read_tellings(store), read_spent(store)
    return [
        view_job(record, results.count(store, record.seq))
        | {
            "num_cut": results.count_cut(store, record),
            "on_done": tellings.get(record.id),
            "engine_s": spent_s.get(record.id, 0.0),
            "cost": None,
        }
        for record in records
    ]


def expected_left_s(
    num_left: int, rows_per_s: float, completion: Completion | None
) -> float | None:
    """The best guess of the seconds to a job's end: what is predicted, else by its pace."""
    if completion is not None:
        return completion.expected_s
    return num_left / rows_per_s if rows_per_s and num_left else None


def view_engine(link: EngineLink | None) -> dict[str, Any] | None:
    """Its telemetry as a JSON object, with what follows from it; None while it is not heard.

    Rates cover the last half minute, all else is since the engine's start or of now. Shares are 0
    to 1. What is not known yet is None.
    """
    telemetry = None if link is None else link.telemetry
    if link is None or telemetry is None:
        return None
    view: dict[str, Any] = msgspec.to_builtins(telemetry)
    for name, counts in (("online", telemetry.online), ("offline", telemetry.offline)):
        view[name]["hit_rate"] = _share(counts.num_hit_tokens, counts.num_prompt_tokens)
        view[name]["computed_tokens_per_s"] = _rate(link, name)
    for name, latency in (("shared", telemetry.shared), ("alone", telemetry.alone)):
        view[name] |= _means(latency)
    view["slo"] |= _attainment(telemetry)
    view["cost"] |= _ratios(telemetry.cost)
    view["step"]["predicted_over_measured"] = _share(
        telemetry.step.predicted_s, telemetry.step.measured_s
    )
    return view


def _means(latency: LatencyTelemetry) -> dict[str, float | None]:
    return {
        "mean_ttft_s": _share(latency.ttft_s, latency.num_first_tokens),
        "mean_tpot_s": _share(latency.gaps_s, latency.num_gaps),
    }


def _ratios(cost: CostTelemetry) -> dict[str, float | None]:
    """How many times as slow as alone calls were."""
    return {
        f"{name}_ratio": _share(getattr(cost, f"{name}_s") or 0.0, alone_s) if alone_s else None
        for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
        for alone_s in [getattr(cost, f"alone_{name}_s")]
    }


def _attainment(telemetry: Telemetry) -> dict[str, float | None]:
    num_first = telemetry.shared.num_first_tokens + telemetry.alone.num_first_tokens
    met = num_first - telemetry.slo.num_late_first_tokens
    num_tokens = telemetry.slo.num_tokens
    return {
        "ttft_attainment": _share(max(met, 0), num_first),
        "token_attainment": _share(num_tokens - telemetry.slo.num_late_tokens, num_tokens),
    }


def _rate(link: EngineLink, name: str) -> float | None:
    if link.history is None:
        return None
    span_s, first, last = link.history
    before: ClassTelemetry = getattr(first, name)
    now: ClassTelemetry = getattr(last, name)
    return (now.num_computed_tokens - before.num_computed_tokens) / span_s


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
