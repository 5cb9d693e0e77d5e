"""Callers of the Batch and Files API: their clients, their inputs, and what came of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import openai
import pytest
from deployment_rig import DeploymentRig
from openai.resources import Batches, Files, Models
from openai.types import Batch, FileObject
from waiting_client import Waiting

from batchrun.control.client import DaemonClient
from batchrun.home import Home

MODEL = "org/name"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
ENVELOPE = {"message", "type", "param", "code"}
DAY_S = 86_400
WAIT_S = 300.0
POLL_S = 0.05

KINDS = ("sync", "async")
_ASYNC = [pytest.mark.nightly, pytest.mark.async_client]
KIND_PARAMS = ("sync", pytest.param("async", marks=_ASYNC))
"""For `parametrize`: the gate drives the sync client alone, but for a few checks."""

REFUSED, LATE, STUCK, THOUGHTFUL = "refused", "late", "stuck", "thoughtful"
"""Words in a prompt that the fake engine answers with 400, late, never, or with reasoning."""

Line = dict[str, Any]


def busy(status: int, kind: str) -> str:
    """A prompt that the fake engine answers with 429 or 503 twice, and then well."""
    return f"busy with {status} for {kind}"


def stuck_once(kind: str) -> str:
    """A prompt that the fake engine answers never at first, `NUM_STUCK_ONCE` times in all."""
    return f"begun in vain for {kind}"


NUM_STUCK_ONCE = 3


def engine_rules() -> list[dict[str, object]]:
    """What the fake engine does at those prompts."""
    thought = json.dumps(THOUGHTFUL_REPLY)
    return [
        _rule(REFUSED, {"status": 400}),
        _rule(LATE, {"delay_s": 0.5}),
        _rule(STUCK, {"hang": True}),
        _rule(THOUGHTFUL, {"status": 200, "body": thought}),
        *(_rule(stuck_once(kind), {"hang": True}, NUM_STUCK_ONCE) for kind in KINDS),
        *(
            _rule(busy(status, kind), {"status": status, "retry_after": "0"}, 2)
            for kind in KINDS
            for status in (429, 503)
        ),
    ]


def _rule(text: str, action: dict[str, object], times: int | None = None) -> dict[str, object]:
    return {"match": {"substring": text}, "action": action, "times": times}


THOUGHTFUL_REPLY = {
    "id": "chatcmpl-thoughtful",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "so"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "completion_tokens_details": {"reasoning_tokens": 5},
    },
}


def chat_line(custom_id: str, text: str = "hello", **body: object) -> Line:
    """One good line of a chat batch; `body` changes fields of its body."""
    messages = [{"role": "user", "content": text}]
    whole = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": whole}


def chat_lines(num_lines: int, text: str = "question", prefix: str | None = None) -> list[Line]:
    """Lines with ids `PREFIX-0` and so on; the prefix is the text, if none is given."""
    return [chat_line(f"{prefix or text}-{i}", f"{text} {i}") for i in range(num_lines)]


def without(line: Line, key: str) -> Line:
    """The line, or its body where the key is `body.KEY`, without a key."""
    head, _, inner = key.partition(".")
    if inner:
        return {**line, head: without(line[head], inner)}
    return {name: value for name, value in line.items() if name != key}


def jsonl(lines: Sequence[Line | bytes]) -> bytes:
    """An input file; lines in bytes are taken as they are."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return b"".join(line + b"\n" for line in encoded)


