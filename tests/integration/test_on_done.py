"""What hears that a job has ended: commands and webhooks, of a job file and of the deployment."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deployment_rig import JOB_FILE, DeploymentRig
from openai import OpenAI
from store_builders import execute

from batchrun.config import OnDone
from batchrun.jobs.on_done import TOLD_PREFIX, Messenger
from batchrun.store import jobs
from batchrun.store.database import open_store
from batchrun.store.jobs import NewJob

SECRET = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0cw=="
RECORD = """
import os, sys
open(sys.argv[1], "a").write(sys.stdin.read() + os.environ["BATCHRUN_JOB_ID"] + "\\n")
"""


class Listener:
    """A web server that keeps what it is sent; `refusals` of the next calls are refused."""

    def __init__(self) -> None:
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self.refusals = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.heard.append((dict(self.headers.items()), body))
                status = 503 if outer.refusals > 0 else 204
                outer.refusals -= 1
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks/of-mine?key=hidden"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DeploymentRig]:
    made = DeploymentRig(tmp_path)
    made.use_fake_engine()
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    yield made
    made.close()


def with_webhook(url: str) -> str:
    return JOB_FILE + f"on_done: {{webhook: '{url}', secret_file: secret}}\n"


def until_told(rig: DeploymentRig, job_id: str, state: str) -> dict[str, Any]:
    """How it went to tell of the job's end, once it is so."""
    view = rig.wait_for(
        job_id, lambda v: v["on_done"] is not None and v["on_done"]["state"] == state
    )
    return dict(view["on_done"])


@pytest.mark.nightly
def test_a_signed_webhook_is_tried_again_over_a_restart_until_it_is_taken(
    rig: DeploymentRig, listener: Listener
) -> None:
    listener.refusals = 2
    job_id = rig.submit_rows("one", "two", job=with_webhook(listener.url))
    first = until_told(rig, job_id, "waiting")
    assert first["said"] == "HTTP 503" and first["target"] == "webhook http://127.0.0.1"
    rig.kill("daemon")
    shown = rig.call("status", job_id).stdout
    assert "webhook http://127.0.0.1 did not take it" in shown and "hidden" not in shown

    rig.ask("up", "-d")

    told = until_told(rig, job_id, "delivered")
    assert told["num_tries"] == len(listener.heard) == 3
    headers, body = listener.heard[-1]
    with OpenAI(api_key="unused") as client:
        client.webhooks.verify_signature(body.decode(), headers, secret=SECRET)
        with pytest.raises(ValueError, match="signature"):
            client.webhooks.verify_signature(body.decode() + " ", headers, secret=SECRET)
    said = json.loads(body)
    assert said["type"] == "job.ended"
    assert (said["data"]["id"], said["data"]["state"]) == (job_id, "completed")
    assert (said["data"]["num_completed"], said["data"]["num_failed"]) == (2, 0)
    assert headers["webhook-id"] == listener.heard[0][0]["webhook-id"]
    assert "took it at try 3: HTTP 204" in rig.call("status", job_id).stdout


def test_the_deployment_s_command_hears_of_jobs_and_batches_and_a_job_s_own_goes_first(
    rig: DeploymentRig, listener: Listener
) -> None:
    heard = rig.folder / "heard.jsonl"
    rig.use_fake_engine(on_done=[sys.executable, "-c", RECORD, str(heard)])
    plain = rig.submit_rows("one")
    until_told(rig, plain, "delivered")
    own = rig.submit_rows("one", job=with_webhook(listener.url))
    until_told(rig, own, "delivered")
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "fake", "messages": [{"role": "user", "content": "hello"}]},
    }
    with rig.openai() as client:
        file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"on_done": "touch /tmp/never"},
        )
    until_told(rig, batch.id, "delivered")

    ids = [said["id"] for said in map(json.loads, told_lines(heard))]
    assert ids == [plain, batch.id]
    assert [json.loads(body)["data"]["id"] for _, body in listener.heard] == [own]


def told_lines(path: Path) -> list[str]:
    """The objects of a file in which each is followed by its job's id."""
    lines = path.read_text().splitlines()
    assert all(line.endswith(json.loads(line[: line.rindex("}") + 1])["id"]) for line in lines)
    return [line[: line.rindex("}") + 1] for line in lines]


async def test_while_nothing_can_be_written_an_end_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.jobs.on_done.POLL_S", 0.01)
    path, heard = tmp_path / "store.db", tmp_path / "heard"
    command = ("sh", "-c", f"echo told >> {heard}")
    with closing(open_store(path)) as store:
        job_id = jobs.create(store, NewJob("name", "{}", "{}", "hash", 1), now_s=1.0).id
        jobs.replace_settings(store, [], {jobs.ENDED_PREFIX + job_id: {}})
        full = (
            "CREATE TRIGGER full BEFORE INSERT ON settings BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
        execute(path, full)
        telling = asyncio.create_task(Messenger(store, OnDone(command=command), tmp_path).run())
        while not heard.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        execute(path, "DROP TRIGGER full")
        while not jobs.list_settings(store, TOLD_PREFIX):
            await asyncio.sleep(0.01)
        telling.cancel()
        await asyncio.wait([telling])

    assert heard.read_text() == "told\n"


@pytest.mark.nightly
def test_a_command_that_hangs_holds_up_no_job(rig: DeploymentRig) -> None:
    job = JOB_FILE + "on_done: [sleep, '3600']\n"
    jobs = [rig.submit_rows("one", job=job)]
    for i in range(5):
        rig.write_job(job.replace("sample", f"job {i}"))
        jobs.append(rig.ask("submit", "job.yaml")["id"])

    assert [rig.wait_until_ended(job_id)["state"] for job_id in jobs] == ["completed"] * 6
    assert rig.ask("down")["stopped"] == ["daemon", "gateway", "engine 0"]


@pytest.mark.parametrize(
    ("on_done", "said"),
    [
        ("{webhook: ftp://x}", "on_done.webhook: must be a URL such as"),
        ("{}", "on_done: takes either 'command' or 'webhook'"),
        ("{command: [a], webhook: 'http://x'}", "on_done: takes either"),
        ("{command: [a], secret_file: secret}", "'secret_file' signs what a 'webhook' gets"),
        ("[]", "on_done: must not be empty"),
        ("{webhook: 'http://x', secret_file: none}", "none: cannot be read: No such file"),
    ],
)
def test_what_cannot_be_told_is_said_at_submit(rig: DeploymentRig, on_done: str, said: str) -> None:
    rig.write_rows(["one"])
    rig.write_job(JOB_FILE + f"on_done: {on_done}\n")

    code, line = rig.refuse("submit", "job.yaml")

    assert code == 2
    assert "job.yaml:9: on_done" in line and said in line
