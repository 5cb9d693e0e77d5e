"""What `status` shows of a job: the same whether a daemon runs it or the store is all there is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from batchrun.daemon.active_job import ActiveJob
from batchrun.jobspec import JobSpec
from batchrun.pool import Completion, Outlook
from batchrun.store import Counts, JobRecord


@dataclass(frozen=True, slots=True)
class JobView:
    """One job, for people and machines. Rates cover the last half minute; shares are 0 to 1.

    `best_hit_rate` is what an unlimited prefix cache would reach, `hit_rate` what the engines
    returned; both are None while unknown, as are the seconds to the job's end: `eta_s` is the best
    guess, and `eta_low_s` to `eta_high_s` holds nine times of ten. `cache_agreement` compares the
    cached
    tokens that were foretold for the rows done with those that came back. `is_deadline_kept` and
    `deadline_outlook` are None without a deadline, or before there is a forecast.
    """

    id: str
    name: str
    state: str
    reason: str | None
    stage: str | None
    output_path: str
    created_at: float
    expires_at: float | None
    finished_at: float | None
    num_rows: int
    num_completed: int
    num_failed: int
    num_in_flight: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    rows_per_s: float
    served_tokens_per_s: float
    computed_tokens_per_s: float
    hit_rate: float | None
    best_hit_rate: float | None
    estimate_error: float | None
    cache_agreement: float | None
    is_cached_less_than_planned: bool
    is_deadline_kept: bool | None
    deadline_outlook: str | None
    eta_s: float | None
    eta_low_s: float | None
    eta_high_s: float | None

    @property
    def num_done(self) -> int:
        """Rows that have a result."""
        return self.num_completed + self.num_failed

    def to_json(self) -> dict[str, object]:
        """A flat JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Foretold:
    """What a running daemon expects of a job, as far as it knows."""

    outlook: Outlook | None = None
    completion: Completion | None = None


NOTHING = Foretold()


def view_job(
    record: JobRecord,
    counts: Counts,
    *,
    active: ActiveJob | None = None,
    foretold: Foretold = NOTHING,
    stage: str | None = None,
    now_s: float = 0.0,
) -> JobView:
    """The view of a job; `active`, `foretold` and `now_s` (monotonic) where a daemon runs it.

    Until its end can be foretold, `eta_s` goes by the rows of the last half minute.
    """
    outlook, completion = foretold.outlook, foretold.completion
    agreement = active.cache.agreement if active else None
    rows_per_s, served, computed = active.pace.rates(now_s) if active else (0.0, 0.0, 0.0)
    left = record.num_rows - counts.num_done
    by_rows_s = left / rows_per_s if rows_per_s and left else None
    prompt = counts.num_prompt_tokens
    return JobView(
        id=record.id,
        name=record.name,
        state=str(record.state),
        reason=record.reason,
        stage=stage,
        output_path=output_path(record),
        created_at=record.created_at,
        expires_at=record.expires_at,
        finished_at=record.finished_at,
        num_rows=record.num_rows,
        num_completed=counts.num_completed,
        num_failed=counts.num_failed,
        num_in_flight=active.queue.num_in_flight if active else 0,
        num_prompt_tokens=prompt,
        num_output_tokens=counts.num_output_tokens,
        num_cached_tokens=counts.num_cached_tokens,
        rows_per_s=rows_per_s,
        served_tokens_per_s=served,
        computed_tokens_per_s=computed,
        hit_rate=counts.num_cached_tokens / prompt if prompt else None,
        best_hit_rate=active.plan.shared_share if active else None,
        estimate_error=active.plan.tokens.mape if active else None,
        cache_agreement=agreement.share if agreement and agreement.num_rows else None,
        is_cached_less_than_planned=agreement is not None and agreement.warns,
        is_deadline_kept=outlook.is_kept if outlook else None,
        deadline_outlook=str(outlook) if outlook else None,
        eta_s=completion.expected_s if completion else by_rows_s,
        eta_low_s=completion.low_s if completion else None,
        eta_high_s=completion.high_s if completion else None,
    )


def output_path(record: JobRecord) -> str:
    """Where the job's output file goes."""
    path = json.loads(record.spec).get("output", {}).get("path", "")
    return str(path)


def spec_of(record: JobRecord) -> JobSpec:
    """The job's specification as it was submitted."""
    return JobSpec.model_validate_json(record.spec)
