"""Jobs whose places are objects, at submission: what is kept of them, and what is refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from cli_call import Cli, cli_in, line_of
from object_store import ObjectStore

from batchrun.errors import ConfigError, DataError
from batchrun.files import LOCK, PREFIX, remove_left_scratch, scratch_folder
from batchrun.home import Home
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.pin import InputPin
from batchrun.jobs.results.file_bytes import open_file_bytes
from batchrun.jobs.results.keeping import ORPHAN_AGE_S, find_unused_links
from batchrun.jobs.submit import open_submitted, prepare_job
from batchrun.store import files, jobs
from batchrun.store.database import open_store
from batchrun.store.files import NewFile
from batchrun.store.jobs import JobRecord

JOB = """\
name: remote
input:
  path: [INPUT]
  messages: [{role: user, content: "{{ text }}"}]
output: {path: OUTPUT}
"""
TARGET = "s3://bucket/out/x.parquet"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_in(tmp_path, monkeypatch, capsys)


def write_job(folder: Path, source: str, target: str = TARGET) -> Path:
    path = folder / "job.yaml"
    path.write_text(JOB.replace("INPUT", source).replace("OUTPUT", target))
    return path


def submit(folder: Path, source: str) -> tuple[JobRecord, Path]:
    """A job in a store, and the folder of its copies."""
    links = folder / "inputs"
    links.mkdir(exist_ok=True)
    spec = load_job_file(write_job(folder, source), cwd=folder)
    store = open_store(folder / "store.db")
    record = jobs.create(store, prepare_job(spec, links=links), now_s=1.0)
    store.close()
    return record, links


def texts(record: JobRecord, links: Path) -> list[object]:
    """The rows that a daemon reads."""
    spec = load_job_file(Path(links.parent / "job.yaml"), cwd=links.parent)
    with open_submitted(record, spec, links=links) as data:
        return [row["text"] for _, rows in data.iter_rows() for row in rows]


def test_the_rows_are_those_that_were_submitted_whatever_becomes_of_the_object(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    old, new = [json.dumps({"text": text}).encode() for text in ("old", "new")]
    record, links = submit(tmp_path, bucket.write("rows.jsonl", old))
    later, _ = submit(tmp_path, bucket.write("rows.jsonl", new))
    bucket.remove("rows.jsonl")

    assert (texts(record, links), texts(later, links)) == (["old"], ["new"])
    (pinned,) = InputPin.model_validate_json(record.pin).files
    assert pinned.path == "s3://bucket/rows.jsonl"


def test_equal_names_in_two_folders_are_two_files(bucket: ObjectStore, tmp_path: Path) -> None:
    for number in (1, 2):
        bucket.write(f"two/{number}/rows.jsonl", b'{"text": "%d"}' % number)

    record, links = submit(tmp_path, "s3://bucket/two/*/rows.jsonl")

    assert texts(record, links) == ["1", "2"]
    assert len(list(links.iterdir())) == 2


def test_a_copy_that_is_gone_is_fetched_again_if_it_is_what_it_was(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    record, links = submit(tmp_path, bucket.write("lost.jsonl", b'{"text": "a"}'))
    next(links.iterdir()).unlink()
    assert texts(record, links) == ["a"]

    (copy,) = links.iterdir()
    copy.unlink()
    bucket.write("lost.jsonl", b'{"text": "b"}')
    with pytest.raises(DataError, match=r"s3://bucket/lost.jsonl: changed .* --accept-input"):
        texts(record, links)
    bucket.remove("lost.jsonl")
    with pytest.raises(DataError, match=r"s3://bucket/lost.jsonl: there is no such object"):
        texts(record, links)
    assert list(links.iterdir()) == []


def test_a_copy_goes_only_when_no_submission_can_count_on_it(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    _, links = submit(tmp_path, bucket.write("kept.jsonl", b'{"text": "a"}'))
    (copy,) = links.iterdir()
    made_at = copy.stat().st_ctime

    assert find_unused_links([], links=links, now_s=made_at + ORPHAN_AGE_S - 1) == []
    (unused,) = find_unused_links([], links=links, now_s=made_at + ORPHAN_AGE_S + 1)
    assert unused.size_bytes == len(b'{"text": "a"}')


def test_what_a_killed_submission_leaves_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}{'0' * 16}").mkdir()
    dead = tmp_path / f"{PREFIX}{'1' * 16}"
    (dead / "new").mkdir(parents=True)
    (dead / LOCK).touch()
    with scratch_folder(tmp_path) as living:
        (living / "copy").write_bytes(b"x")
        remove_left_scratch(tmp_path)

        assert [path.name for path in tmp_path.iterdir()] == [living.name]
        assert (living / "copy").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "target", "line"),
    [
        ("s3://bucket/none.jsonl", TARGET, "s3://bucket/none.jsonl: there is no such object"),
        ("s3://bucket/no-*.jsonl", TARGET, "s3://bucket/no-*.jsonl: no object matches"),
        ("s3://bucket/bad.parquet", TARGET, "s3://bucket/bad.parquet: "),
        ("http://host/x.jsonl", TARGET, "job.yaml:3: input.path[0]: http:// is not served"),
        ("s3://bucket/good.jsonl", "s3://nowhere/x.jsonl", "job.yaml:5: output.path: s3://nowhere"),
        ("s3://bucket/good.jsonl", "s3://bucket/good.jsonl", "job.yaml:5: output.path: would over"),
        ("s3://bucket/good.jsonl", "s3://bucket/x.csv", "job.yaml:5: output.path: must end in"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    bucket: ObjectStore, tmp_path: Path, cli: Cli, source: str, target: str, line: str
) -> None:
    bucket.write("good.jsonl", b'{"text": "a"}')
    bucket.write("bad.parquet", b"PAR1 and no more")
    write_job(tmp_path, source, target)

    tried = cli("submit", "job.yaml", "--dry-run")
    refused = cli("submit", "job.yaml")

    assert line_of(refused, 2).startswith(line)
    assert tried == refused
    assert not list(tmp_path.glob("home/inputs/*"))


def test_a_storage_that_is_away_is_one_line_with_its_own_code(
    bucket: ObjectStore, tmp_path: Path, cli: Cli
) -> None:
    write_job(tmp_path, bucket.write("away.jsonl", b'{"text": "a"}'))
    with bucket.away():
        said = line_of(cli("submit", "job.yaml"), 4)

    assert "does not answer" in said and str(bucket.port) not in said


def test_a_batch_file_without_a_template_is_known_and_inspected(
    bucket: ObjectStore, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * (2 << 20)}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    bucket.write("batch/1.jsonl", json.dumps(line).encode() + b"\n")
    (tmp_path / "job.yaml").write_text(
        "name: a\ninput: {path: s3://bucket/batch/*.jsonl}\noutput: {path: out.jsonl}\n"
    )

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    for command in (["inspect", "job.yaml"], ["submit", "job.yaml", "--dry-run"]):
        code, out, err = cli(*command, "--json")

        assert code == 0, err
        assert json.loads(out)["rows"] == 1
        assert sorted(tmp_path.iterdir()) == before


def test_files_that_lie_at_another_url_are_not_left_behind(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    store = open_store(home.store)
    open_file_bytes(home, "s3://bucket/a", store)
    open_file_bytes(home, "s3://bucket/b", store)
    files.add(store, NewFile("a", "batch", 1, "0", None), now_s=1.0)

    for url, words in (("s3://bucket/a", "`files` s3://bucket/a"), (None, "no `files`")):
        with pytest.raises(ConfigError, match=f"are in s3://bucket/b, .* has {words}"):
            open_file_bytes(home, url, store)
    place = open_file_bytes(home, "s3://bucket/b", store)
    assert place.place_of("file-x") == "s3://bucket/b/file-x"
    store.close()
