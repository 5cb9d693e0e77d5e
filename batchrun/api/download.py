"""The content of a file that lies in object storage, passed on piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

from fastapi.responses import StreamingResponse

from batchrun.remote import in_thread, objects

MEDIA_TYPE = "application/octet-stream"


async def stream_object(url: str, size_bytes: int, filename: str) -> StreamingResponse:
    """The object's bytes, one piece of it in memory at a time; `filename` is for the caller.

    The first piece is there when this returns, so most trouble still has a status of its own.
    Raises MissingObjectError and StorageError.
    """
    first = await _read(url, 0, size_bytes)
    headers = {
        "Content-Length": str(size_bytes),
        "Content-Disposition": _disposition(filename),
    }
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
