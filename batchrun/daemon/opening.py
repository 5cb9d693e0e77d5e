"""From a job in the store to a job in memory: open its input, check it, plan it.

A batch of OpenAI's API is validated on the way. A job that continues another takes over finished
rows whose requests are the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from batchrun.daemon.dispatcher import MAX_UNTOLD
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.faults import IDENTICAL_ERRORS_LIMIT, SOLO, CircuitBreaker, Doubts, Trials
from batchrun.daemon.job import ActiveJob, estimate_costs, work_of_plan
from batchrun.daemon.writer import until_reached, until_read_or_written, until_stored
from batchrun.engine.engine import AttachedEngine
from batchrun.errors import EngineError, QuotaError, StateError, StorageUnreachableError, StoreError
from batchrun.jobs.batch import check_input, validate_input
from batchrun.jobs.expected_answers import UNKNOWN_MODEL, DefaultModel, open_answers
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.inputs.rows import Row
from batchrun.jobs.inputs.spool import KeptCopy, PlannedRows
from batchrun.jobs.job_file import CONTENT_KEYS
from batchrun.jobs.objects import in_thread
from batchrun.jobs.prompts.template import RequestTemplate, RowRenderError
from batchrun.jobs.prompts.tokens import PLAIN_PROMPTS, PromptReader, read_prompts
from batchrun.jobs.results.file_bytes import FileBytes, remove_input
from batchrun.jobs.results.keeping import drop_input
from batchrun.jobs.spec import JobSpec, told_fields
from batchrun.jobs.submit import open_submitted, plan_again, rows_file, source_of
from batchrun.keys import FairDoor
from batchrun.pool.job_shares import OPERATOR, Owner
from batchrun.pool.prefix_groups import group_rows
from batchrun.pool.radix_tree import build_radix_tree
from batchrun.pool.row_queue import RowQueue
from batchrun.store import api_keys, batches, files, jobs, results
from batchrun.store.api_keys import NO_LIMITS, ApiKeyRecord, KeyLimits, limits_of
from batchrun.store.batches import BatchError, BatchRecord, ValidInput
from batchrun.store.database import Store
from batchrun.store.jobs import ACCEPTED_PREFIX, RESUMED_PREFIX, JobRecord
from batchrun.types import EnginePhase, JobState, Outcome, OutcomeKind, ProgressSink

ROWS_PER_COMMIT = 1_000

ModelFolder = Callable[[str], Path | None]
"""Where the files of a model are, by the name that callers use; None: not on this machine."""

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
                    body = template.render(values, row_number=row, folder=data.folder(row))
                except RowRenderError:
                    continue
                digest = xxhash.xxh3_128_digest(_told(row_id, spec.endpoint, body).encode())
                keys[row] = np.frombuffer(digest, dtype=np.uint8)
            if progress is not None:
                progress("comparing rows", first_row + len(rows), data.num_rows)
    finally:
        data.close()
    return keys.view("V16").reshape(-1)


def _told(row_id: str, endpoint: str, body: Row) -> str:
    """A request as text; the order within the fields beside its prompt counts."""
    key = CONTENT_KEYS[endpoint]
    prompt = json.dumps([row_id, endpoint, body.get(key)], sort_keys=True)
    return prompt + told_fields({name: body[name] for name in body if name != key})


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
    # Until another input was accepted for it, its rows may have been other requests.
    since_s = _read_instant(store, ACCEPTED_PREFIX, before.id)
    for result in results.read(store, before.seq, since_s=since_s):
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
            num_new += results.commit(store, batch, now_s=time.time(), are_taken_over=True)
            batch = []
    return num_new + results.commit(store, batch, now_s=time.time(), are_taken_over=True)


def _read_instant(store: Store, prefix: str, job_id: str) -> float:
    """When a job was last resumed, or its input accepted; 0 where it never was."""
    found = jobs.read_setting(store, prefix + job_id, 0.0)
    return found if isinstance(found, float) else 0.0


log = logging.getLogger(__name__)


def open_job(
    store: Store,
    record: JobRecord,
    *,
    links: Path,
    prompts: PromptReader = PLAIN_PROMPTS,
    default_model: DefaultModel = UNKNOWN_MODEL,
    progress: ProgressSink | None = None,
) -> ActiveJob:
    """Everything the dispatcher needs to run what is left of a job. Blocking; run it in a thread.

    What is left is a set difference: all rows less those that have a result.
    Raises DataError when the input is gone, unreadable, or not what was submitted.
    """
    spec = JobSpec.model_validate_json(record.spec)
    with ExitStack() as exits:
        data = open_submitted(record, spec, links=links)
        exits.callback(data.close)
        template = RequestTemplate(spec, data.columns, model=spec.model)
        plan = plan_again(record, data, template, links=links, prompts=prompts, progress=progress)
        nodes = build_radix_tree(plan.order.shared_chunks)
        groups = group_rows(plan.order, nodes, plan.chains)
        counts = results.count(store, record.seq)
        done = np.asarray(results.done_rows(store, record.seq), dtype=np.int64)
        accused = np.fromiter(results.engine_deaths(store, record.seq), dtype=np.int64)
        failing = spec.max_failed
        sent = plan.order.rows
        stored, done_in_order = (store, record), sent[np.isin(sent, done)]
        ratio = plan.tokens.bytes_per_token
        answers = open_answers(spec, data, ratio, stored, done_in_order, default_model)
        output_tokens = answers.planned_tokens
        limit = None if failing is None else failing.max_failed_rows(record.num_rows)
        resumed_s = _read_instant(store, RESUMED_PREFIX, record.id)
        num_failed = 0 if limit is None else results.count_failed(store, record.seq, resumed_s)
        # A batch of OpenAI's API completes, however many of its rows fail.
        max_identical = math.inf if record.is_batch else IDENTICAL_ERRORS_LIMIT
        job = ActiveJob(
            record=record,
            spec=spec,
            data=data,
            rows=PlannedRows(
                data,
                template.columns_used if len(done) < data.num_rows else (),
                plan.order.rows,
                KeptCopy(rows_file(links, record.id), source_of(record)),
                progress=progress,
            ),
            template=template,
            plan=plan,
            queue=RowQueue(plan.order.rows, nodes, done, work_of_plan(plan, groups, output_tokens)),
            counts=counts,
            attempts=results.attempts_so_far(store, record.seq),
            trials=Trials(dict.fromkeys(accused[~np.isin(accused, done)].tolist(), SOLO)),
            group_of=groups,
            answers=answers,
            costs=estimate_costs(plan, output_tokens, done),
            breaker=CircuitBreaker(limit, num_failed, max_identical=max_identical),
            num_cut=results.count_cut(store, record),
            doubts=Doubts(counts.num_completed, is_batch=record.is_batch),
        )
        exits.pop_all()
        return job


def take_up_job(
    store: Store,
    record: JobRecord,
    *,
    links: Path,
    prompts_of: Callable[[str, datetime], PromptReader],
    default_model: DefaultModel = UNKNOWN_MODEL,
    progress: ProgressSink | None = None,
) -> ActiveJob:
    """Open a job as the files of its model let its prompts be read; a job that continues another
    and has not started gets that one's answers first, as far as they are still there.

    Blocking. Raises what `continue_job` and `open_job` raise, but for removed results.
    """
    spec = JobSpec.model_validate_json(record.spec)
    if record.state is JobState.VALIDATING and spec.continue_from is not None:
        try:
            num_rows = continue_job(store, record, links=links, progress=progress)
            log.info("%s: %d rows taken over", record.id, num_rows)
        except StateError as error:
            log.warning("%s: the rows not taken over run: %s", record.id, error)
    created_at = datetime.fromtimestamp(record.created_at).astimezone()
    with prompts_of(spec.model, created_at) as read:
        return open_job(
            store, record, links=links, prompts=read, default_model=default_model, progress=progress
        )


ENGINE_INTERVAL_S, UNTOLD_INTERVAL_S = 0.5, 5.0
MODEL_NOT_FOUND = "model_not_found"
STORAGE_INTERVAL_S = 5.0
MAX_OPENINGS = 2
"""Inputs that are read at once: a line of each is in memory."""

T = TypeVar("T")


@dataclass(slots=True)
class Opener:
    """Brings jobs into memory. `links` is the folder of pinned inputs, `files` where the files of
    OpenAI's API lie, `model_folder` tells that of a model, `python` the engines'
    interpreter, `key_limits` what holds where a key has no limit of its own, `first_model` what
    batchrun.yaml has the first engine list first; see `Daemon`."""

    store: Store
    slots: Sequence[Slot]
    links: Path
    model_folder: ModelFolder
    files: FileBytes | None
    python: Path | None = None
    key_limits: KeyLimits = NO_LIMITS
    first_model: str | None = None
    _reading: FairDoor = field(default_factory=partial(FairDoor, MAX_OPENINGS))

    async def open(self, record: JobRecord, progress: ProgressSink) -> ActiveJob | None:
        """The job in memory; None for a batch that is not to run. Waits for the store.

        Raises DataError, and what else `take_up_job` raises.
        """
        started: JobRecord | None = record
        batch = await until_reached(batches.find, self.store, record.id)
        key = None if batch is None else await until_reached(api_keys.find, self.store, batch.owner)
        if batch is not None and record.state is JobState.VALIDATING:
            started = await self._validate(batch, key, progress)
        if started is None:
            return None
        default_model = await self._default_model()
        take_up = partial(
            take_up_job, links=self.links, prompts_of=self._prompts, default_model=default_model
        )
        owner = OPERATOR if key is None else Owner(key.id, is_bounded=key.role == "user")
        work = partial(until_read_or_written, take_up, self.store, started, progress=progress)
        job = await self._read(started, owner.id, work, progress)
        job.owner = owner
        return job

    def _prompts(self, model: str, now: datetime) -> PromptReader:
        return read_prompts(self.model_folder(model), now=now, python=self.python)

    async def _default_model(self) -> DefaultModel:
        """As told, configured or asked for now. Attached engines may reply with another name."""
        name = next((slot.default_model for slot in self.slots), None) or self.first_model
        if name is None and self.slots:
            name = next(iter(await _ask_for_models(self.slots[0]) or ()), None)
        are_attached = any(isinstance(slot.engine, AttachedEngine) for slot in self.slots)
        are_known = name is not None and all(slot.default_from is None for slot in self.slots)
        return DefaultModel(name, is_sure=are_known and not are_attached)

    async def _read(
        self,
        record: JobRecord,
        owner: str,
        work: Callable[[], Awaitable[T]],
        progress: ProgressSink,
    ) -> T:
        """Read an input in its owner's turn. A batch, which nobody can resume, waits while object
        storage, the disk or the store does not let it and its state stays."""
        while True:
            try:
                async with self._reading.passed(owner):
                    return await work()
            except (StorageUnreachableError, StoreError) as error:
                log.warning("%s: %s", record.id, error)
                now = await until_reached(jobs.get, self.store, record.id)
                if not record.is_batch or now.state is not record.state:
                    raise
                progress(f"{record.state}, waiting for the input: {error}", 0, 0)
                await asyncio.sleep(STORAGE_INTERVAL_S)

    async def _validate(
        self, batch: BatchRecord, owner: ApiKeyRecord | None, progress: ProgressSink
    ) -> JobRecord | None:
        """Start the job if its input is valid, or let it fail.

        Returns None where it does not run: it failed, or was cancelled or paused meanwhile.
        """
        assert self.files is not None
        record = batch.job
        file = await until_reached(
            files.find,
            self.store,
            batch.input_file_id,
            now_s=time.time(),
            scope=None if owner is None else owner.scope,
        )
        found: ValidInput | list[BatchError] = check_input(batch, file)
        if file is not None and not found:
            found = await self._check_for_engines(batch, progress)
        with suppress(StateError):
            await self._conclude(batch, found, owner)
        now = await until_reached(jobs.get, self.store, record.id)
        return now if now.state is JobState.RUNNING else None

    async def _conclude(
        self, batch: BatchRecord, found: ValidInput | list[BatchError], owner: ApiKeyRecord | None
    ) -> None:
        """Start the batch, or let it fail. Raises StateError where it is not validated any more."""
        batch_id = batch.job.id
        if isinstance(found, ValidInput):
            quota = None if owner is None else limits_of(owner, self.key_limits).enqueued_tokens
            start = partial(batches.start, now_s=time.time(), max_enqueued_tokens=quota)
            try:
                await until_stored(start, self.store, batch_id, found)
            except (QuotaError, StateError) as error:
                await until_stored(drop_input, self.store, batch, found.pin, links=self.links)
                if isinstance(error, StateError):
                    raise
                found = [BatchError("token_limit_exceeded", str(error))]
            else:
                return
        await until_stored(batches.fail, self.store, batch_id, found, now_s=time.time())
        if self.files is not None:
            await until_stored(remove_input, self.store, self.files, batch_id)

    async def _check_lines(
        self, batch: BatchRecord, models: frozenset[str], progress: ProgressSink
    ) -> ValidInput | list[BatchError]:
        assert self.files is not None
        check = partial(validate_input, links=self.links, progress=progress)
        work = partial(in_thread, check, batch, self.files, models)
        return await self._read(batch.job, batch.owner or OPERATOR.id, work, progress)

    async def _check_for_engines(
        self, batch: BatchRecord, progress: ProgressSink
    ) -> ValidInput | list[BatchError]:
        """A model is unknown only once every engine has told what it serves; until then the batch
        waits, unless more is wrong with it."""
        served = _Served()
        while True:
            served = await self._served_models(batch.job, progress, served)
            found = await self._check_lines(batch, served.models, progress)
            if served.is_all or isinstance(found, ValidInput):
                return found
            if others := [error for error in found if error.code != MODEL_NOT_FOUND]:
                return others

    async def _served_models(
        self, record: JobRecord, progress: ProgressSink, before: _Served
    ) -> _Served:
        """What the engines serve: as soon as it is more than `before` or all, or the job is not
        validated any more."""
        num_untold = Counter[int]()
        while True:
            told = await asyncio.gather(*map(_ask_for_models, self.slots))
            models, untold = frozenset[str](), list[Slot]()
            for number, (slot, names) in enumerate(zip(self.slots, told, strict=True)):
                is_ready = slot.engine.state is EnginePhase.READY
                num_untold[number] = num_untold[number] + 1 if is_ready and names is None else 0
                if names == () or (_may_serve_any(slot) and num_untold[number] >= MAX_UNTOLD):
                    return _Served(_AnyModel(), is_all=True)
                models |= {*(names or ()), *(slot.models or ())}
                if not (names or slot.models or slot.is_off):
                    untold.append(slot)
            now = await until_reached(jobs.get, self.store, record.id)
            if now.state is not JobState.VALIDATING:
                return _Served(models, is_all=True)
            if models and (not untold or models != before.models):
                return _Served(models, is_all=not untold)
            progress(_explain_wait(untold) if models else "waiting for an engine", 0, 0)
            await asyncio.sleep(UNTOLD_INTERVAL_S if models else ENGINE_INTERVAL_S)


class _AnyModel(frozenset[str]):
    """All models that there are."""

    def __contains__(self, _: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Served:
    """Models that engines have told; `is_all`: none that is to come has others."""

    models: frozenset[str] = frozenset()
    is_all: bool = False


async def _ask_for_models(slot: Slot) -> tuple[str, ...] | None:
    """None where the engine does not tell now. Who has told is asked by the dispatcher."""
    if slot.models:
        return tuple(slot.models)
    try:
        return await slot.engine.client.models()
    except EngineError:
        return None


def _explain_wait(untold: Sequence[Slot]) -> str:
    """That a batch waits for what these engines have; one that failed may yet be mended."""
    if all(slot.is_lost for slot in untold):
        engine = untold[0].engine
        what = f"engine {engine.name}, which has failed, to tell its models"
        return f"waiting for {what}: {engine.stage}"
    return "waiting for engines that may have its model"


def _may_serve_any(slot: Slot) -> bool:
    """Whether nothing is known of the engine's models, so that silence says that it has any."""
    return slot.models == () and slot.expected_model is None
