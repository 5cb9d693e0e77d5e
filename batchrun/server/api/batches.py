"""`/v1/batches`: create, list, retrieve, cancel; what callers ask for is checked as OpenAI does."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from fastapi import APIRouter, Request, params
from fastapi.responses import Response

from batchrun.daemon.daemon import Daemon
from batchrun.errors import StateError, shortened
from batchrun.jobs.batch import new_batch_job
from batchrun.jobs.spec import MAX_WEIGHT, MIN_WEIGHT, Endpoint
from batchrun.keys import FairDoor
from batchrun.quantities import parse_duration_s
from batchrun.server.api.errors import (
    ANYBODY,
    ApiError,
    AsciiJson,
    Caller,
    caller_of,
    check_choice,
    check_expiry,
    check_range,
    limit_in,
    object_of,
    refuse_unknown,
    required_text,
    wrong_type,
)
from batchrun.server.api.files import JsonObject, instant_of, write_page
from batchrun.store import batches, results
from batchrun.store.batches import BatchRecord, NewBatch, WantedBatch
from batchrun.store.jobs import Counts
from batchrun.strict import parse_json
from batchrun.types import JobState

ENDPOINTS: Sequence[str] = get_args(Endpoint)
KEYS = frozenset({
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
    "batchrun",
})
MAX_FILE_ID_CHARS = 256
MAX_PAIRS = 16
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512
MAX_USER_WEIGHT = 1
"""The weight of a batch that names none: no user key takes from the share of another."""
MAX_IDEMPOTENCY_KEY_CHARS = 255
EXTENSION = "batchrun"
ENDINGS = (JobState.COMPLETED, JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch to be made, and how its job is to run."""

    batch: NewBatch
    deadline_s: float
    weight: float


def read_batch_request(
    document: Mapping[str, object],
    windows: Sequence[str],
    idempotency_key: str | None,
    caller: Caller = ANYBODY,
) -> BatchRequest:
    """The request in a JSON object; `windows` are the completion windows that are served.

    An idempotency key is the caller's own. Who is no admin may not put his batches before those of
    others: unless his key says otherwise, his weight is at most `MAX_USER_WEIGHT`, his deadline no
    sooner than the shortest of `windows`.

    Raises ApiError.
    """
    refuse_unknown(document, KEYS)
    input_file_id = required_text(document, "input_file_id")
    if "\0" in input_file_id or not 0 < len(input_file_id) <= MAX_FILE_ID_CHARS:
        message = f"Invalid 'input_file_id': expected the id of a file, got '{input_file_id[:64]}'."
        raise ApiError(400, message, code="invalid_value", param="input_file_id")
    endpoint = required_text(document, "endpoint")
    check_choice("endpoint", endpoint, ENDPOINTS)
    window = required_text(document, "completion_window")
    check_choice("completion_window", window, windows)
    usual_weight = min(1.0, caller.limits.max_weight or 1.0)
    weight, deadline_s = _extension(document.get(EXTENSION), usual_weight)
    deadline_s = min(deadline_s, parse_duration_s(window))
    _check_weight(weight, caller)
    _check_deadline(deadline_s, caller, windows)
    batch = NewBatch(
        input_file_id=input_file_id,
        endpoint=endpoint,
        completion_window=window,
        metadata=_metadata(document.get("metadata")),
        output_expires_after_s=_output_expiry(document.get("output_expires_after")),
        request_hash=_sha256(json.dumps(document, sort_keys=True)),
        idempotency_hash=_idempotency_hash(idempotency_key, caller.owner),
        owner=caller.owner,
    )
    return BatchRequest(batch, deadline_s, weight)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _idempotency_hash(key: str | None, owner: str | None) -> str | None:
    if key is None:
        return None
    if not 0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS:
        message = f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_KEY_CHARS} characters."
        raise ApiError(400, message, code="invalid_value")
    return _sha256(key if owner is None else f"{owner}\n{key}")


