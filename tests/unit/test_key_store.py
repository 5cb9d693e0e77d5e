"""API keys, owners and quotas in the store, on SQLite and on PostgreSQL."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from store_builders import add_batch, answered

from batchrun.errors import InputError, QuotaError, StateError
from batchrun.jobs.batch import new_batch_job
from batchrun.keys import OnlineUsage, UsageFile, digest, new_key
from batchrun.server.api.key_list import online_usage, tell_usage
from batchrun.store import api_keys, batches, files, jobs, results
from batchrun.store.api_keys import ApiKeyRecord, KeyLimits, KeyUsage, NewApiKey
from batchrun.store.batches import (
    BatchError,
    BatchRecord,
    NewBatch,
    ResultFiles,
    ValidInput,
    WantedBatch,
)
from batchrun.store.check import check_store
from batchrun.store.database import Store, open_store
from batchrun.store.files import RECORD_BYTES, FilePage, NewFile
from batchrun.store.jobs import Counts
from batchrun.store.retention import remove_results
from batchrun.types import JobState

ENDPOINT = "/v1/chat/completions"
LIMITS = KeyLimits(60, 1_000_000, 4, 1 << 40, 8, 2.0, 3_600.0)


def add(store: Store, name: str, role: api_keys.Role = "user") -> ApiKeyRecord:
    key_id, text = new_key()
    key = NewApiKey(key_id, name, role, digest(text), "gold", LIMITS)
    return api_keys.add(store, key, now_s=5.0)


def make_batch(store: Store, owner: str | None, max_open: int | None = None) -> BatchRecord:
    job = new_batch_job(Path("/srv"), ENDPOINT, deadline_s=86_400, weight=1)
    asked = NewBatch("file-1", ENDPOINT, "24h", None, None, "r", owner=owner)
    return add_batch(store, asked, job, now_s=100.0, max_open=max_open)


def start(store: Store, batch: BatchRecord, quota: int | None = None) -> BatchRecord:
    valid = ValidInput("m", batch.job.spec, batch.job.pin, "h", 2, 40)
    return batches.start(store, batch.job.id, valid, now_s=101.0, max_enqueued_tokens=quota)


def end(store: Store, batch: BatchRecord) -> None:
    results.commit(store, [(batch.job.seq, answered(row)) for row in range(2)], now_s=102.0)
    ending = jobs.begin_finalizing(store, batch.job.id, JobState.COMPLETED, now_s=103.0)
    batches.finish(store, ending, ResultFiles(None, None, 0), now_s=104.0)


def test_a_key_reads_as_it_was_written_and_its_name_is_its_own(store: Store) -> None:
    made = add(store, "team")
    assert (made.name, made.role, made.slo_class, made.limits) == ("team", "user", "gold", LIMITS)
    assert api_keys.list_all(store) == [made]
    assert api_keys.find(store, made.id) == made
    assert api_keys.find(store, "key_nobody") is None
    with pytest.raises(InputError, match="there is a key 'team' already"):
        add(store, "team")
    assert list(check_store(store)) == []


def test_a_revoked_key_stays_and_frees_its_name(store: Store) -> None:
    first = add(store, "team")
    revoked = api_keys.revoke(store, "team", now_s=6.0)
    second = add(store, "team")
    assert api_keys.list_all(store) == [replace(first, revoked_at=6.0), second]
    assert revoked == replace(first, revoked_at=6.0)
    with pytest.raises(StateError, match="is revoked already"):
        api_keys.revoke(store, first.id, now_s=7.0)
    with pytest.raises(InputError, match="no such key"):
        api_keys.revoke(store, "nobody", now_s=7.0)


def test_what_a_key_has_used_at_the_gateways_of_all_daemons_adds_up(
    store: Store, tmp_path: Path
) -> None:
    for name, tokens in (("here", 100), ("there", 20), ("there", 5)):
        with closing(UsageFile(tmp_path / name)) as usage:
            usage.add(2, OnlineUsage(1, tokens, 3))
        tell_usage(store, tmp_path / name)
    for name in ("here", "there"):
        assert online_usage(store, tmp_path / name)[2] == OnlineUsage(3, 125, 9)
    assert online_usage(store, tmp_path / "new")[1] == OnlineUsage()


def test_limits_of_a_key_can_be_changed_one_by_one(store: Store) -> None:
    made = add(store, "team")

    changed = api_keys.change(store, "team", {"stored_bytes": 5, "slo_class": None})

    assert changed == replace(made, limits=replace(LIMITS, stored_bytes=5), slo_class=None)
    assert api_keys.find(store, made.id) == changed
    with pytest.raises(InputError, match="no such key"):
        api_keys.change(store, "nobody", {"stored_bytes": 5})
    api_keys.revoke(store, "team", now_s=6.0)
    with pytest.raises(StateError, match="is revoked already"):
        api_keys.change(store, made.id, {"stored_bytes": 6})


def test_a_user_key_has_the_limits_of_all_where_it_has_none_and_an_admin_has_not(
    store: Store,
) -> None:
    usual = KeyLimits(concurrent_batches=100, stored_bytes=1_000)
    made = api_keys.change(store, add(store, "team").id, dict.fromkeys(api_keys.LIMIT_NAMES))
    admin = replace(made, role="admin")
    own = replace(made, limits=KeyLimits(stored_bytes=7))

    assert api_keys.limits_of(made, usual) == usual
    assert api_keys.limits_of(own, usual) == replace(usual, stored_bytes=7)
    assert api_keys.limits_of(admin, usual) == KeyLimits()


def test_a_key_finds_its_own_and_an_admin_everything(store: Store) -> None:
    mine, other, admin = add(store, "mine"), add(store, "other"), add(store, "ops", "admin")
    file = NewFile("a", "batch", 1, "0" * 64, None, owner=mine.id)
    files.add(store, file, now_s=5.0)
    batch = make_batch(store, mine.id)
    for key, sees in ((mine, True), (other, False), (admin, True)):
        found = files.find(store, file.id, now_s=6.0, scope=key.scope)
        page = files.list_page(store, FilePage(5, scope=key.scope), now_s=6.0)
        assert ([found] == page) is sees and (found is not None) is sees
        assert (batches.find(store, batch.job.id, scope=key.scope) is not None) is sees
        assert bool(batches.list_page(store, limit=5, scope=key.scope)) is sees


def test_only_batches_that_have_not_ended_count_against_the_limit(store: Store) -> None:
    mine, other = add(store, "mine"), add(store, "other")
    first, _second = make_batch(store, mine.id, 2), make_batch(store, mine.id, 2)
    make_batch(store, other.id, 1)
    with pytest.raises(QuotaError, match="this API key may have 2 at once"):
        make_batch(store, mine.id, 2)
    start(store, first)
    end(store, first)
    make_batch(store, mine.id, 2)


def test_a_batch_beyond_the_token_quota_is_not_started(store: Store) -> None:
    mine = add(store, "mine")
    first, second = make_batch(store, mine.id), make_batch(store, mine.id)
    assert start(store, first, quota=79).num_enqueued_tokens == 40
    with pytest.raises(QuotaError, match="Limit: 79 enqueued tokens"):
        start(store, second, quota=79)
    assert batches.find(store, second.job.id) == second
    end(store, first)
    assert start(store, second, quota=79).job.state is JobState.RUNNING


def test_what_a_key_has_used_is_what_its_ended_batches_kept(store: Store) -> None:
    mine = add(store, "mine")
    done, running = make_batch(store, mine.id), make_batch(store, mine.id)
    make_batch(store, None)
    for batch in (done, running):
        start(store, batch)
    end(store, done)
    assert api_keys.usage(store) == {mine.id: KeyUsage(2, Counts(2, 0, 20, 4, 10))}


def test_an_owner_that_is_no_key_is_a_fault(store: Store) -> None:
    make_batch(store, "key_nobody")
    assert [str(fault) for fault in check_store(store)] == [
        "batches: 1 of key key_nobody, which does not exist"
    ]


def test_what_a_key_may_store_is_bounded_in_bytes(store: Store) -> None:
    def file(owner: str, size_bytes: int = 904, expires_after_s: int | None = None) -> NewFile:
        return NewFile("in.jsonl", "batch", size_bytes, "0" * 64, expires_after_s, owner)

    files.add(store, file("key_1", expires_after_s=10), now_s=1.0, max_stored_bytes=10_000)
    kept = files.add(store, file("key_1"), now_s=1.0, max_stored_bytes=10_000)
    for size_bytes in (904, 0):
        with pytest.raises(QuotaError, match="may store 10000 bytes and has stored 10000"):
            files.add(store, file("key_1", size_bytes), now_s=1.0, max_stored_bytes=10_000)
    files.add(store, file("key_2"), now_s=1.0, max_stored_bytes=5_000)

    assert files.stored_bytes(store, "key_1", now_s=1.0) == 10_000
    assert files.stored_bytes(store, "key_1", now_s=20.0) == 5_000
    assert files.stored_by_owner(store, now_s=20.0) == {"key_1": 5_000, "key_2": 5_000}
    files.remove(store, kept.id)
    files.add(store, file("key_1"), now_s=20.0, max_stored_bytes=5_000)
    assert len(files.list_page(store, FilePage(10), now_s=20.0)) == 2


def test_batches_that_fail_count_as_stored_until_their_results_are_removed(store: Store) -> None:
    mine = add(store, "mine")

    def make(max_stored_bytes: int) -> BatchRecord:
        job = new_batch_job(Path("/srv"), ENDPOINT, deadline_s=86_400, weight=1)
        metadata = {str(number): "x" * 512 for number in range(16)}
        asked = NewBatch("file-1", ENDPOINT, "24h", metadata, None, "r", owner=mine.id)
        wanted = WantedBatch(asked, job, max_stored_bytes=max_stored_bytes)
        (made,) = batches.create_all(store, [wanted], now_s=1.0)
        if isinstance(made, QuotaError):
            raise made
        return made

    made = make(20_000)
    before_bytes = files.stored_bytes(store, mine.id, now_s=1.0)
    errors = [BatchError("invalid_request", "y" * 1_000)]
    failed = batches.fail(store, made.job.id, errors, now_s=2.0)
    stored_bytes = files.stored_bytes(store, mine.id, now_s=2.0)
    assert before_bytes > RECORD_BYTES + 16 * 512
    assert stored_bytes > before_bytes + 1_000
    assert files.stored_by_owner(store, now_s=2.0) == {mine.id: stored_bytes}
    with pytest.raises(QuotaError, match=f"may store 20000 bytes and has stored {stored_bytes}"):
        make(20_000)

    assert [*remove_results(store, failed.job, now_s=3.0)] == [0]

    assert files.stored_by_owner(store, now_s=3.0) == {}
    left = batches.find(store, made.job.id)
    assert left is not None and (left.metadata, left.errors) == (None, None)
    assert list(check_store(store)) == []
    make(20_000)


def test_what_a_key_stores_is_summed_once_for_the_batches_that_are_made_at_once(
    store: Store,
) -> None:
    mine, other = add(store, "mine"), add(store, "other")
    sums: list[str] = []

    def keep(_connection: object, _cursor: object, query: str, *_: object) -> None:
        if "sum(" in query:
            sums.append(query)

    def wanted(key: ApiKeyRecord, max_open: int | None = None) -> WantedBatch:
        job = new_batch_job(Path("/srv"), ENDPOINT, deadline_s=86_400, weight=1)
        asked = NewBatch("file-1", ENDPOINT, "24h", None, None, "r", owner=key.id)
        return WantedBatch(asked, job, max_open, max_stored_bytes=3 * RECORD_BYTES)

    event.listen(store.engine, "before_cursor_execute", keep)
    asked = [wanted(key) for key in (mine, other, mine, mine, mine)]
    made = batches.create_all(store, asked, now_s=1.0)
    assert [type(one) for one in made] == [BatchRecord] * 4 + [QuotaError]
    assert len(sums) == 2 * 2, "of files and of batches, for each key"

    sums.clear()
    refused = batches.create_all(store, [wanted(mine, max_open=3)], now_s=1.0)
    assert "3 at once" in str(refused[0])
    assert sums == []


def test_what_is_asked_of_one_key_reads_no_rows_but_those_meant(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    mine = add(store, "mine")
    job = new_batch_job(Path("/srv"), ENDPOINT, deadline_s=86_400, weight=1)
    asked = NewBatch("file-1", ENDPOINT, "24h", None, None, "r", owner=mine.id)
    queries: list[tuple[str, Any]] = []

    def keep(_connection: object, _cursor: object, query: str, values: Any, *_: object) -> None:
        if query.startswith("SELECT"):
            queries.append((query, values))

    event.listen(store.engine, "before_cursor_execute", keep)
    new = NewFile("in.jsonl", "batch", 0, "0" * 64, None, mine.id)
    file = files.add(store, new, now_s=1.0, max_stored_bytes=100_000)
    for purpose in (None, "evals"):
        files.list_page(store, FilePage(5, file, purpose, scope=mine.id), now_s=1.0)
    wanted = WantedBatch(asked, job, max_open=5, max_stored_bytes=100_000)
    (batch,) = batches.create_all(store, [wanted], now_s=1.0)
    assert isinstance(batch, BatchRecord)
    batches.list_page(store, limit=5, after=batch, scope=mine.id)
    event.remove(store.engine, "before_cursor_execute", keep)

    with store.read() as connection:
        steps = [
            str(step.detail)
            for query, values in queries
            for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values)
        ]
    store.close()
    few = r"COVERING INDEX ix_(files|batches)_owner \(owner=\?\)|\(owner=\? AND|\((id|rowid)=\?\)"
    read = [step for step in steps if re.search(" (files|batches) ", step)]
    assert any("(owner=? AND purpose=?" in step for step in read)
    assert [step for step in read if not re.search(few, step)] == []
