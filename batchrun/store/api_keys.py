"""API keys as the store holds them: a name, a role, limits, and a hash of the secret.

A revoked key stays: what it made is still its own, and a deployment that ever had a key never
serves callers without one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from batchrun.errors import InputError, StateError
from batchrun.store.database import Store
from batchrun.store.jobs import COUNT_NAMES, Counts
from batchrun.store.schema import api_keys, batches, jobs

Role = Literal["user", "admin"]
MAX_COUNT = 2**31 - 1
MAX_TOKENS = 2**53
"""The largest limits."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The most that a key may do; None: what holds for all keys of its role.

    `enqueued_tokens` bounds the prompt tokens of its batches that have not ended, by estimate;
    `stored_bytes` what its files and batches hold when it makes another. `concurrent_calls`
    bounds its online calls in flight, `max_weight` and `min_deadline_s` what its batches may name.
    """

    requests_per_minute: int | None = None
    enqueued_tokens: int | None = None
    concurrent_batches: int | None = None
    stored_bytes: int | None = None
    concurrent_calls: int | None = None
    max_weight: float | None = None
    min_deadline_s: float | None = None


NO_LIMITS = KeyLimits()
LIMIT_NAMES = tuple(KeyLimits.__dataclass_fields__)
_LARGEST = {
    **dict.fromkeys(("requests_per_minute", "concurrent_batches", "concurrent_calls"), MAX_COUNT),
    **dict.fromkeys(("enqueued_tokens", "stored_bytes"), MAX_TOKENS),
}


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """A key to be added; `sha256` is that of the whole secret, in hex."""

    id: str
    name: str
    role: Role
    sha256: str
    slo_class: str | None = None
    limits: KeyLimits = NO_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyRecord(NewApiKey):
    """A key as it stands in the store. Instants are UTC epoch seconds."""

    seq: int
    created_at: float
    revoked_at: float | None

    @property
    def scope(self) -> str | None:
        """Whose files and batches it sees: its own; None: everybody's, for an admin."""
        return None if self.role == "admin" else self.id


def limits_of(key: ApiKeyRecord, defaults: KeyLimits) -> KeyLimits:
    """A key's limits; those that a user key does not have itself are the `defaults`, and the
    largest that there can be is none."""
    own = {name: value for name, value in asdict(key.limits).items() if value is not None}
    limits = key.limits if key.role == "admin" else replace(defaults, **own)
    is_none = {name for name, most in _LARGEST.items() if getattr(limits, name) == most}
    return replace(limits, **dict.fromkeys(is_none))


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """What the batches of a key have used: those that have ended, by their counts."""

    num_batches: int
    counts: Counts


def add(store: Store, key: NewApiKey, *, now_s: float) -> ApiKeyRecord:
    """Add a key. Raises InputError when one that is not revoked has its name."""
    values = asdict(key)
    values |= values.pop("limits")
    with store.write() as connection:
        if any(one.name == key.name and one.revoked_at is None for one in _read(connection)):
            raise InputError(f"there is a key {key.name!r} already; revoke it, or choose a name")
        connection.execute(insert(api_keys).values(**values, created_at=now_s))
        return _read(connection)[-1]


def find(store: Store, key_id: str | None) -> ApiKeyRecord | None:
    """The key with this id, revoked or not; None where there is none."""
    with store.read() as connection:
        return next(iter(_read(connection, api_keys.c.id == key_id)), None)


def is_any(store: Store) -> bool:
    """Whether there ever was a key."""
    with store.read() as connection:
        return connection.execute(select(api_keys.c.seq).limit(1)).first() is not None


def list_all(store: Store) -> Sequence[ApiKeyRecord]:
    """Every key in the order of their creation, revoked ones too."""
    with store.read() as connection:
        return _read(connection)


def change(store: Store, key: str, values: Mapping[str, object]) -> ApiKeyRecord:
    """Give the key with this id or name other limits, or another `slo_class`; those that `values`
    does not name stay. Raises InputError and StateError."""
    assert values.keys() <= {*LIMIT_NAMES, "slo_class"}
    with store.write() as connection:
        alive = _find_alive(connection, key)
        if values:
            changed = update(api_keys).where(api_keys.c.id == alive.id)
            connection.execute(changed.values(**values))
        return _read(connection, api_keys.c.id == alive.id)[0]


def revoke(store: Store, key: str, *, now_s: float) -> ApiKeyRecord:
    """Revoke the key with this id or name. Raises InputError and StateError."""
    with store.write() as connection:
        alive = _find_alive(connection, key)
        changed = update(api_keys).where(api_keys.c.id == alive.id)
        connection.execute(changed.values(revoked_at=now_s))
        return replace(alive, revoked_at=now_s)


def _find_alive(connection: Connection, key: str) -> ApiKeyRecord:
    found = [one for one in _read(connection) if key in {one.id, one.name}]
    if not found:
        raise InputError(f"{key}: no such key; `batchrun keys list` lists them")
    alive = next((one for one in found if one.revoked_at is None), None)
    if alive is None:
        raise StateError(f"{key} is revoked already")
    return alive


def usage(store: Store) -> dict[str, KeyUsage]:
    """What each key that has made a batch has used, by its id."""
    sums = [func.coalesce(func.sum(jobs.c[name]), 0) for name in COUNT_NAMES]
    query = (
        select(batches.c.owner, func.count(), *sums)
        .join(jobs, batches.c.job_seq == jobs.c.seq)
        .where(batches.c.owner.is_not(None))
        .group_by(batches.c.owner)
    )
    with store.read() as connection:
        rows = connection.execute(query).all()
    return {
        owner: KeyUsage(num_batches, Counts(*(int(value) for value in counts)))
        for owner, num_batches, *counts in rows
    }


def _read(connection: Connection, *where: ColumnElement[bool]) -> list[ApiKeyRecord]:
    records = []
    for row in connection.execute(select(api_keys).where(*where).order_by(api_keys.c.seq)):
        values = dict(row._mapping)
        limits = KeyLimits(*(values.pop(name) for name in LIMIT_NAMES))
        records.append(ApiKeyRecord(limits=limits, **values))
    return records
