"""Removing the results of jobs that ended long ago: which, how far, and what a kill leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import update
from store_builders import answered, load_dump, read_tables

from batchrun.config import DeploymentFile
from batchrun.errors import ConfigError, StateError
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.pin import InputPin, link_name, link_names, verify_pin
from batchrun.jobs.results.keeping import ORPHAN_AGE_S, find_unused_links
from batchrun.jobs.submit import prepare_job
from batchrun.quantities import parse_age_s
from batchrun.store import jobs, results, retention
from batchrun.store.check import check_store
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import Counts, JobRecord, NewJob
from batchrun.store.retention import (
    body_bytes,
    find_removable,
    give_disk_back,
    is_shrinkable,
    remove_results,
    rewrite,
    unused_bytes,
)
from batchrun.store.schema import bodies
from batchrun.strict import load_strict
from batchrun.types import JobState

JOB_FILE = """\
name: sample
input: {path: rows.parquet, messages: [{role: user, content: "{{ text }}"}]}
output: {path: out.parquet}
"""
KILLED_IN_PIECE = """
import os, signal, sys
from batchrun.store import jobs, retention; from batchrun.store.database import open_store
retention.ROWS_AT_ONCE = 10
store = open_store(sys.argv[1])
job = jobs.get(store, sys.argv[2])
for number, _ in enumerate(retention.remove_results(store, job, now_s=9.0)):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def ended_job(store: Store, *, num_rows: int = 3, ended_at: float = 5.0) -> JobRecord:
    job = jobs.create(store, NewJob("name", "{}", "{}", "hash", num_rows), now_s=0.0)
    jobs.start(store, job.id, now_s=1.0)
    outcomes = [(job.seq, answered(row, f"answer {row}" * 20)) for row in range(num_rows)]
    results.commit(store, outcomes, now_s=2.0)
    results.record_attempt(store, job.seq, 0, 2)
    results.record_engine_death(store, job.seq, [1])
    jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=1.5)
    return jobs.finish(store, job.id, now_s=ended_at)


def remove(store: Store, job: JobRecord) -> int:
    *_, num_removed = remove_results(store, job, now_s=9.0)
    return num_removed


def test_only_jobs_that_ended_before_are_removable(store: Store) -> None:
    old, new = ended_job(store, ended_at=5.0), ended_job(store, ended_at=7.0)
    running = jobs.create(store, NewJob("name", "{}", "{}", "hash", 1), now_s=0.0)

    assert find_removable(store, ended_before_s=6.0) == [old]
    assert find_removable(store, ended_before_s=8.0) == [old, new]
    assert running not in find_removable(store, ended_before_s=1e12)


def test_answers_that_a_waiting_job_was_promised_stay_until_it_starts(store: Store) -> None:
    old = ended_job(store)
    spec = json.dumps({"continue_from": old.id})
    waiting = jobs.create(store, NewJob("name", spec, "{}", "hash", 1), now_s=6.0)

    assert find_removable(store, ended_before_s=1e12) == []
    jobs.start(store, waiting.id, now_s=7.0)
    assert find_removable(store, ended_before_s=1e12) == [old]


@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_no_job_that_has_not_ended_is_touched(tmp_path: Path, revision: str) -> None:
    store = open_store(load_dump(tmp_path / "old.db", revision))
    live = [job for job in jobs.list_jobs(store) if not job.state.is_terminal]
    before = read_tables(tmp_path / "old.db")

    for job in live:
        with pytest.raises(StateError, match="only the results of ended jobs"):
            remove(store, job)

    assert len(live) == 4
    assert read_tables(tmp_path / "old.db") == before
    store.close()


def test_a_removed_job_keeps_its_counts_and_nothing_else(
    store: Store, store_location: str | Path
) -> None:
    job, other = ended_job(store), ended_job(store)
    counts = results.count(store, job.seq)

    assert remove(store, job) == 3

    tables = read_tables(store_location)
    for table in ("results", "bodies", "attempts", "suspects"):
        assert {row["job_seq"] for row in tables[table]} == {other.seq}
    assert results.count(store, job.seq) == counts == Counts(3, 0, 30, 6, 15)
    assert jobs.get(store, job.id).results_removed_at == 9.0
    assert list(check_store(store)) == []


def test_removed_results_are_refused_with_the_day_they_went(store: Store) -> None:
    job = ended_job(store)
    remove(store, job)

    with pytest.raises(StateError, match="its results were removed on 1970-01-01"):
        next(results.read(store, job.seq))


def test_results_that_go_while_they_are_read_are_missed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ROWS_PER_READ", 2)
    job = ended_job(store, num_rows=6)
    found = results.read(store, job.seq)
    assert next(found).row == 0
    remove(store, job)
    with pytest.raises(StateError, match="its results were removed on"):
        list(found)


def test_a_reader_that_outruns_their_removal_misses_them_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ROWS_PER_READ", 2)
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 4)
    job = ended_job(store, num_rows=6)
    found = results.read(store, job.seq)
    assert next(found).row == 0
    next(remove_results(store, job, now_s=9.0))
    with pytest.raises(StateError, match="its results were removed on"):
        list(islice(found, 3))


def test_a_damaged_reply_is_the_error_of_its_row(store: Store) -> None:
    job = ended_job(store)
    with store.write() as connection:
        damage = update(bodies).where(bodies.c.row == 1).values(content=b"damaged")
        connection.execute(damage)
    found = list(results.read(store, job.seq))
    assert [each.error and each.error.code for each in found] == [None, "result_damaged", None]
    assert found[1].body is None


