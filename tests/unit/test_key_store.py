"""API keys, owners and quotas in the store, on SQLite and on PostgreSQL."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from store_builders import add_batch, answered

from batchrun.errors import InputError, QuotaError, StateError
from batchrun.jobs.batch import new_batch_job
from batchrun.keys import OnlineUsage, UsageFile, digest, new_key
from batchrun.server.api.key_list import online_usage, tell_usage
from batchrun.store import api_keys, batches, files, jobs, results
from batchrun.store.api_keys import ApiKeyRecord, KeyLimits, KeyUsage, NewApiKey
from batchrun.store.batches import BatchRecord, NewBatch, ResultFiles, ValidInput
from batchrun.store.check import check_store
from batchrun.store.database import Store
from batchrun.store.files import FilePage, NewFile
from batchrun.store.jobs import Counts
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
    def file(owner: str, expires_after_s: int | None = None) -> NewFile:
        return NewFile("in.jsonl", "batch", 40, "0" * 64, expires_after_s, owner)

    files.add(store, file("key_1", 10), now_s=1.0, max_stored_bytes=100)
    kept = files.add(store, file("key_1"), now_s=1.0, max_stored_bytes=100)
    with pytest.raises(QuotaError, match="may store 100 bytes and has stored 80"):
        files.add(store, file("key_1"), now_s=1.0, max_stored_bytes=100)
    files.add(store, file("key_2"), now_s=1.0, max_stored_bytes=40)

    assert files.stored_bytes(store, "key_1", now_s=1.0) == 80
    assert files.stored_bytes(store, "key_1", now_s=20.0) == 40
    files.remove(store, kept.id)
    files.add(store, file("key_1"), now_s=20.0, max_stored_bytes=40)
    assert len(files.list_page(store, FilePage(10), now_s=20.0)) == 2
