"""Objects behind URLs: what is refused, what goes wrong and how it is said, what is left behind."""

from __future__ import annotations

import http.server
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from object_store import ObjectStore

from batchrun.errors import (
    BatchrunError,
    DataError,
    MissingObjectError,
    StorageError,
    StorageUnreachableError,
)
from batchrun.files import check_place, check_prefix, is_url, name_of
from batchrun.jobs import objects
from batchrun.jobs.results.output_parts import is_written, part_name, upload
from benchmarks.deployment import free_port

DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@pytest.fixture(autouse=True)
def fresh_clients() -> Iterator[None]:
    """No client outlives the environment that it was made in."""
    yield
    objects.file_system.cache_clear()


@contextmanager
def server_that_denies() -> Iterator[str]:
    """A server that refuses every call, as S3 does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", str(len(DENIED)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(DENIED)

        do_HEAD = do_PUT = do_GET

        def log_message(self, *args: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host/rows.parquet", "http:// is not served; use s3://"),
        ("file:///etc/passwd", "file:// is not served"),
        ("memory://x/y", "memory:// is not served"),
        ("ssh://host/rows.parquet", "ssh:// is not served"),
        ("s3://bucket/a::file:///etc/passwd", "'::'"),
        ("s3:///key", "names no bucket"),
        ("s3://bucket", "names no object; write s3://BUCKET/KEY"),
        ("s3://bucket/folder/", "names no object"),
        ("s3://bucket/../other/key", "'..'"),
        ("s3://key:verysecret@bucket/rows", "credentials do not belong in a URL"),
    ],
)
def test_a_url_that_is_not_served_is_refused_in_one_line(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        check_place(url)

    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value) and "verysecret" not in str(refusal.value)


def test_paths_are_paths_and_urls_are_urls() -> None:
    assert [is_url(place) for place in ("a::b.jsonl", "/s3/x", "s3:x", "S3://b/k")] == [
        False, False, False, True,
    ]  # fmt: skip
    assert check_prefix("s3://bucket/a/") == "s3://bucket/a"
    assert name_of("s3://bucket/a/" + "\u00e4" * 500 + ".parquet").endswith("\u00e4.parquet")
    with pytest.raises(ValueError, match="must be a URL such as s3://BUCKET/PREFIX"):
        check_prefix("/var/files")


def test_large_objects_go_both_ways_and_leave_no_upload(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    content = os.urandom(2 * objects.PIECE_BYTES + 12_345)
    (tmp_path / "in").write_bytes(content)
    bucket.begin_upload("large")
    bucket.begin_upload("large-of-another")

    objects.put(tmp_path / "in", "s3://bucket/large")
    found = objects.fetch("s3://bucket/large", tmp_path / "out")

    assert (tmp_path / "out").read_bytes() == content
    assert found.size_bytes == len(content)
    assert (tmp_path / "out").stat().st_mtime == found.modified_at
    assert bucket.uploads() == ["large-of-another"]
    with objects.open_to_read("s3://bucket/large") as file:
        file.seek(-5, os.SEEK_END)
        assert (file.read(), file.read()) == (content[-5:], b"")


def test_an_output_of_many_files_takes_the_place_of_an_older_one(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    place = "s3://bucket/out/answers.parquet"
    assert not is_written(place, 10)
    bucket.write("out/answers.parquet", b"an output of one file")
    for num_parts in (3, 2):
        folder = tmp_path / str(num_parts)
        folder.mkdir()
        for number in range(num_parts):
            (folder / part_name(number, ".parquet")).write_bytes(b"%d" % num_parts)
        upload(folder, place)
        bucket.write("out/answers.parquet/notes.txt", b"mine")

    assert is_written(place, 10)
    assert not objects.exists(place)
    assert objects.names_below(place) == [
        "notes.txt", "part-000000.parquet", "part-000001.parquet"
    ]  # fmt: skip
    assert objects.read(f"{place}/part-000000.parquet", 0, 1) == b"2"
    assert objects.names_below("s3://bucket/none") == []


def test_an_object_that_is_replaced_while_it_is_read_is_refused(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    url = bucket.write("changing", b"first")

    def replace(stage: str, done: int, total: int) -> None:
        bucket.write("changing", b"other")

    with pytest.raises(DataError, match="changing: was replaced while it was read"):
        objects.fetch(url, tmp_path / "out", replace)


def test_a_pattern_gives_its_objects_in_order(bucket: ObjectStore) -> None:
    for name in ("p/part-2.jsonl", "p/part-10.jsonl", "p/other.jsonl", "p/part-1/x.jsonl"):
        bucket.write(name, b"{}")

    found = objects.expand("s3://bucket/p/part-*.jsonl")

    assert found == ["s3://bucket/p/part-10.jsonl", "s3://bucket/p/part-2.jsonl"]
    with pytest.raises(DataError, match=r"q-\*: no object matches"):
        objects.expand("s3://bucket/q-*")


class AzureBlobs:
    """What adlfs tells of the objects `c/d/1` and `c/d/2` of an account; they are never the same
    twice in when they were read."""

    num_reads = itertools.count()

    def __init__(self, account_name: str, **options: object) -> None:
        self.account_name = account_name

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, str]:
        return {"account_name": url.partition("://")[2].partition(".")[0].rpartition("@")[2]}

    @staticmethod
    def _strip_protocol(url: str) -> str:
        host, _, rest = url.partition("://")[2].partition("/")
        container = host.rpartition("@")[0]
        return f"{container}/{rest}" if container else rest

    def info(self, path: str) -> dict[str, object]:
        if (self.account_name, path) not in {("acct", "c/d/1"), ("acct", "c/d/2")}:
            raise FileNotFoundError
        return {"type": "file", "size": 1, "last_accessed_on": next(self.num_reads), "etag": "1"}

    def glob(self, path: str, *, detail: bool) -> dict[str, dict[str, object]]:
        assert (path, detail) == ("c/d/*", True)
        return {key: self.info(key) for key in ("c/d/1", "c/d/2")}


@pytest.mark.parametrize("above", ["abfs://c@acct.x.net", "abfs://acct.x.net/c"])
def test_azures_objects_stay_in_their_account_and_are_not_replaced_by_reading(
    monkeypatch: pytest.MonkeyPatch, above: str
) -> None:
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda scheme: AzureBlobs)

    found = objects.expand(f"{above}/d/*")

    assert found == [f"{above}/d/1", f"{above}/d/2"]
    assert objects.find(found[0]) == objects.find(found[0])


def test_what_is_missing_is_said_and_removing_it_is_no_error(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b"x")

    with pytest.raises(MissingObjectError, match="s3://bucket/none: there is no such object"):
        objects.find("s3://bucket/none")
    with pytest.raises(StorageError, match="s3://nowhere/x: there is no such bucket"):
        objects.put(tmp_path / "in", "s3://nowhere/x")
    with pytest.raises(MissingObjectError, match="there is no bucket 'nowhere'"):
        objects.check_bucket("s3://nowhere/x")
    objects.check_bucket("s3://bucket/x")
    objects.remove("s3://bucket/none")
    objects.remove("s3://nowhere/none")


def test_a_storage_that_does_not_answer_is_passing_trouble(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")

    with pytest.raises(StorageUnreachableError) as failure:
        objects.check_bucket("s3://bucket/x")

    assert "s3://bucket/x: the storage does not answer" in str(failure.value)
    assert (failure.value.exit_code, failure.value.http_status) == (4, 503)


def test_a_refusal_is_lasting_trouble_and_names_no_secret(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b"x")
    said: list[BatchrunError] = []
    with server_that_denies() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        calls: list[Callable[[], object]] = [
            lambda: objects.read("s3://bucket/x", 0, 1),
            lambda: objects.put(tmp_path / "in", "s3://bucket/x"),
            lambda: objects.expand("s3://bucket/x-*"),
        ]
        for call in calls:
            with pytest.raises(StorageError, match="s3://bucket/x") as failure:
                call()
            said.append(failure.value)
        objects.check_bucket("s3://bucket/x")

    assert all("access denied" in str(error) and "\n" not in str(error) for error in said)
    assert not any("secret" in str(error) or "127.0.0.1" in str(error) for error in said)
    assert {error.http_status for error in said} == {500}


def test_without_credentials_the_environment_is_named(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(StorageError, match=r"access denied \(NoCredentialsError\).*environment"):
        objects.find("s3://bucket/x")


def test_a_missing_library_is_named_with_its_command() -> None:
    program = (
        "import sys; sys.modules['s3fs'] = None; from batchrun.jobs import objects; "
        "objects.find('s3://bucket/x')"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    needs = "s3://bucket/x: reading s3:// needs s3fs: pip install 'batchrun[s3]'"
    assert done.stderr.splitlines()[-1] == f"batchrun.errors.ConfigError: {needs}"
