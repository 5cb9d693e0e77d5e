"""Jobs and OpenAI's files in object storage: end to end, through kills, and while it is away."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_client import ask, chat_line, chat_lines, deployment_client, error_of
from batch_rig import jsonl, offline_work_held
from deployment_rig import DeploymentRig
from kill_rig import wait_until
from object_store import ObjectStore
from store_builders import execute

from batchrun.failpoints import VARIABLE
from batchrun.jobs import objects
from batchrun.jobs.batch import MAX_INPUT_BYTES

JOB = """\
name: remote
input:
  path: [INPUT]
  id: id
  messages: [{role: user, content: "{{ text }}"}]
request: {max_tokens: 8}
output: {path: OUTPUT, keep: [text]}
"""
FILES = "api/files"


@pytest.fixture(scope="module")
def rig(
    bucket: ObjectStore, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DeploymentRig]:
    """One deployment whose files lie in the bucket."""
    made = DeploymentRig(tmp_path_factory.mktemp("remote"))
    if request.config.getoption("--store") == "postgresql":
        made.store_url = request.getfixturevalue("postgres").new_database()
    made.use_fake_engine(files=f"s3://bucket/{FILES}/")
    made.ask("up", "-d")
    yield made
    made.close()


def rows(name: str, num_rows: int) -> list[dict[str, str]]:
    return [{"id": f"{name}-{i}", "text": f"question {i} of {name}"} for i in range(num_rows)]


def put_rows(bucket: ObjectStore, key: str, num_rows: int = 4) -> None:
    """A Parquet object with columns id and text."""
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows(key, num_rows)), content)
    bucket.write(key, content.getvalue())


def submit(rig: DeploymentRig, *options: str, source: str, target: str) -> str:
    """Submit a job over these places; its id."""
    rig.write_job(JOB.replace("INPUT", source).replace("OUTPUT", target), "remote.yaml")
    return str(rig.ask("submit", "remote.yaml", *options)["id"])


def output(bucket: ObjectStore, key: str) -> list[dict[str, Any]]:
    """The rows of an output."""
    content = bucket.read(key)
    if key.endswith(".jsonl"):
        return [json.loads(line) for line in content.splitlines()]
    found: list[dict[str, Any]] = pq.read_table(io.BytesIO(content)).to_pylist()
    return found


def test_a_job_goes_from_objects_to_an_object_whatever_becomes_of_its_input(
    rig: DeploymentRig, bucket: ObjectStore
) -> None:
    for name in ("in/part-2.parquet", "in/part-1.parquet"):
        put_rows(bucket, name)
    with offline_work_held(rig):
        job_id = submit(
            rig, source="s3://bucket/in/part-*.parquet", target="s3://bucket/out/a.parquet"
        )
        bucket.remove("in/part-1.parquet")
        put_rows(bucket, "in/part-2.parquet", 7)
    ended = rig.wait_until_ended(job_id)

    submitted = rows("in/part-1.parquet", 4) + rows("in/part-2.parquet", 4)
    found = output(bucket, "out/a.parquet")
    assert (ended["state"], ended["output_path"]) == ("completed", "s3://bucket/out/a.parquet")
    assert [{key: row[key] for key in ("id", "text")} for row in found] == submitted
    assert all(row["response"] for row in found)
    assert sorted(path.name[33:] for path in (rig.home / "inputs").iterdir()) == [
        "part-1.parquet",
        "part-2.parquet",
    ]

    copied = rig.ask("results", job_id, "-o", "s3://bucket/out/copy.jsonl")
    bucket.remove("out/a.parquet")
    assert rig.call("results", job_id).stdout == "s3://bucket/out/a.parquet\n"
    assert copied == {"id": job_id, "path": "s3://bucket/out/copy.jsonl", "rows": 8}
    assert output(bucket, "out/a.parquet") == found
    assert [row["response"] for row in output(bucket, "out/copy.jsonl")] == [
        row["response"] for row in found
    ]
    assert rig.call("store", "check").returncode == 0

    num_executions = len(rig.executions())
    put_rows(bucket, "in/part-1.parquet")
    again = submit(
        rig, "--continue-from", job_id, source="s3://bucket/in/part-*.parquet",
        target="s3://bucket/out/b.parquet",
    )  # fmt: skip
    assert rig.wait_until_ended(again)["state"] == "completed"
    assert len(rig.executions()) == num_executions + 3
    assert len(output(bucket, "out/b.parquet")) == 11


def test_an_output_of_many_objects_takes_the_place_of_an_older_one(
    rig: DeploymentRig, bucket: ObjectStore
) -> None:
    put_rows(bucket, "in/many.parquet", 7)
    places = {"source": "s3://bucket/in/many.parquet", "target": "s3://bucket/out/m.parquet"}
    for rows_per_file, sizes in ((2, [2, 2, 2, 1]), (4, [4, 3])):
        target = f"{places['target']}, rows_per_file: {rows_per_file}"
        job_id = submit(rig, source=places["source"], target=target)
        assert rig.wait_until_ended(job_id)["state"] == "completed"

        names = objects.names_below(places["target"])
        parts = [output(bucket, f"out/m.parquet/{name}") for name in names]
        assert [len(part) for part in parts] == sizes
        assert [row["id"] for part in parts for row in part] == [
            row["id"] for row in rows("in/many.parquet", 7)
        ]
        assert rig.call("results", job_id).stdout == "s3://bucket/out/m.parquet\n"
    assert rig.call("store", "check").returncode == 0


@pytest.mark.nightly
def test_a_job_waits_for_a_storage_that_is_away_through_a_kill(
    rig: DeploymentRig, bucket: ObjectStore
) -> None:
    put_rows(bucket, "in/waiting.parquet")
    with offline_work_held(rig):
        job_id = submit(
            rig, source="s3://bucket/in/waiting.parquet", target="s3://bucket/out/w.jsonl"
        )
        bucket.stop()
    waiting = "finalizing, waiting to upload: s3://bucket/out/w.jsonl: the storage does not answer"
    try:
        seen = rig.wait_for(job_id, lambda view: str(view["stage"]).startswith(waiting))
        assert seen["state"] == "finalizing"
        rig.kill("daemon")
        rig.ask("up", "-d")
        rig.wait_for(job_id, lambda view: str(view["stage"]).startswith(waiting))
    finally:
        bucket.start()

    assert rig.wait_until_ended(job_id)["state"] == "completed"
    assert [row["id"] for row in output(bucket, "out/w.jsonl")] == [
        row["id"] for row in rows("in/waiting.parquet", 4)
    ]
    assert not list((rig.home / "inputs").glob(".*"))


@pytest.mark.nightly
def test_an_output_that_storage_refuses_pauses_the_job_with_the_reason(
    rig: DeploymentRig, bucket: ObjectStore
) -> None:
    put_rows(bucket, "in/refused.parquet")
    with offline_work_held(rig):
        job_id = submit(
            rig, source="s3://bucket/in/refused.parquet", target="s3://other/refused.jsonl"
        )
        bucket.remove_bucket("other")

    paused = rig.wait_until_ended(job_id)
    assert (paused["state"], paused["reason"]) == (
        "paused",
        "output not written: s3://other/refused.jsonl: there is no such bucket",
    )
    bucket.make_bucket("other")
    put_rows(bucket, "in/refused.parquet")
    rig.ask("resume", job_id, "--accept-input")
    assert rig.wait_until_ended(job_id)["state"] == "completed"


@pytest.mark.slow
def test_files_and_batches_live_in_the_bucket(rig: DeploymentRig, bucket: ObjectStore) -> None:
    with deployment_client(rig, max_retries=0) as client:
        named = ("in\u00e4.jsonl", jsonl(chat_lines(5)))
        source = client.openai.files.create(file=named, purpose="batch")
        empty = client.openai.files.create(file=b"", purpose="user_data")
        assert bucket.read(f"{FILES}/{source.id}") == jsonl(chat_lines(5))
        assert list((rig.home / "files").iterdir()) == []

        made = client.openai.batches.create(
            input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = client.wait_until_ended(made.id)
        assert (batch.status, len(client.lines(batch.output_file_id))) == ("completed", 5)
        reply = ask(rig, "GET", f"/files/{source.id}/content")
        assert reply.content == jsonl(chat_lines(5))
        assert reply.headers["content-disposition"] == "attachment; filename*=utf-8''in%C3%A4.jsonl"
        assert rig.call("store", "check").returncode == 0

        client.openai.files.delete(source.id)
        assert ask(rig, "GET", f"/files/{source.id}/content").status_code == 404
        execute(rig.store, f"UPDATE files SET expires_at = 1 WHERE id = '{empty.id}'")
        rig.ask("gc", "--older-than", "1d")
        wait_until(lambda: bucket.keys(FILES) == [f"{FILES}/{batch.output_file_id}"])

        bucket.remove(f"{FILES}/{batch.output_file_id}")
        error_of(reply := ask(rig, "GET", f"/files/{batch.output_file_id}/content"))
        assert reply.status_code == 404
        client.openai.files.delete(str(batch.output_file_id))


def test_callers_are_told_to_come_again_while_storage_is_away(
    rig: DeploymentRig, bucket: ObjectStore
) -> None:
    words = "the server's file storage does not answer; try again shortly"
    with deployment_client(rig, max_retries=0) as client:
        file_id = client.upload(chat_lines(1))
        with offline_work_held(rig):
            batch = client.openai.batches.create(
                input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            client.wait_for(batch.id, lambda batch: batch.status == "in_progress")
            bucket.stop()
        try:
            form = {"purpose": (None, "batch"), "file": ("a.jsonl", jsonl(chat_lines(1)))}
            for reply in (
                ask(rig, "POST", "/files", files=form),
                ask(rig, "GET", f"/files/{file_id}/content"),
            ):
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
                assert reply.json()["error"]["message"] == words
            assert ask(rig, "DELETE", f"/files/{file_id}").status_code == 200
            view = rig.wait_for(batch.id, lambda view: "waiting to upload" in str(view["stage"]))
            assert view["state"] == "finalizing"
        finally:
            bucket.start()
        ended = client.wait_until_ended(batch.id)
        assert (ended.status, len(client.lines(ended.output_file_id))) == ("completed", 1)
        client.openai.files.delete(str(ended.output_file_id))
        assert client.openai.files.list().data == []


@pytest.mark.nightly
def test_a_kill_between_upload_and_commit_leaves_no_orphan_and_loses_nothing(
    rig: DeploymentRig, bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit is slowed, so that a kill finds the object there and no row of it."""

    def restart(failpoints: str) -> None:
        rig.kill("daemon")
        monkeypatch.setenv(VARIABLE, failpoints)
        rig.ask("up", "-d")

    with deployment_client(rig, max_retries=0) as client, ThreadPoolExecutor(1) as pool:
        file_id = client.upload(chat_lines(3))
        restart("store.commit.before=sleep:1.5")
        before = [f"{FILES}/{file_id}"]
        wait_until(lambda: bucket.keys(FILES) == before)
        lost = pool.submit(client.upload, chat_lines(1))
        wait_until(lambda: bucket.keys(FILES) != before)
        restart("store.commit.before=sleep:1.5")
        assert lost.exception() is not None
        wait_until(lambda: bucket.keys(FILES) == before)

        batch = client.openai.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_until(lambda: bucket.keys(FILES) != before)
        restart("")
        ended = client.wait_until_ended(batch.id)
        known = {file.id for file in client.openai.files.list().data}

        assert (ended.status, len(client.lines(ended.output_file_id))) == ("completed", 3)
        assert known == {file_id, ended.output_file_id}
        wait_until(lambda: {key.rpartition("/")[2] for key in bucket.keys(FILES)} == known)
        wait_until(lambda: list((rig.home / "files").iterdir()) == [])


@pytest.mark.nightly
def test_files_of_any_size_take_little_memory(
    rig: DeploymentRig, bucket: ObjectStore, tmp_path: Path
) -> None:
    path = tmp_path / "large.jsonl"
    line = json.dumps(chat_line("a", "x" * 1_000_000)).encode() + b"\n"
    with path.open("wb") as file:
        for _ in range(MAX_INPUT_BYTES // len(line)):
            file.write(line)
    with deployment_client(rig, max_retries=0) as client:
        client.lines(client.upload(chat_lines(1)))
        daemon = psutil.Process(rig.pid_of("daemon"))
        before = daemon.memory_info().rss

        made = client.openai.files.create(file=path, purpose="batch")
        with client.openai.files.with_streaming_response.content(made.id) as reply:
            digest = hashlib.sha256()
            for piece in reply.iter_bytes(1 << 20):
                digest.update(piece)

        assert daemon.memory_info().rss - before < 60_000_000
    with path.open("rb") as file:
        assert digest.hexdigest() == hashlib.file_digest(file, "sha256").hexdigest()
