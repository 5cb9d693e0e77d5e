"""From a job in the store to a job in memory: open its input, check it, plan it."""

from __future__ import annotations

from pathlib import Path

from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.breaker import CircuitBreaker
from batchrun.inputs import RequestTemplate
from batchrun.jobspec import JobSpec
from batchrun.planning import plan_job
from batchrun.pool import RowQueue, find_prefix_nodes
from batchrun.store import JobRecord, Store, results
from batchrun.submission import open_submitted
from batchrun.types import ProgressSink


def open_job(
    store: Store, record: JobRecord, *, links: Path, progress: ProgressSink | None = None
) -> ActiveJob:
    """Everything the dispatcher needs to run what is left of a job. Blocking; run it in a thread.

    What is left is a set difference: all rows less those that have a result.
    Raises DataError when the input is gone, unreadable, or not what was submitted.
    """
    spec = JobSpec.model_validate_json(record.spec)
    data = open_submitted(record, spec, links=links)
    template = RequestTemplate(spec, data.columns, model=spec.model)
    plan = plan_job(spec, data, template, progress)
    done = results.done_rows(store, record.seq).tolist()
    counts = results.count(store, record.seq)
    queue = RowQueue(plan.order.rows, done)
    limit = None if spec.max_failed is None else spec.max_failed.max_failed_rows(record.num_rows)
    return ActiveJob(
        record=record,
        spec=spec,
        data=data,
        template=template,
        plan=plan,
        queue=queue,
        counts=counts,
        attempts=results.attempts_so_far(store, record.seq),
        deaths=results.engine_deaths(store, record.seq),
        group_of=plan.group_of(),
        nodes=find_prefix_nodes(plan.order.shared_chunks),
        pending_from=queue.pending_from(),
        breaker=CircuitBreaker(limit, counts.num_failed),
    )