def test_results_go_in_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 10)
    job = ended_job(store, num_rows=25)

    assert list(remove_results(store, job, now_s=9.0)) == [10, 20, 25, 25]


def test_a_removal_that_was_killed_is_found_again_and_ends(
    store: Store, store_location: str | Path
) -> None:
    job = ended_job(store, num_rows=100)

    command = [sys.executable, "-c", KILLED_IN_PIECE, str(store_location), job.id]
    killed = subprocess.run(command, check=False, timeout=60)

    assert killed.returncode == -signal.SIGKILL
    assert [row["row"] for row in read_tables(store_location)["bodies"]] == [*range(30, 100)]
    assert list(check_store(store)) == []
    (found,) = find_removable(store, ended_before_s=0.0)
    assert remove(store, found) == 70
    assert find_removable(store, ended_before_s=1e12) == []


def test_the_disk_gets_back_what_the_results_took(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = open_store(path)
    job = ended_job(store, num_rows=20_000)
    assert body_bytes(store, job.seq) > 500_000
    list(give_disk_back(store))
    full_bytes = path.stat().st_size

    remove(store, job)
    assert unused_bytes(store) > full_bytes // 2
    left = list(give_disk_back(store))

    assert left == sorted(left, reverse=True)
    assert left[-1] == unused_bytes(store) == 0
    assert path.stat().st_size < full_bytes // 4
    store.close()


def test_a_store_of_the_first_schema_shrinks_once_it_is_rewritten(tmp_path: Path) -> None:
    store = open_store(load_dump(tmp_path / "old.db", "0001"))
    assert not is_shrinkable(store)
    before = read_tables(tmp_path / "old.db")

    rewrite(store)

    assert is_shrinkable(store)
    assert read_tables(tmp_path / "old.db") == before
    store.close()


@pytest.fixture
def pinned(tmp_path: Path) -> tuple[JobRecord, Path]:
    """A job with its input linked, as it is submitted; and the folder of the links."""
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text(JOB_FILE)
    links = tmp_path / "inputs"
    opened = open_store(tmp_path / "jobs.db")
    job = prepare_job(load_job_file(tmp_path / "job.yaml", cwd=tmp_path), links=links)
    record = jobs.create(opened, job, now_s=0.0)
    opened.close()
    return record, links


def test_a_link_is_kept_as_long_as_any_job_needs_it(pinned: tuple[JobRecord, Path]) -> None:
    record, links = pinned
    removed = replace(record, id="job_other", results_removed_at=1.0)

    assert find_unused_links([record, removed], links=links, now_s=1e12) == []
    (unused,) = find_unused_links([removed], links=links, now_s=0.0)
    assert unused.path == next(links.iterdir())
    assert unused.size_bytes == 0


def test_a_link_that_is_the_last_name_of_an_input_frees_its_bytes(
    pinned: tuple[JobRecord, Path], tmp_path: Path
) -> None:
    _, links = pinned
    size_bytes = (tmp_path / "rows.parquet").stat().st_size
    (tmp_path / "rows.parquet").unlink()
    linked_at = next(links.iterdir()).stat().st_ctime

    (unused,) = find_unused_links([], links=links, now_s=linked_at + ORPHAN_AGE_S + 1)

    assert unused.size_bytes == size_bytes


def test_a_fresh_link_without_a_job_and_a_foreign_file_stay(
    pinned: tuple[JobRecord, Path],
) -> None:
    _, links = pinned
    (links / "notes.txt").write_text("mine")
    linked_at = next(links.iterdir()).stat().st_ctime

    assert find_unused_links([], links=links, now_s=linked_at + 60) == []
    old = find_unused_links([], links=links, now_s=linked_at + 2 * ORPHAN_AGE_S)
    assert "notes.txt" not in [link.path.name for link in old]


def test_links_have_the_names_that_submission_gives(pinned: tuple[JobRecord, Path]) -> None:
    record, links = pinned
    (file,) = InputPin.model_validate_json(record.pin).files

    assert [path.name for path in links.iterdir()] == [link_name(file)]


def test_a_link_that_an_older_batchrun_named_is_found_and_kept(
    pinned: tuple[JobRecord, Path],
) -> None:
    record, links = pinned
    pin = InputPin.model_validate_json(record.pin)
    next(links.iterdir()).rename(links / link_names(pin.files[0])[1])
    Path(pin.files[0].path).unlink()

    verify_pin(pin, links=links)
    assert find_unused_links([record], links=links, now_s=1e12) == []


def test_nothing_goes_while_it_is_unknown_what_a_job_needs(
    pinned: tuple[JobRecord, Path],
) -> None:
    record, links = pinned

    assert find_unused_links([replace(record, pin="{")], links=links, now_s=1e12) == []


@pytest.mark.parametrize(("age", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("0d", 0)])
def test_ages_are_days_or_hours(age: str, seconds: float) -> None:
    assert parse_age_s(age) == seconds


@pytest.mark.parametrize("age", ["0d", "30", "1w", "-1d", "1d12h", "forever", 30])
def test_a_retention_that_is_no_age_is_one_line(tmp_path: Path, age: object) -> None:
    (tmp_path / "batchrun.yaml").write_text(f"retention: {age}\n")

    with pytest.raises(ConfigError, match=r"batchrun.yaml:1: retention: "):
        load_strict(tmp_path / "batchrun.yaml", DeploymentFile, ConfigError)
