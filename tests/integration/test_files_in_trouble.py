"""Files of OpenAI's API where something is in the way: no daemon, a full disk, too many bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import psutil
import pytest
from batch_client import ask, chat_line, chat_lines, deployment_client, error_of
from batch_rig import jsonl
from deployment_rig import DeploymentRig
from openai import APIStatusError, InternalServerError

from batchrun.jobs.batch import MAX_INPUT_BYTES


def test_while_the_daemon_is_away_callers_are_told_when_to_come_again(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    with deployment_client(rig, max_retries=0) as client:
        made = client.openai.files.create(file=jsonl(chat_lines(1)), purpose="batch")
        rig.kill("daemon")

        reply = ask(rig, "GET", f"/files/{made.id}")
        error_of(reply)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        with pytest.raises(InternalServerError):
            client.upload(chat_lines(100_000))

        (rig.home / "files" / ".file-left.0123abcd.part").write_bytes(b"half")
        rig.ask("up", "-d")
        assert client.openai.files.retrieve(made.id) == made
        assert [path.name for path in Path(rig.home / "files").iterdir()] == [made.id]


def test_a_full_disk_is_said_and_leaves_nothing(
    rig: DeploymentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRUN_FAILPOINTS", "output.rename.before=raise")
    rig.use_fake_engine()
    with deployment_client(rig, max_retries=5) as client:
        with pytest.raises(InternalServerError) as refusal:
            client.upload(chat_lines(1))

        assert refusal.value.status_code == 507
        assert refusal.value.response.headers["x-should-retry"] == "false"
        assert str(rig.home) not in refusal.value.message
        assert list((rig.home / "files").iterdir()) == []
        assert client.openai.files.list().data == []


@pytest.mark.nightly
def test_uploads_and_downloads_of_any_size_take_little_memory(
    rig: DeploymentRig, tmp_path: Path
) -> None:
    rig.use_fake_engine()
    path = tmp_path / "large.jsonl"
    line = json.dumps(chat_line("a", "x" * 1_000_000)).encode() + b"\n"
    with path.open("wb") as file:
        for _ in range(MAX_INPUT_BYTES // len(line)):
            file.write(line)
    with deployment_client(rig, max_retries=0) as client:
        client.upload(chat_lines(1))
        processes = {what: psutil.Process(rig.pid_of(what)) for what in ("daemon", "gateway")}
        before = {what: process.memory_info().rss for what, process in processes.items()}

        made = client.openai.files.create(file=path, purpose="batch")
        with client.openai.files.with_streaming_response.content(made.id) as reply:
            digest = hashlib.sha256()
            for piece in reply.iter_bytes(1 << 20):
                digest.update(piece)

        for what, process in processes.items():
            assert process.memory_info().rss - before[what] < 60_000_000, what
    with path.open("rb") as file:
        assert digest.hexdigest() == hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.nightly
def test_a_file_that_is_too_large_is_refused(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    with deployment_client(rig, max_retries=0) as client:
        with pytest.raises(APIStatusError) as refusal:
            client.openai.files.create(file=b"{}\n" + b" " * MAX_INPUT_BYTES, purpose="batch")

        assert (refusal.value.status_code, refusal.value.param) == (413, "file")
        assert list((rig.home / "files").iterdir()) == []
