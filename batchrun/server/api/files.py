"""`/v1/files`: create, list, retrieve, content, delete.

The content of a file that lies in object storage is passed on piece by piece.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from urllib.parse import quote

from fastapi import APIRouter, Request, params
from fastapi.responses import FileResponse, Response, StreamingResponse

from batchrun.errors import MissingObjectError, shortened
from batchrun.jobs import objects
from batchrun.jobs.objects import in_thread
from batchrun.jobs.results.batch_files import RESULT_PURPOSE
from batchrun.jobs.results.file_bytes import FileBytes, remove_file
from batchrun.keys import FairDoor
from batchrun.server.api.errors import (
    ApiError,
    AsciiJson,
    ascii_json,
    caller_of,
    check_choice,
    limit_in,
)
from batchrun.server.api.upload import MAX_FILE_BYTES, Download, Traffic, receive_file, size_told
from batchrun.store import files
from batchrun.store.database import Store
from batchrun.store.files import FilePage, FileRecord

MEDIA_TYPE = "application/octet-stream"
JsonObject = dict[str, object]


async def stream_object(url: str, size_bytes: int, filename: str) -> StreamingResponse:
    """The object's bytes, one piece of it in memory at a time; `filename` is for the caller.

    The first piece is there when this returns, so most trouble still has a status of its own.
    Raises MissingObjectError and StorageError.
    """
    first = await _read(url, 0, size_bytes)
    headers = {"Content-Length": str(size_bytes), "Content-Disposition": _disposition(filename)}
    return StreamingResponse(
        _pieces(url, first, size_bytes), media_type=MEDIA_TYPE, headers=headers
    )


async def _pieces(url: str, first: bytes, size_bytes: int) -> AsyncIterator[bytes]:
    yield first
    position = len(first)
    while position < size_bytes:
        piece = await _read(url, position, size_bytes)
        yield piece
        position += len(piece)


async def _read(url: str, start: int, size_bytes: int) -> bytes:
    end = min(start + objects.RANGE_BYTES, size_bytes)
    return await in_thread(objects.read, url, start, end) if start < end else b""


def _disposition(filename: str) -> str:
    """As FileResponse writes it."""
    quoted = quote(filename, errors="replace")
    if quoted == filename:
        return f'attachment; filename="{filename}"'
    return f"attachment; filename*=utf-8''{quoted}"


MAX_LIMIT = 10_000
READABLE = frozenset({"batch", RESULT_PURPOSE})
"""Purposes whose content is given back."""
ORDERS = ("asc", "desc")


class Files:
    """The files of one home: rows in the store, bytes in `place`; `traffic` bounds those on their
    way."""

    def __init__(self, store: Store, place: FileBytes, traffic: Traffic) -> None:
        self._store = store
        self._place = place
        self._traffic = traffic
        self._pages = FairDoor(1)

    async def create(self, request: Request) -> AsciiJson:
        """`POST /v1/files`. What was answered with 200 survives any crash."""
        told_bytes = size_told(request.headers)
        size_bytes = MAX_FILE_BYTES if told_bytes is None else told_bytes
        with self._traffic.uploads.admitted(caller_of(request).owner, size_bytes):
            return await self._create(request)

    async def _create(self, request: Request) -> AsciiJson:
        caller = caller_of(request)
        quota = caller.limits.stored_bytes
        if quota is not None:
            stored = partial(files.stored_bytes, now_s=time.time())
            before_bytes = await asyncio.to_thread(stored, self._store, caller.owner)
            files.refuse_too_much(before_bytes, size_told(request.headers) or 0, quota)
        received = await receive_file(request, self._place.spool, caller.owner)
        add = partial(files.add, now_s=time.time(), max_stored_bytes=quota)
        try:
            await in_thread(self._place.keep, received.id)
            record = await asyncio.to_thread(add, self._store, received)
        except Exception:
            await in_thread(self._give_up, received.id)
            raise
        await in_thread(self._place.settle, received.id)
        return AsciiJson(file_object(record))

    def _give_up(self, file_id: str) -> None:
        """Of a file that was not added nothing stays. What a stop of the daemon cuts off is left
        to the next start: it may still be on its way."""
        self._place.mark(file_id)
        (self._place.spool / file_id).unlink(missing_ok=True)

    async def list(self, request: Request) -> Response:
        """`GET /v1/files`."""
        query = request.query_params
        limit = limit_in(query, MAX_LIMIT)
        if limit is None or not 1 <= limit <= MAX_LIMIT:
            raise ApiError(400, f"limit must be between 1 and {MAX_LIMIT}.")
        order = query.get("order", "desc")
        check_choice("order", order, ORDERS)
        after = await self._find(request, query["after"], "after") if "after" in query else None
        caller, purpose = caller_of(request), query.get("purpose")
        wanted = FilePage(limit + 1, after, purpose, order == "desc", caller.scope)
        async with self._pages.passed(caller.owner or ""):
            return await asyncio.to_thread(self._page, wanted)

    def _page(self, wanted: FilePage) -> Response:
        """The last that is wanted is only to show that there is more."""
        found = files.list_page(self._store, wanted, now_s=time.time())
        return write_page(map(file_object, found), wanted.limit - 1)

    async def retrieve(self, request: Request, file_id: str) -> AsciiJson:
        """`GET /v1/files/{file_id}`."""
        return AsciiJson(file_object(await self._find(request, file_id)))

    async def delete(self, request: Request, file_id: str) -> AsciiJson:
        """`DELETE /v1/files/{file_id}`. The row goes first: bytes that a kill or an absent object
        storage leaves belong to nobody, and go later."""
        file = await self._find(request, file_id)
        await in_thread(remove_file, self._store, self._place, file.id)
        return AsciiJson({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request, file_id: str) -> Response:
        """`GET /v1/files/{file_id}/content`: the bytes, straight from where they lie."""
        file = await self._find(request, file_id)
        reply = await self._content(file)
        return Download(reply, self._traffic.downloads, caller_of(request).owner)

    async def _content(self, file: FileRecord) -> Response:
        if file.purpose not in READABLE:
            raise ApiError(400, f"Not allowed to download files of purpose: {file.purpose}")
        try:
            where = await in_thread(self._place.locate, file.id)
            if isinstance(where, str):
                return await stream_object(where, file.size_bytes, _download_name(file))
            status = await asyncio.to_thread(where.stat)
        except (FileNotFoundError, MissingObjectError):
            raise _unknown(file.id) from None
        return FileResponse(
            where, media_type=MEDIA_TYPE, filename=_download_name(file), stat_result=status
        )

    async def _find(self, request: Request, file_id: str, param: str = "id") -> FileRecord:
        scope = caller_of(request).scope
        file = await asyncio.to_thread(
            files.find, self._store, file_id, now_s=time.time(), scope=scope
        )
        if file is None:
            raise _unknown(file_id, param)
        return file


def _download_name(file: FileRecord) -> str:
    """The last part of what its owner called it: a client may save it under this name."""
    name = file.filename.replace("\\", "/").rpartition("/")[2]
    return file.id if name in {"", ".", ".."} else name


def files_router(made: Files, guards: Sequence[params.Depends]) -> APIRouter:
    """The routes of `/v1/files`. An id with a slash is an unknown id, and no unknown route."""
    router = APIRouter(prefix="/v1/files", dependencies=list(guards), redirect_slashes=False)
    router.add_api_route("", made.create, methods=["POST"])
    router.add_api_route("", made.list, methods=["GET"])
    router.add_api_route("/{file_id:path}/content", made.content, methods=["GET"])
    router.add_api_route("/{file_id:path}", made.retrieve, methods=["GET"])
    router.add_api_route("/{file_id:path}", made.delete, methods=["DELETE"])
    return router


def _unknown(file_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No such File object: {shortened(file_id)}", param=param)


MAX_PAGE_BYTES = 4 << 20
"""A page ends early once it is so large: pages of others wait until it is written."""


def write_page(items: Iterable[JsonObject], limit: int) -> Response:
    """The first `limit` of `items`, fewer where these fill `MAX_PAGE_BYTES`.

    Blocking; written one by one, so that the loop comes in between.
    """
    ids: list[object] = []
    data = bytearray()
    has_more = False
    for item in items:
        has_more = len(ids) == limit or len(data) >= MAX_PAGE_BYTES
        if has_more:
            break
        data += b"," * bool(ids) + ascii_json(item)
        ids.append(item["id"])
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    about = {"object": "list", "first_id": first, "last_id": last, "has_more": has_more}
    body = ascii_json(about)[:-1] + b',"data":[' + data + b"]}"
    return Response(body, media_type=AsciiJson.media_type)


def file_object(file: FileRecord) -> JsonObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": instant_of(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def instant_of(at_s: float | None) -> int | None:
    """Whole Unix seconds, as OpenAI's objects have them."""
    return None if at_s is None else int(at_s)
