"""From a job in the store to a job in memory: open its input, check it, plan it."""

from __future__ import annotations

import logging
import math
from datetime import datetime
from pathlib import Path

import numpy as np

from batchrun.continuing import continue_job
from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.breaker import IDENTICAL_ERRORS_LIMIT, CircuitBreaker
from batchrun.daemon.cache_watch import CacheWatch
from batchrun.daemon.row_costs import estimate_costs
from batchrun.daemon.trials import SOLO, Trials
from batchrun.daemon.view import spec_of
from batchrun.inputs import InputData, RequestTemplate
from batchrun.inputs.planned_rows import PlannedRows
from batchrun.inputs.prompts import PLAIN_PROMPTS, PromptReader, read_prompts
from batchrun.jobspec import JobSpec
from batchrun.planning import plan_job
from batchrun.pool import RowQueue, find_prefix_nodes
from batchrun.store import JobRecord, Store, results
from batchrun.submission import open_submitted
from batchrun.types import JobState, ProgressSink

log = logging.getLogger(__name__)


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


def take_up_job(
    store: Store,
    record: JobRecord,
    *,
    links: Path,
    model_folder: Path | None,
    progress: ProgressSink | None = None,
) -> ActiveJob:
    """Open a job as the files of its model let its prompts be read; a job that continues another
    and has not started gets that one's answers first.

    Blocking. Raises what `continue_job` and `open_job` raise.
    """
    if record.state is JobState.VALIDATING and spec_of(record).continue_from is not None:
        num_rows = continue_job(store, record, links=links, progress=progress)
        log.info("%s: %d rows taken over", record.id, num_rows)
    created_at = datetime.fromtimestamp(record.created_at).astimezone()
    prompts = read_prompts(model_folder, now=created_at)
    return open_job(store, record, links=links, prompts=prompts, progress=progress)


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
    # A batch of OpenAI's API completes, however many of its rows fail.
    max_identical = math.inf if record.is_batch else IDENTICAL_ERRORS_LIMIT
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
        breaker=CircuitBreaker(limit, counts.num_failed, max_identical=max_identical),
    )