@dataclass(frozen=True, slots=True)
class Caller:
    """A client, sync or async, the HTTP requests that it has sent, and steps common to tests."""

    kind: str
    api: openai.OpenAI
    requests: list[str]

    @property
    def files(self) -> Files:
        """`client.files`."""
        return self.api.files

    @property
    def batches(self) -> Batches:
        """`client.batches`."""
        return self.api.batches

    @property
    def models(self) -> Models:
        """`client.models`."""
        return self.api.models

    def upload(self, content: bytes | Sequence[Line | bytes], **changes: Any) -> FileObject:
        """Upload an input file."""
        data = content if isinstance(content, bytes) else jsonl(content)
        return self.files.create(**{"file": data, "purpose": "batch", **changes})

    def create(self, lines: str | bytes | Sequence[Line | bytes], **changes: Any) -> Batch:
        """Create a batch of these lines, or of the file with this id."""
        file_id = lines if isinstance(lines, str) else self.upload(lines).id
        fields = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        return self.batches.create(**{**fields, **changes})

    def run(self, lines: str | bytes | Sequence[Line | bytes], **changes: Any) -> Batch:
        """Create a batch and see it end."""
        return self.wait_until_ended(self.create(lines, **changes).id)

    def wait_until_ended(self, batch_id: str) -> Batch:
        """Poll a batch until its state is terminal."""
        return self.poll(batch_id, lambda batch: batch.status in TERMINAL)[-1]

    def wait_for_status(self, batch_id: str, *statuses: str) -> Batch:
        """Poll a batch until it has one of these; a terminal one that is none of them fails."""
        ends = TERMINAL | set(statuses)
        batch = self.poll(batch_id, lambda batch: batch.status in ends)[-1]
        assert batch.status in statuses, batch
        return batch

    def wait_for_counts(self, batch_id: str, num_done: int) -> Batch:
        """Poll a batch until so many of its requests have run; it must not end before."""

        def is_far_enough(batch: Batch) -> bool:
            return num_run(batch) >= num_done or batch.status in TERMINAL

        batch = self.poll(batch_id, is_far_enough)[-1]
        assert num_run(batch) >= num_done, batch
        return batch

    def poll(self, batch_id: str, wanted: Callable[[Batch], bool]) -> list[Batch]:
        """Everything a poller saw until `wanted(batch)`, that one included."""
        seen: list[Batch] = []
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            seen.append(self.batches.retrieve(batch_id))
            if wanted(seen[-1]):
                return seen
            time.sleep(POLL_S)
        raise AssertionError(f"waited in vain; last: {seen[-1]}")

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a result file; none where there is no file."""
        if file_id is None:
            return []
        content = self.files.content(file_id).content
        assert content.endswith(b"\n")
        return [json.loads(line) for line in content.split(b"\n")[:-1]]

    def results(self, batch: Batch) -> dict[str, dict[str, Any]]:
        """The lines of both files by `custom_id`, each of which must stand there once."""
        lines = self.lines(batch.output_file_id) + self.lines(batch.error_file_id)
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found

    def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch and see it end."""
        self.batches.cancel(batch_id)
        return self.wait_until_ended(batch_id)


def num_run(batch: Batch) -> int:
    """How many requests of a batch have a result."""
    assert batch.request_counts is not None
    return batch.request_counts.completed + batch.request_counts.failed


def counts(batch: Batch) -> tuple[int, int, int]:
    """Total, completed, failed."""
    found = batch.request_counts
    assert found is not None
    return found.total, found.completed, found.failed


def errors(batch: Batch) -> list[tuple[str | None, str | None, int | None]]:
    """Code, param and line of each error of a batch."""
    assert batch.errors is not None and batch.errors.data is not None
    return [(error.code, error.param, error.line) for error in batch.errors.data]


def check_error(
    error: openai.APIStatusError, *, code: str | None = None, param: str | None = None
) -> None:
    """An error of the client has the envelope and these fields."""
    assert isinstance(error.body, Mapping) and set(error.body) == ENVELOPE
    assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
    assert isinstance(error.body["message"], str) and error.body["message"]
    assert error.request_id is not None


@contextmanager
def connect(port: int, kind: str = "sync", **options: Any) -> Iterator[Caller]:
    """A caller of the gateway at a port; `options` go to its client."""
    requests: list[str] = []
    settings = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "unused", **options}

    def note(request: Any) -> None:
        requests.append(f"{request.method} {request.url.path}")

    async def note_async(request: Any) -> None:
        note(request)

    if kind == "sync":
        http = openai.DefaultHttpxClient(event_hooks={"request": [note]})
        with openai.OpenAI(http_client=http, **settings) as client:
            yield Caller(kind, client, requests)
        return
    with asyncio.Runner() as runner:
        http_async = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note_async]})
        waiting = openai.AsyncOpenAI(http_client=http_async, **settings)
        yield Caller(kind, cast(openai.OpenAI, Waiting(waiting, runner)), requests)
        runner.run(waiting.close())


@contextmanager
def offline_work_held(rig: DeploymentRig) -> Iterator[None]:
    """No request of a batch runs within; those in flight are taken back, to run after it."""
    daemon = DaemonClient(Home(rig.home))
    daemon.post("/offline", {"on": False})
    try:
        yield
    finally:
        daemon.post("/offline", {"on": True})
