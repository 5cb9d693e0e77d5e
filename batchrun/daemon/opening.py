"""From a job in the store to a job in memory: open its input, check it, plan it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.breaker import CircuitBreaker
from batchrun.daemon.cache_watch import CacheWatch
from batchrun.daemon.row_costs import estimate_costs
from batchrun.daemon.trials import SOLO, Trials
from batchrun.inputs import InputData, RequestTemplate
from batchrun.inputs.planned_rows import PlannedRows
from batchrun.inputs.prompts import PLAIN_PROMPTS, PromptReader
from batchrun.jobspec import JobSpec
from batchrun.planning import plan_job
from batchrun.pool import RowQueue, find_prefix_nodes
from batchrun.store import JobRecord, Store, results
from batchrun.submission import open_submitted
from batchrun.types import ProgressSink


def open_job(
    store: Store,
    record: JobRecord,
    *,
    links: Path,
    prompts: PromptReader = PLAIN_PROMPTS,
    progress: ProgressSink | None = None,
) -> ActiveJob:
    """Everything the dispatcher needs to run what is left of a job. Blocking; run it in a thread.

    What is left is a set difference: all rows less those that have a result.
    Raises DataError when the input is gone, unreadable, or not what was submitted.
    """
    spec = JobSpec.model_validate_json(record.spec)
    data = open_submitted(record, spec, links=links)
    try:
        return _plan(store, record, spec, data, (links, prompts, progress))
    except BaseException:
        data.close()
        raise


def _plan(
    store: Store,
    record: JobRecord,
    spec: JobSpec,
    data: InputData,
    how: tuple[Path, PromptReader, ProgressSink | None],
) -> ActiveJob:
    links, prompts, progress = how
    template = RequestTemplate(spec, data.columns, model=spec.model)
    plan = plan_job(spec, data, template, prompts=prompts, progress=progress)
    counts = results.count(store, record.seq)
    rows = PlannedRows(
        data, template.columns_used, plan.order.rows, scratch=links, progress=progress
    )
    nodes = find_prefix_nodes(plan.order.shared_chunks)
    done = np.asarray(results.done_rows(store, record.seq), dtype=np.int64)
    queue = RowQueue(plan.order.rows, nodes, done)
    limit = None if spec.max_failed is None else spec.max_failed.max_failed_rows(record.num_rows)
    return ActiveJob(
        record=record,
        spec=spec,
        data=data,
        rows=rows,
        template=template,
        plan=plan,
        queue=queue,
        counts=counts,
        attempts=results.attempts_so_far(store, record.seq),
        trials=Trials(dict.fromkeys(results.engine_deaths(store, record.seq), SOLO)),
        group_of=plan.group_of(),
        costs=estimate_costs(spec, plan, counts, done),
        cache=CacheWatch(plan, queue),
        breaker=CircuitBreaker(limit, counts.num_failed),
    )
