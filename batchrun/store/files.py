"""The files of OpenAI's API, as far as a store holds them: their bytes lie in the home folder.

`scope` is whose files are looked at: the id of an API key, or None for everybody's. One whose
`expires_at` has passed is as good as deleted: nothing here finds it but `find_expired`.
"""

from __future__ import annotations

import secrets
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, or_, select

from batchrun.errors import QuotaError
from batchrun.store.database import Store
from batchrun.store.schema import batches, files

ID_PREFIX = "file-"
ID_ALPHABET = string.ascii_letters + string.digits
ID_LENGTH = 24
RECORD_BYTES = 4096
"""What a file or a batch counts beside its bytes: the store keeps its names and ids."""
OwnerFilter = Callable[[ColumnElement[str | None]], ColumnElement[bool]]


def new_file_id() -> str:
    """An id that no other file has; safe as a name on disk."""
    return ID_PREFIX + "".join(secrets.choice(ID_ALPHABET) for _ in range(ID_LENGTH))


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file whose bytes are on the disk. `expires_after_s` counts from now; None: never."""

    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    expires_after_s: int | None
    owner: str | None = None
    id: str = field(default_factory=new_file_id)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it stands in the store. Instants are UTC epoch seconds; `seq` orders by creation.

    `filename` is what its maker calls it, and never a path. `owner` is the API key's id, or None.
    """

    seq: int
    id: str
    owner: str | None
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    created_at: float
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class FilePage:
    """Which files to list: up to `limit` behind `after`, of one purpose or of all."""

    limit: int
    after: FileRecord | None = None
    purpose: str | None = None
    newest_first: bool = True
    scope: str | None = None


def add(
    store: Store, file: NewFile, *, now_s: float, max_stored_bytes: int | None = None
) -> FileRecord:
    """Add a file; once this returns, it survives any crash.

    Raises QuotaError when its owner would store more than `max_stored_bytes`.
    """
    with store.write() as connection:
        if max_stored_bytes is not None:
            stored_bytes = sum_stored_bytes(connection, file.owner, now_s)
            refuse_too_much(stored_bytes, file.size_bytes, max_stored_bytes)
        return insert_file(connection, file, now_s=now_s)


def refuse_too_much(stored_bytes: int, more_bytes: int, max_stored_bytes: int) -> None:
    """Raises QuotaError where a key would store too much with another file or batch."""
    if stored_bytes + RECORD_BYTES + more_bytes > max_stored_bytes:
        raise QuotaError(
            f"this API key may store {max_stored_bytes} bytes and has stored {stored_bytes}; "
            "delete files that you do not need, or ask the operator to remove old batches"
        )


def stored_bytes(store: Store, owner: str | None, *, now_s: float) -> int:
    """What the files and batches of an owner count together."""
    with store.read() as connection:
        return sum_stored_bytes(connection, owner, now_s)


def stored_by_owner(store: Store, *, now_s: float) -> dict[str, int]:
    """What the files and batches of each API key count together, by its id."""
    with store.read() as connection:
        return _sums(connection, now_s, lambda owner: owner.is_not(None))


def sum_stored_bytes(connection: Connection, owner: str | None, now_s: float) -> int:
    """As `stored_bytes`, within a transaction."""
    return _sums(connection, now_s, lambda of: of == owner)[owner]


def _sums(connection: Connection, now_s: float, is_meant: OwnerFilter) -> Counter[Any]:
    sums: Counter[Any] = Counter()
    for size_bytes, is_kept in (
        (files.c.size_bytes, _is_alive(now_s)),
        (batches.c.record_bytes, batches.c.record_bytes.is_not(None)),
    ):
        owner = size_bytes.table.c.owner
        query = select(owner, func.sum(size_bytes + RECORD_BYTES)).group_by(owner)
        for found, num_bytes in connection.execute(query.where(is_meant(owner), is_kept)):
            sums[found] += int(num_bytes)
    return sums


def insert_file(connection: Connection, file: NewFile, *, now_s: float) -> FileRecord:
    """Add a file within a transaction."""
    values = asdict(file)
    expires_after_s = values.pop("expires_after_s")
    values["filename"] = file.filename.replace("\0", "")
    values["expires_at"] = None if expires_after_s is None else now_s + expires_after_s
    connection.execute(insert(files).values(**values, created_at=now_s))
    row = connection.execute(select(files).where(files.c.id == file.id)).one()
    return FileRecord(**row._mapping)


def find(
    store: Store, file_id: str, *, now_s: float, scope: str | None = None
) -> FileRecord | None:
    """The file with this id, or None when there is none, or none any more."""
    if "\0" in file_id:
        return None
    query = select(files).where(files.c.id == file_id, _is_alive(now_s))
    if scope is not None:
        query = query.where(files.c.owner == scope)
    with store.read() as connection:
        row = connection.execute(query).first()
    return None if row is None else FileRecord(**row._mapping)


def list_page(store: Store, page: FilePage, *, now_s: float) -> list[FileRecord]:
    """The files of a page, in the order of their creation or against it."""
    query = select(files).where(_is_alive(now_s)).limit(page.limit)
    query = query.order_by(files.c.seq.desc() if page.newest_first else files.c.seq)
    if page.after is not None:
        seq = page.after.seq
        query = query.where(files.c.seq < seq if page.newest_first else files.c.seq > seq)
    if page.scope is not None:
        query = query.where(files.c.owner == page.scope)
    if page.purpose is not None:
        query = query.where(files.c.purpose == page.purpose.replace("\0", ""))
    with store.read() as connection:
        return [FileRecord(**row._mapping) for row in connection.execute(query)]


def remove(store: Store, file_id: str) -> None:
    """Forget a file; its bytes may go once this returns."""
    with store.write() as connection:
        connection.execute(delete(files).where(files.c.id == file_id))


def find_expired(store: Store, *, now_s: float) -> list[FileRecord]:
    """Files whose time is over, and whose bytes may go."""
    with store.read() as connection:
        found = connection.execute(select(files).where(files.c.expires_at <= now_s))
        return [FileRecord(**row._mapping) for row in found]


def list_all(store: Store) -> Sequence[FileRecord]:
    """Every file, expired ones too."""
    with store.read() as connection:
        found = connection.execute(select(files).order_by(files.c.seq))
        return [FileRecord(**row._mapping) for row in found]


def _is_alive(now_s: float) -> ColumnElement[bool]:
    return or_(files.c.expires_at.is_(None), files.c.expires_at > now_s)
