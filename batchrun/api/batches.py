"""`/v1/batches`: create, list, retrieve, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter, Request, params
from pydantic_core import from_json

from batchrun.api.batch_request import read_batch_request
from batchrun.api.callers import caller_of
from batchrun.api.errors import ApiError, AsciiJson
from batchrun.api.objects import JsonObject, batch_object, list_object, status_of
from batchrun.api.values import check_range, limit_in, wrong_type
from batchrun.batch_jobs import new_batch_job
from batchrun.daemon import Daemon
from batchrun.errors import StateError
from batchrun.store import Counts, batches, results
from batchrun.store.batches import BatchRecord

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
        self._creating = asyncio.Lock()

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
        async with self._creating:
            made = await self._daemon.submit_batch(
                wanted.batch, job, caller.limits.concurrent_batches
            )
        if made.request_hash != wanted.batch.request_hash:
            raise ApiError(
                409, f"This Idempotency-Key was used for another request ({made.job.id})."
            )
        return AsciiJson(await self._view(made))

    async def list(self, request: Request) -> AsciiJson:
        """`GET /v1/batches`: newest first."""
        query, scope = request.query_params, caller_of(request).scope
        limit = limit_in(query, DEFAULT_LIMIT)
        if limit is None:
            raise wrong_type("limit", "an integer", query["limit"])
        check_range("limit", limit, 1, MAX_LIMIT)
        after = None
        if "after" in query:
            after = await asyncio.to_thread(
                batches.find, self._daemon.store, query["after"], scope=scope
            )
            if after is None:
                raise _no_such_batch(query["after"], param="after")
        found = await asyncio.to_thread(
            batches.list_page, self._daemon.store, limit=limit + 1, after=after, scope=scope
        )
        page = [await self._view(batch) for batch in found[:limit]]
        return AsciiJson(list_object(page, has_more=len(found) > limit))

    async def retrieve(self, request: Request, batch_id: str) -> AsciiJson:
        """`GET /v1/batches/{batch_id}`."""
        return AsciiJson(await self._view(await self._find(request, batch_id)))

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
        return AsciiJson(await self._view(batch))

    async def _find(self, request: Request, batch_id: str) -> BatchRecord:
        if not batch_id.startswith("batch"):
            message = f"Invalid 'batch_id': '{batch_id}'. Expected an ID that begins with 'batch'."
            raise ApiError(400, message, code="invalid_value", param="batch_id")
        scope = caller_of(request).scope
        batch = await asyncio.to_thread(batches.find, self._daemon.store, batch_id, scope=scope)
        if batch is None:
            raise _no_such_batch(batch_id)
        return batch

    async def _view(self, batch: BatchRecord) -> JsonObject:
        return batch_object(batch, await self._counts(batch))

    async def _counts(self, batch: BatchRecord) -> Counts:
        job = batch.job
        if job.counts is not None or job.num_rows == 0:
            return job.counts or Counts()
        active = self._daemon.active.get(job.seq)
        if active is not None:
            return active.counts
        return await asyncio.to_thread(results.count, self._daemon.store, job.seq)


def batches_router(made: Batches, guards: Sequence[params.Depends]) -> APIRouter:
    """The routes of `/v1/batches`."""
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
        document = from_json(bytes(body), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    return document


def _no_such_batch(batch_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"No batch found with id '{batch_id}'.", param=param)