def _metadata(value: object) -> Mapping[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("metadata", "an object", value)
    if len(value) > MAX_PAIRS:
        message = (
            f"Invalid 'metadata': too many properties. Expected an object with at most {MAX_PAIRS} "
            f"properties, but got an object with {len(value)} properties instead."
        )
        raise ApiError(400, message, code="object_above_max_properties", param="metadata")
    for key, text in value.items():
        _check_pair(key, text)
    return value


def _check_pair(key: str, text: object) -> None:
    param = f"metadata.{key[: MAX_KEY_CHARS + 1]}"
    if len(key) > MAX_KEY_CHARS:
        message = (
            f"Invalid property name in 'metadata': '{key[:MAX_KEY_CHARS]}...' is too long. "
            f"Expected a property name with at most {MAX_KEY_CHARS} characters, but got one with "
            f"{len(key)} characters instead."
        )
        raise ApiError(400, message, code="property_name_above_max_length", param=param)
    if not isinstance(text, str):
        raise wrong_type(param, "a string", text)
    if len(text) > MAX_VALUE_CHARS:
        message = (
            f"Invalid '{param}': string too long. Expected a string with maximum length "
            f"{MAX_VALUE_CHARS}, but got a string with length {len(text)} instead."
        )
        raise ApiError(400, message, code="string_above_max_length", param=param)


def _output_expiry(value: object) -> int | None:
    name = "output_expires_after"
    given = object_of(value, {"anchor", "seconds"}, name)
    return None if given is None else check_expiry(name, given.get("anchor"), given.get("seconds"))


def _extension(value: object, usual_weight: float) -> tuple[float, float]:
    """(weight, deadline in seconds from now; infinity without one)."""
    given = object_of(value, {"weight", "deadline"}, EXTENSION) or {}
    weight = given.get("weight", usual_weight)
    if not isinstance(weight, int | float) or isinstance(weight, bool):
        raise wrong_type(f"{EXTENSION}.weight", "a number", weight)
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise _bad_extension("weight", f"must be from {MIN_WEIGHT:f} to {MAX_WEIGHT}")
    return float(weight), _deadline_s(given.get("deadline"))


def _check_weight(weight: float, caller: Caller) -> None:
    own = caller.limits.max_weight
    if own is not None and weight > own:
        raise _bad_extension("weight", f"must be at most {own:g} with this API key")
    if own is None and not caller.is_admin and weight > MAX_USER_WEIGHT:
        problem = f"must be at most {MAX_USER_WEIGHT} with a user key"
        raise _bad_extension("weight", f"{problem}; an admin key may set up to {MAX_WEIGHT}")


def _check_deadline(deadline_s: float, caller: Caller, windows: Sequence[str]) -> None:
    own_s = caller.limits.min_deadline_s
    if own_s is not None and deadline_s < own_s:
        raise _bad_extension("deadline", f"must be at least {own_s:g} s with this API key")
    shortest = min(windows, key=parse_duration_s)
    if own_s is None and not caller.is_admin and deadline_s < parse_duration_s(shortest):
        problem = f"must be at least {shortest} with a user key, the shortest completion window"
        raise _bad_extension("deadline", f"{problem}; an admin key may set a shorter one")


def _deadline_s(value: object) -> float:
    if value is None:
        return float("inf")
    try:
        return parse_duration_s(value)
    except ValueError as error:
        raise _bad_extension("deadline", str(error)) from None


def _bad_extension(key: str, problem: str) -> ApiError:
    param = f"{EXTENSION}.{key}"
    return ApiError(400, f"Invalid '{param}': {problem}.", code="invalid_value", param=param)


DEFAULT_LIMIT = 20
MAX_LIMIT = 100
MAX_BODY_BYTES = 1 << 20
SETTLE_S = 60.0
"""So long requests in flight may go on after a cancel; then they are aborted."""
IS_CANCELLED = frozenset({"cancelling", "cancelled"})


class Batches:
    """The batches of one daemon. `windows` are the completion windows served; answers that
    `batchrun results` writes go to `results_folder`."""

    def __init__(self, daemon: Daemon, results_folder: Path, windows: Sequence[str]) -> None:
        self._daemon = daemon
        self._results_folder = results_folder
        self._windows = windows
        self._pages = FairDoor(1)

    async def create(self, request: Request) -> AsciiJson:
        """`POST /v1/batches`. What was answered with 200 survives any crash."""
        document = await _read_json(request)
        key = request.headers.get("idempotency-key")
        caller = caller_of(request)
        wanted = read_batch_request(document, self._windows, key, caller)
        job = new_batch_job(
            self._results_folder,
            wanted.batch.endpoint,
            deadline_s=wanted.deadline_s,
            weight=wanted.weight,
        )
        limits = (caller.limits.concurrent_batches, caller.limits.stored_bytes)
        made = await self._daemon.submit_batch(WantedBatch(wanted.batch, job, *limits))
        if made.request_hash != wanted.batch.request_hash:
            raise ApiError(
                409, f"This Idempotency-Key was used for another request ({made.job.id})."
            )
        return await self._answer(made)

    async def list(self, request: Request) -> Response:
        """`GET /v1/batches`: newest first."""
        query = request.query_params
        limit = limit_in(query, DEFAULT_LIMIT)
        if limit is None:
            raise wrong_type("limit", "an integer", query["limit"])
        check_range("limit", limit, 1, MAX_LIMIT)
        after = await self._find(request, query["after"], "after") if "after" in query else None
        caller = caller_of(request)
        async with self._pages.passed(caller.owner or ""):
            return await asyncio.to_thread(self._page, limit, after, caller.scope)

    def _page(self, limit: int, after: BatchRecord | None, scope: str | None) -> Response:
        store = self._daemon.store
        found = batches.list_page(store, limit=limit + 1, after=after, scope=scope)
        return write_page(map(self._view, found), limit)

    async def retrieve(self, request: Request, batch_id: str) -> AsciiJson:
        """`GET /v1/batches/{batch_id}`."""
        return await self._answer(await self._find(request, batch_id))

    async def cancel(self, request: Request, batch_id: str) -> AsciiJson:
        """`POST /v1/batches/{batch_id}/cancel`. Requests in flight run to their end, within
        `SETTLE_S`, and are kept."""
        batch = await self._find(request, batch_id)
        if status_of(batch) not in IS_CANCELLED:
            try:
                cancelling = await self._daemon.cancel(batch.job.id, settle_s=SETTLE_S)
                batch = replace(batch, job=cancelling)
            except StateError:
                batch = await self._find(request, batch_id)
                if status_of(batch) not in IS_CANCELLED:
                    message = f"Cannot cancel a batch with status '{status_of(batch)}'."
                    raise ApiError(409, message) from None
        return await self._answer(batch)

    async def _find(self, request: Request, batch_id: str, param: str | None = None) -> BatchRecord:
        if param is None and not batch_id.startswith("batch"):
            given = shortened(batch_id)
            message = f"Invalid 'batch_id': '{given}'. Expected an ID that begins with 'batch'."
            raise ApiError(400, message, code="invalid_value", param="batch_id")
        scope = caller_of(request).scope
        batch = await asyncio.to_thread(batches.find, self._daemon.store, batch_id, scope=scope)
        if batch is None:
            raise ApiError(404, f"No batch found with id '{shortened(batch_id)}'.", param=param)
        return batch

    async def _answer(self, batch: BatchRecord) -> AsciiJson:
        return AsciiJson(await asyncio.to_thread(self._view, batch))

    def _view(self, batch: BatchRecord) -> JsonObject:
        return batch_object(batch, self._counts(batch))

    def _counts(self, batch: BatchRecord) -> Counts:
        job = batch.job
        if job.counts is not None or job.num_rows == 0:
            return job.counts or Counts()
        active = self._daemon.active.get(job.seq)
        if active is not None:
            return active.counts
        return results.count(self._daemon.store, job.seq)


def batches_router(made: Batches, guards: Sequence[params.Depends]) -> APIRouter:
    router = APIRouter(prefix="/v1/batches", dependencies=list(guards), redirect_slashes=False)
    router.add_api_route("", made.create, methods=["POST"])
    router.add_api_route("", made.list, methods=["GET"])
    router.add_api_route("/{batch_id:path}/cancel", made.cancel, methods=["POST"])
    router.add_api_route("/{batch_id:path}", made.retrieve, methods=["GET"])
    return router


async def _read_json(request: Request) -> dict[str, object]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"The request body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        document = parse_json(bytes(body))
    except ValueError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    return document


def status_of(batch: BatchRecord) -> str:
    """OpenAI's word for the job's state. What it has no word for looks as if nothing happened: a
    pause, and the time it takes to write what an expired batch has."""
    job = batch.job
    is_expiring = job.state is JobState.FINALIZING and job.ends_as is JobState.EXPIRED
    if is_expiring or job.state is JobState.PAUSED:
        return "validating" if job.started_at is None else "in_progress"
    return "in_progress" if job.state is JobState.RUNNING else str(job.state)


def batch_object(batch: BatchRecord, counts: Counts) -> JsonObject:
    """A batch; `counts` are those of its job now."""
    job = batch.job
    ended_at = instant_of(job.finished_at)
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": _errors(batch),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": status_of(batch),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(job.created_at),
        "in_progress_at": instant_of(job.started_at),
        "expires_at": instant_of(job.expires_at),
        "finalizing_at": instant_of(job.finalizing_at),
        **{f"{state}_at": ended_at if job.state is state else None for state in ENDINGS},
        "cancelling_at": instant_of(job.cancelling_at),
        "request_counts": {
            "total": job.num_rows,
            "completed": counts.num_completed,
            "failed": counts.num_failed,
        },
        "usage": _usage(batch, counts),
        "metadata": None if batch.metadata is None else dict(batch.metadata),
    }


def _errors(batch: BatchRecord) -> JsonObject | None:
    if batch.errors is None:
        return None
    return {"object": "list", "data": [asdict(error) for error in batch.errors]}


def _usage(batch: BatchRecord, counts: Counts) -> JsonObject:
    return {
        "input_tokens": counts.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.num_cached_tokens},
        "output_tokens": counts.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": batch.num_reasoning_tokens or 0},
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
    }
