"""Who holds the store's lock, asked without touching it."""

from __future__ import annotations

import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cli_call import cli_in

from batchrun.control.client import DaemonClient
from batchrun.errors import DaemonUnavailableError, StoreLockedError
from batchrun.files import StoreLock
from batchrun.home import Home


def test_a_held_lock_names_its_holder(tmp_path: Path) -> None:
    with StoreLock(tmp_path / "store.lock"):
        assert StoreLock(tmp_path / "store.lock").find_holder() == os.getpid()


def test_a_free_lock_has_no_holder_and_looking_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.lock"
    assert StoreLock(path).find_holder() is None
    assert not path.exists()

    with StoreLock(path):
        pass
    path.write_text("4711")

    assert StoreLock(path).find_holder() is None
    assert path.read_text() == "4711"


def test_a_lock_holds_though_its_file_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "store.lock"
    with StoreLock(path):
        path.unlink()
        assert StoreLock(path).find_holder() == os.getpid()
        with pytest.raises(StoreLockedError):
            StoreLock(path).acquire()
        assert path.read_text() == ""
        assert StoreLock(path).find_holder() == os.getpid()
    with StoreLock(path):
        pass


def test_of_a_daemon_that_hangs_a_command_does_not_say_that_none_runs(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    with socket.create_server(("127.0.0.1", 0)) as server, StoreLock(home.store_lock):
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        home.daemon_record.write_text(json.dumps({"pid": os.getpid(), "url": url, "token": "t"}))
        client = DaemonClient(home, timeout_s=0.1)
        silence = f"the daemon of {home.path} (pid {os.getpid()}) runs and gave no answer within"
        with pytest.raises(DaemonUnavailableError) as asked:
            client.get("/status")
        assert str(asked.value) == f"{silence} 0.1 s; `batchrun down` ends it"
        with pytest.raises(DaemonUnavailableError) as ordered:
            client.post("/fleets", {"fleet": "fleet", "replicas": 4})
        told = "it may do what was asked all the same, `batchrun down` ends it"
        assert str(ordered.value) == f"{silence} 0.1 s; {told}"
    with pytest.raises(DaemonUnavailableError, match="no daemon runs for"):
        client.get("/status")


def test_of_a_daemon_that_takes_no_calls_no_answer_is_missed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    with socket.socket() as unheard, StoreLock(home.store_lock):
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        home.daemon_record.write_text(json.dumps({"pid": os.getpid(), "url": url, "token": "t"}))
        with pytest.raises(DaemonUnavailableError) as asked:
            DaemonClient(home).post("/fleets", {"fleet": "fleet", "replicas": 4})
    silence = f"the daemon of {home.path} (pid {os.getpid()}) runs and takes no calls"
    assert str(asked.value) == f"{silence}, as while it starts or stops; try again"


def write_job(folder: Path, home: Home) -> None:
    """job.json, and a home for it."""
    home.create()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    asked = {"path": "rows.jsonl", "messages": [{"role": "user", "content": "{{ text }}"}]}
    job = {"name": "small", "input": asked, "output": {"path": "out.jsonl"}}
    (folder / "job.json").write_text(json.dumps(job))


class TakesJobs(BaseHTTPRequestHandler):
    """A daemon that is there and takes a job, and is not heard of it again."""

    def do_GET(self) -> None:
        if self.path.endswith("/status"):
            self._answer({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"id": "small_1"})

    def _answer(self, document: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())


def test_who_runs_a_job_is_told_of_a_daemon_that_begins_to_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchrun.control.following.SILENCE_PATIENCE_S", 0.0)
    home, call = Home(tmp_path / "home"), cli_in(tmp_path, monkeypatch, capsys)
    write_job(tmp_path, home)
    with HTTPServer(("127.0.0.1", 0), TakesJobs) as server, StoreLock(home.store_lock):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        home.daemon_record.write_text(json.dumps({"pid": os.getpid(), "url": url, "token": "t"}))
        silence = DaemonClient(home).describe_silence()
        code, _, err = call("run", "job.json")
        server.shutdown()
    last = f"{silence}; `batchrun down` ends it, then `batchrun run job.json` goes on where it was"
    assert (code, err.splitlines()[-1]) == (3, f"batchrun: {last}")


def test_who_waits_for_a_job_is_told_of_a_daemon_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DaemonClient.__init__, "__kwdefaults__", {"timeout_s": 0.1})
    home, call = Home(tmp_path / "home"), cli_in(tmp_path, monkeypatch, capsys)
    write_job(tmp_path, home)
    with socket.create_server(("127.0.0.1", 0)) as server, StoreLock(home.store_lock):
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        home.daemon_record.write_text(json.dumps({"pid": os.getpid(), "url": url, "token": "t"}))
        silence = DaemonClient(home).describe_silence()
        said = call("submit", "job.json", "--wait")
    line = f"batchrun: job.json was not submitted: {silence}; `batchrun down` ends it\n"
    assert said == (3, "", line)
