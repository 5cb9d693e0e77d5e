"""`batchrun.map` and `batchrun.stream`: a question about every row, and the answers beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import polars as pl
from pydantic import BaseModel

from batchrun.control.client import DaemonClient
from batchrun.control.following import is_over, views
from batchrun.control.submitting import stored_job
from batchrun.errors import InputError, RowsFailedError, known_name
from batchrun.jobs.results.output_file import error_text, response_text
from batchrun.jobs.spec import JobSpec
from batchrun.python.asking import (
    HINT,
    OUTPUT,
    Asked,
    Question,
    Template,
    ask,
    check_whole,
    columns_used,
    deployment,
    home_of,
    run,
)
from batchrun.python.frames import frame_of, frame_of_rows
from batchrun.store import results
from batchrun.store.results import StoredResult

Errors = Literal["column", "raise"]
ERRORS: tuple[Errors, ...] = ("column", "raise")
LATE_COMMIT_S = 60.0
"""A clock of the store may be so late, and a result so long on its way; the end shows all."""
RESTS_PER_LOOK = 10
"""A look goes through all rows that are done: of many it takes long, and comes seldom."""
F = TypeVar("F")


def map(
    frame: F,
    template: Template,
    *,
    model: str | None = None,
    schema: type[BaseModel] | None = None,
    errors: Errors = "column",
    progress: bool = True,
    home: Path | str | None = None,
    **request: Any,
) -> F:
    """The frame (polars, pandas or Arrow) with a model's answer to `template` beside every row.

    `template` is the user's message, Jinja2 over the row's columns, or a list of messages;
    `request` are other fields of OpenAI's body. Adds `response`, or a typed column for each field
    of `schema`; `finish_reason`; and `error`, which is null where all went well. Rows keep their
    order. The deployment of `home` is used, or one started until the answers are there. The same
    call on the same rows is the same job: interrupted, killed or made again, no answer that is
    there is computed again; rows that failed run again.

    Raises InputError, JobSpecError and DataError before anything runs, JobFailedError where the
    job paused or failed, and RowsFailedError with `errors="raise"`.
    """
    _check_errors(errors)
    given, place = frame_of(frame), home_of(home)
    question = Question(template, model, schema, request)
    if given.num_rows:
        asked = ask(question, given, place, progress=progress)
        answers = asked.answers(run(asked, progress=progress), errors)
    else:
        columns_used(question, given, place)
        answers = question.columns_of(pl.DataFrame(schema=OUTPUT), errors)
    joined: F = given.joined(answers)
    return joined


async def stream(
    rows: Iterable[Mapping[str, Any]],
    template: Template,
    *,
    model: str | None = None,
    schema: type[BaseModel] | None = None,
    errors: Errors = "column",
    home: Path | str | None = None,
    **request: Any,
) -> AsyncIterator[dict[str, Any]]:
    """Each row with its answer, as `map` adds it, as soon as it is there: not in order.

    All rows are read first, for those that share a prefix run together. Raises what `map` raises;
    with `errors="raise"` at the first row that failed.
    """
    _check_errors(errors)
    given, place = _plain_rows(rows), home_of(home)
    if not given:
        return
    frame = await asyncio.to_thread(frame_of_rows, given)
    question = Question(template, model, schema, request)
    asked = await asyncio.to_thread(ask, question, frame, place, progress=False)
    found = await asyncio.to_thread(asked.found)
    if found is not None:
        answers = await asyncio.to_thread(asked.answers, found, "column")
        for number, answer in enumerate(answers.iter_rows(named=True)):
            yield given[number] | _checked(number, answer, errors)
        return
    async with _entered(deployment(model, place, progress=False)) as client:
        job_id = await asyncio.to_thread(asked.begin, client)
        is_seen = np.zeros(len(given), dtype=np.bool_)
        seen_at_s, rests_until_s, looks = 0.0, 0.0, views(client, job_id)
        while (view := await asyncio.to_thread(next, looks, None)) is not None:
            last, began_s = view, time.monotonic()
            if began_s < rests_until_s and not is_over(view):
                continue
            since_s = 0.0 if is_over(view) else seen_at_s - LATE_COMMIT_S
            seen_at_s = time.time()
            new = await asyncio.to_thread(_new_answers, asked, job_id, is_seen, since_s)
            rests_until_s = began_s + (time.monotonic() - began_s) * RESTS_PER_LOOK
            for number, answer in new:
                yield given[number] | _checked(number, answer, errors)
        check_whole(last)


def _plain_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    given = list(rows) if isinstance(rows, Iterable) else [rows]
    if not all(isinstance(row, Mapping) for row in given):
        raise InputError("stream takes rows, each a dict by column; frames go to batchrun.map")
    return [dict(row) for row in given]


def _check_errors(errors: str) -> None:
    try:
        known_name(str(errors), ERRORS)
    except ValueError as problem:
        raise InputError(f"errors {problem}") from None


@asynccontextmanager
async def _entered(up: AbstractContextManager[DaemonClient]) -> AsyncIterator[DaemonClient]:
    """What starts and stops a deployment, in a thread; of who is cancelled while it starts, the
    thread stops it once it is up."""
    thread = ThreadPoolExecutor(1)
    entering = thread.submit(up.__enter__)
    try:
        yield await asyncio.wrap_future(entering)
    finally:
        is_entered = entering.done()
        leaving = thread.submit(_leave, up, entering)
        thread.shutdown(wait=False)
        if is_entered:
            await asyncio.shield(asyncio.wrap_future(leaving))


def _leave(up: AbstractContextManager[DaemonClient], entering: Future[DaemonClient]) -> None:
    if not entering.cancelled() and entering.exception() is None:
        up.__exit__(None, None, None)


def _checked(number: int, answer: dict[str, Any], errors: str) -> dict[str, Any]:
    """A row's answer. Raises RowsFailedError where errors are raised and it failed."""
    if errors == "raise" and answer["error"] is not None:
        raise RowsFailedError(f"row {number} failed: {answer['error']}; {HINT}")
    return answer


def _new_answers(
    asked: Asked, job_id: str, is_seen: np.typing.NDArray[np.bool_], since_s: float
) -> list[tuple[int, dict[str, Any]]]:
    """The rows, with their answers, that have ended since then and were not seen, and now are."""
    with stored_job(job_id, asked.home) as (store, record):
        done = results.done_rows(store, record.seq, since_s)
        new = done[~is_seen[done]].tolist()
        is_seen[new] = True
        endpoint = JobSpec.model_validate_json(record.spec).endpoint
        found = list(_as_output(results.read_rows(store, record.seq, new), endpoint))
    output = pl.DataFrame(found, schema=OUTPUT, orient="row")
    table = asked.question.columns_of(output, "column")
    return list(zip(new, table.iter_rows(named=True), strict=True))


def _as_output(
    found: Sequence[StoredResult], endpoint: str
) -> Iterator[tuple[str | None, str | None, str | None]]:
    """The columns of an output file that answers are made of."""
    for result in found:
        text = None if result.body is None else response_text(endpoint, result.body)
        yield text, result.finish_reason, error_text(result.error)
