"""A job that continues another: finished rows whose requests are the same are taken over."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from batchrun.inputs import InputData, RequestTemplate, RowRenderError
from batchrun.jobspec import JobSpec
from batchrun.store import JobRecord, Store, jobs, results
from batchrun.submission import open_submitted
from batchrun.types import Outcome, OutcomeKind, ProgressSink

ROWS_PER_COMMIT = 1_000

Keys = npt.NDArray[np.void]
"""16 bytes a row: a hash of its id, its endpoint and its rendered request; zeros where it has
none."""


def continue_job(
    store: Store, record: JobRecord, *, links: Path, progress: ProgressSink | None = None
) -> int:
    """Give a job that has not started the answers of the job that it continues; returns how many.

    Rows are the same when their ids and their rendered requests are; rows that failed run again.
    May be repeated after a crash. Raises UnknownJobError, StateError (the results were removed) and
    DataError (an input is gone, or not what was submitted).
    """
    spec = JobSpec.model_validate_json(record.spec)
    assert spec.continue_from is not None
    before = jobs.get(store, spec.continue_from)
    results.refuse_removed(store, before.seq)
    old_spec = JobSpec.model_validate_json(before.spec)
    old = request_keys(old_spec, open_submitted(before, old_spec, links=links), progress)
    new = request_keys(spec, open_submitted(record, spec, links=links), progress)
    return _take_over(store, before, record, _same_rows(old, new))


def request_keys(spec: JobSpec, data: InputData, progress: ProgressSink | None = None) -> Keys:
    """The key of each row; closes `data`. 16 bytes of memory a row."""
    template = RequestTemplate(spec, data.columns, model=spec.model)
    keys = np.zeros((data.num_rows, 16), dtype=np.uint8)
    id_columns = () if data.id_column is None else (data.id_column,)
    columns = sorted({*template.columns_used, *id_columns})
    try:
        for first_row, rows in data.iter_rows(columns):
            for row, values in enumerate(rows, start=first_row):
                row_id = str(row) if data.id_column is None else str(values[data.id_column])
                try:
                    body = template.render(values, row_number=row)
                except RowRenderError:
                    continue
                request = json.dumps([row_id, spec.endpoint, body], sort_keys=True)
                digest = xxhash.xxh3_128_digest(request.encode())
                keys[row] = np.frombuffer(digest, dtype=np.uint8)
            if progress is not None:
                progress("comparing rows", first_row + len(rows), data.num_rows)
    finally:
        data.close()
    return keys.view("V16").reshape(-1)


def _same_rows(old: Keys, new: Keys) -> dict[int, int]:
    """Old row -> new row, for requests that both have."""
    _, old_rows, new_rows = np.intersect1d(old.view("S16"), new.view("S16"), return_indices=True)
    is_request = old.view(np.uint8).reshape(-1, 16)[old_rows].any(axis=1)
    return dict(zip(old_rows[is_request].tolist(), new_rows[is_request].tolist(), strict=True))


def _take_over(
    store: Store, before: JobRecord, record: JobRecord, same_rows: dict[int, int]
) -> int:
    num_new = 0
    batch: list[tuple[int, Outcome]] = []
    for result in results.read(store, before.seq):
        row = same_rows.get(result.row)
        if row is None or result.body is None:
            continue
        outcome = Outcome(
            record.id,
            row,
            result.attempts,
            OutcomeKind.OK,
            body=result.body,
            finish_reason=result.finish_reason,
            usage=result.usage,
        )
        batch.append((record.seq, outcome))
        if len(batch) == ROWS_PER_COMMIT:
            num_new += results.commit(store, batch, now_s=time.time())
            batch = []
    return num_new + results.commit(store, batch, now_s=time.time())
