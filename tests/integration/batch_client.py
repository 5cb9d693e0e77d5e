"""Batches through the ordinary `openai` client, in few words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import batch_rig
import httpx
from batch_rig import CHAT, ENVELOPE, TERMINAL, Line, jsonl
from deployment_rig import WAIT_S, DeploymentRig
from openai import OpenAI
from openai.types import Batch

BATCH_PART = {"purpose": (None, "batch")}
MODEL = "fake"


def chat_line(custom_id: str, text: str = "hello", **body: object) -> Line:
    """A request of a batch, for the model of a fake engine."""
    return batch_rig.chat_line(custom_id, text, **{"model": MODEL, **body})


def chat_lines(num_lines: int) -> list[Line]:
    """So many requests, `row-0` and on."""
    return [chat_line(f"row-{i}", f"question {i}") for i in range(num_lines)]


class BatchClient:
    """The ordinary client, with a few helpers for tests."""

    def __init__(self, openai: OpenAI) -> None:
        self.openai = openai

    def upload(self, lines: Sequence[Any]) -> str:
        """Upload an input; its file id."""
        return self.openai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch").id

    def create(self, lines: Sequence[Any], **options: Any) -> Batch:
        """Upload an input and make a batch of it."""
        given: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **options}
        return self.openai.batches.create(input_file_id=self.upload(lines), **given)

    def wait_for(self, batch_id: str, wanted: Callable[[Batch], bool]) -> Batch:
        """Poll a batch until `wanted(batch)`."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            batch = self.openai.batches.retrieve(batch_id)
            if wanted(batch):
                return batch
            time.sleep(0.05)
        raise AssertionError(f"waited in vain; last: {batch}")

    def wait_until_ended(self, batch_id: str) -> Batch:
        """Poll a batch until it ends."""
        return self.wait_for(batch_id, lambda batch: batch.status in TERMINAL)

    def lines(self, file_id: str | None) -> list[Line]:
        """The lines of a result file; none for no file."""
        if file_id is None:
            return []
        content = self.openai.files.content(file_id).content
        return [json.loads(line) for line in content.split(b"\n")[:-1]]


@contextmanager
def deployment_client(rig: DeploymentRig, **options: Any) -> Iterator[BatchClient]:
    """The client of a deployment, which is brought up where it is not."""
    if not (rig.home / "run" / "daemon.json").exists():
        rig.ask("up", "-d")
    with rig.openai(**options) as openai:
        yield BatchClient(openai)


def ask(rig: DeploymentRig, method: str, path: str, **options: Any) -> httpx.Response:
    """One raw call of the API."""
    return httpx.request(method, f"http://127.0.0.1:{rig.port}/v1{path}", timeout=30, **options)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error of a reply, which must be a whole envelope with a request id."""
    assert reply.headers["x-request-id"]
    document = reply.json()
    assert (document.keys(), document["error"].keys()) == ({"error"}, ENVELOPE)
    error: dict[str, Any] = document["error"]
    return error
