"""Builders of running jobs without a daemon."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.daemon.faults import Trials
from batchrun.daemon.job import ActiveJob, estimate_costs, work_of_plan
from batchrun.daemon.opening import open_job
from batchrun.estimator.answer_length import AnswerLengths
from batchrun.jobs.expected_answers import first_guess
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.prompts.tokens import TokenRatio
from batchrun.jobs.submit import JobPlan, prepare_job
from batchrun.pool.prefix_groups import group_rows
from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainBuilder
from batchrun.pool.radix_tree import build_radix_tree, order_by_prefix
from batchrun.pool.row_queue import RowQueue
from batchrun.store import jobs
from batchrun.store.database import open_store

SALT = 7
JOB_FILE = """\
name: sample
endpoint: ENDPOINT
input:
  path: rows.parquet
  CONTENT: "{{ text }}"
output: {path: out.parquet}
"""


def make_active_job(folder: Path, texts: list[str], endpoint: str = "/v1/completions") -> ActiveJob:
    """A job of one prompt for each text, opened from a store of its own in `folder`."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"text": texts}), folder / "rows.parquet")
    content = "prompt" if endpoint == "/v1/completions" else "input"
    text = JOB_FILE.replace("ENDPOINT", endpoint).replace("CONTENT", content)
    (folder / "job.yaml").write_text(text)
    spec = load_job_file(folder / "job.yaml", cwd=folder)
    store = open_store(folder / "store.db")
    record = jobs.create(store, prepare_job(spec, links=folder / "links"), now_s=0.0)
    job = open_job(store, record, links=folder / "links")
    store.close()
    return job


@cache
def _pattern() -> ActiveJob:
    """A job as the daemon opens it; the tests give it other trees."""
    with tempfile.TemporaryDirectory() as folder:
        return make_active_job(Path(folder), ["a row"])


def make_tree_job(
    name: str, texts: Sequence[str], weight: float = 1.0, done: Collection[int] = ()
) -> ActiveJob:
    """A job with a row for each text, of one chunk per letter; `done` rows have results."""
    prompts = ["".join(letter * CHUNK_BYTES for letter in text).encode() for text in texts]
    builder = ChainBuilder(SALT)
    builder.add(prompts)
    chains = builder.build()
    order = order_by_prefix(chains)
    text_bytes = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    new_bytes = text_bytes.copy()
    new_bytes[order.rows] -= order.shared_chunks * CHUNK_BYTES
    plan = JobPlan(chains, order, text_bytes, new_bytes, TokenRatio())
    job = _pattern()
    spec = job.spec.model_copy(update={"weight": weight})
    rows_done = np.array(sorted(done), dtype=np.int64)
    nodes = build_radix_tree(order.shared_chunks)
    groups = group_rows(order, nodes, chains)
    work = work_of_plan(plan, groups, first_guess(spec))
    queue = RowQueue(order.rows, nodes, rows_done, work)
    return replace(
        job,
        record=replace(job.record, id=name),
        spec=spec,
        plan=plan,
        queue=queue,
        group_of=groups,
        answers=AnswerLengths([first_guess(spec)]),
        costs=estimate_costs(plan, first_guess(spec), rows_done),
        trials=Trials(),
        current_nodes={},
    )
