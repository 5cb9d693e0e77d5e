"""A home that has had any number of jobs: what is asked all the time costs no more for that."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import update
from store_builders import add_batch, answered, execute, refused

from batchrun.cli import results as commands
from batchrun.control.submitting import view_jobs
from batchrun.daemon.view import view_stored, view_stored_job
from batchrun.errors import StateError, UnknownJobError
from batchrun.home import Home
from batchrun.jobs.batch import new_batch_job
from batchrun.jobs.results.keeping import check_files
from batchrun.python.handle import Job
from batchrun.store import batches, jobs, results
from batchrun.store.batches import NewBatch
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.store.retention import remove_results
from batchrun.store.schema import jobs as table
from batchrun.types import JobState

CHAT = "/v1/chat/completions"
SPEC = {"name": "n", "input": {"path": "/rows.csv", "format": "csv", "messages": "{{ text }}"}}


def add(store: Store, end: JobState | None, owner: str | None = None) -> JobRecord:
    """A batch that was cancelled, or has not ended."""
    job = new_batch_job(Path("/srv"), CHAT, deadline_s=60.0, weight=1.0)
    made = add_batch(
        store, NewBatch("file-1", CHAT, "24h", None, None, "h", owner=owner), job, now_s=1.0
    )
    if end is not None:
        jobs.request_cancel(store, made.job.id, now_s=2.0)
        jobs.finish(store, made.job.id, now_s=3.0)
    return jobs.get(store, made.job.id)


def test_of_jobs_that_have_ended_the_newest_are_shown_and_the_others_counted(store: Store) -> None:
    ends = [JobState.CANCELLED, None, *[JobState.CANCELLED] * 4]
    old, running, *_, older, newer, newest = (add(store, end) for end in ends)

    shown, num_more = jobs.list_shown(store, 2)
    assert [record.id for record in shown] == [running.id, newer.id, newest.id]
    assert num_more == 3
    for also in (old.id, old.id[:-2]):
        shown, num_more = jobs.list_shown(store, 2, also)
        assert [record.id for record in shown] == [old.id, running.id, newer.id, newest.id]
        assert num_more == 2
    assert len(jobs.list_shown(store, 2, old.name)[0]) == 3
    with pytest.raises(UnknownJobError):
        jobs.list_shown(store, 2, older.id[:-1] + "%")


def test_a_name_means_its_newest_job_alone_and_a_beginning_must_be_unique(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    ids = [f"job_a{end}23456789" for end in "abc"]
    with closing(open_store(home.store_location)) as store:
        for job_id in ids:
            made = NewJob("nightly", "{}", "{}", "hash", 2, id=job_id)
            jobs.create(store, made, now_s=1.0)
        named = jobs.create(store, NewJob("job", "{}", "{}", "hash", 2, id="batch_1"), now_s=1.0)

    meant = [("nightly", ids[2]), (ids[0], ids[0]), (ids[1][:6], ids[1]), ("job", named.id)]
    for asked, job_id in meant:
        assert [view["id"] for view in view_jobs(home, asked)["jobs"]] == [job_id]
    for asked in ("job_a", "other"):
        with pytest.raises(UnknownJobError, match="no such job"):
            view_jobs(home, asked)
    with closing(open_store(home.store_location)) as store:
        jobs.create(store, NewJob("n", "{}", "{}", "hash", 2, id="job_ab3"), now_s=1.0)
    with pytest.raises(UnknownJobError, match="several jobs begin so"):
        view_jobs(home, "job_ab")


def test_a_whole_name_is_meant_before_the_beginning_of_another_job_s_id(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    with closing(open_store(home.store_location)) as store:
        for name, job_id in {"batch": "batch_123456789", "other": "batch_234567890"}.items():
            jobs.create(store, NewJob(name, "{}", "{}", "hash", 2, id=job_id), now_s=1.0)
        with pytest.raises(UnknownJobError, match="no such job"):
            jobs.get(store, "batch_1")
        made = jobs.create(store, NewJob("batch_12", "{}", "{}", "hash", 2), now_s=1.0)

    assert [view["id"] for view in view_jobs(home, "batch_12")["jobs"]] == [made.id]
    assert [view["id"] for view in view_jobs(home, "batch_23")["jobs"]] == ["batch_234567890"]
    with closing(open_store(home.store_location)) as store:
        assert jobs.get(store, "batch_12") == made


def test_an_output_that_a_later_job_replaced_is_not_told_as_an_earlier_one_s(
    tmp_path: Path,
) -> None:
    home, output = Home(tmp_path / "home"), tmp_path / "out.jsonl"
    home.create()
    output.write_text('{"id": "0"}\n')
    spec = json.dumps(SPEC | {"output": {"path": str(output)}})
    first, last = "job_a23456789a", "job_b23456789a"
    with closing(open_store(home.store_location)) as store:
        for job_id, num_rows, now_s in ((last, 1, 3.0), (first, 2, 2.0)):
            jobs.create(store, NewJob("n", spec, "{}", "hash", num_rows, id=job_id), now_s=1.0)
            jobs.start(store, job_id, now_s=now_s)
            jobs.begin_finalizing(store, job_id, JobState.COMPLETED, now_s=now_s)
            jobs.finish(store, job_id, now_s=now_s)
        assert list(check_files(jobs.list_jobs(store), links=home.inputs)) == []

    line = f"out.jsonl is where {last} wrote its output later; `batchrun results {first} -o OTHER`"
    with pytest.raises(StateError, match=line):
        Job(first, home).results()
    with pytest.raises(StateError, match=line):
        commands.results(first, output=None, partial=False, home=home, as_json=False)
    assert Job(last, home).results().collect().height == 1


@pytest.mark.parametrize("name", ["out_1%.jsonl", 'a"\\é/ü.jsonl', "ü", "\x7f\n"])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_of_later_jobs_only_those_of_the_same_output_are_read(
    store: Store, name: str, *, is_ascii: bool
) -> None:
    def end(job_id: str, path: str, now_s: float) -> JobRecord:
        spec = json.dumps({"output": {"path": path}}, ensure_ascii=is_ascii)
        jobs.create(store, NewJob("n", spec, "{}", "hash", 1, id=job_id), now_s=1.0)
        jobs.start(store, job_id, now_s=now_s)
        jobs.begin_finalizing(store, job_id, JobState.COMPLETED, now_s=now_s)
        return jobs.finish(store, job_id, now_s=now_s)

    first = end("job_first", f"/data/{name}", 2.0)
    end("job_other", "/other/out1.jsonl", 4.0)
    with store.write() as connection:
        connection.execute(update(table).where(table.c.id == "job_other").values(spec="{"))
    results.refuse_replaced(store, first)
    end("job_later", f"/data/{name}", 3.0)

    with pytest.raises(StateError, match="job_later wrote its output later"):
        results.refuse_replaced(store, first)


def test_why_rows_without_ids_failed_is_told_without_their_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    home.create()
    spec = json.dumps(SPEC | {"output": {"path": "/out.jsonl"}})
    with closing(open_store(home.store_location)) as store:
        job = jobs.create(store, NewJob("n", spec, "{}", "hash", 2), now_s=1.0)
        results.commit(store, [(job.seq, refused(1))], now_s=2.0)

    commands.errors(job.id, limit=20, home=home, as_json=True)

    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["row"], error["id"], error["code"]) == (1, "1", "bad_request")


def test_what_the_store_alone_tells_of_jobs_is_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.daemon.view.MOST_ENDED", 3)
    ids = [add(store, JobState.CANCELLED).id for _ in range(5)]

    told = view_stored(store, ids[0])
    views = told["jobs"]
    assert isinstance(views, list)
    assert [view["id"] for view in views] == [ids[0], *ids[2:]]
    assert told["num_more_ended"] == 1


def test_the_cut_answers_of_a_job_are_counted_once_it_ends(store: Store) -> None:
    job = jobs.create(store, NewJob("name", "{}", "{}", "hash", 2), now_s=1.0)
    cut = replace(answered(0), finish_reason="length")
    results.commit(store, [(job.seq, cut), (job.seq, answered(1))], now_s=2.0)
    assert view_stored_job(store, job.id)["num_cut"] == 1
    jobs.request_cancel(store, job.id, now_s=2.0)
    list(remove_results(store, jobs.finish(store, job.id, now_s=3.0), now_s=4.0))

    assert view_stored_job(store, job.id)["num_cut"] == 1


def test_a_key_s_ended_batches_cost_its_next_one_nothing(tmp_path: Path) -> None:
    """What SQLite does to look for a key's open batches, in hundreds of its steps."""
    path, costs = tmp_path / "store.db", []
    store = open_store(path)
    add(store, JobState.CANCELLED, "key_1")
    for num_more in (0, 5_000):
        copy_batch(path, num_more)
        with store.write() as connection:
            steps = count()
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.set_progress_handler(lambda steps=steps: next(steps) < 0, 100)
            assert list(batches._open_ones(connection, "key_1")) == []
            raw.set_progress_handler(None, 0)
            costs.append(next(steps))
    store.close()
    assert costs[1] <= costs[0] + 1


def copy_batch(path: Path, num_copies: int) -> None:
    """So many more like the first one."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n LIMIT {num_copies})"
    with_seq = "CREATE TEMP TABLE one AS SELECT * FROM {0} LIMIT 1"
    if num_copies:
        execute(
            path,
            with_seq.format("jobs"),
            f"CREATE TEMP TABLE more AS {numbers} SELECT one.*, i FROM one, n",
            "UPDATE more SET seq = i, id = 'batch_' || i",
            "ALTER TABLE more DROP COLUMN i",
            "INSERT INTO jobs SELECT * FROM more",
            with_seq.format("batches").replace("one", "two"),
            f"CREATE TEMP TABLE most AS {numbers} SELECT two.*, i FROM two, n",
            "UPDATE most SET job_seq = i",
            "ALTER TABLE most DROP COLUMN i",
            "INSERT INTO batches SELECT * FROM most",
        )
