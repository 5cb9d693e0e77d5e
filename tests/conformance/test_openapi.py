"""The OpenAPI document against a running deployment: what it promises is what comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jsonschema_rs
import pytest
import requests
from batch_rig import MODEL, chat_lines, connect, jsonl, offline_work_held
from deployment_rig import DeploymentRig
from schemathesis.core.transport import Response

from batchrun.server.gateway.app import load_document
from benchmarks.api_calls import check_call
from benchmarks.api_fuzz import Fuzzer

NUM_EXAMPLES = 200
Parts = dict[str, Any]
LABELS = {
    f"{method.upper()} {path}"
    for path, item in load_document()["paths"].items()
    for method in item.keys() - {"parameters"}
}
DELETING_LAST = sorted(LABELS, key=lambda label: ("DELETE" in label, label))
UNSERVED = {"POST /v1/responses"}
"""What the fake engine has not."""
CHAT: Parts = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETION: Parts = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
PLAIN_CALLS: list[tuple[str, str, Parts]] = [
    ("/v1/chat/completions", "POST", {"body": CHAT}),
    ("/v1/chat/completions", "POST", {"body": CHAT | {"stream": True}}),
    ("/v1/completions", "POST", {"body": COMPLETION}),
    ("/v1/completions", "POST", {"body": COMPLETION | {"stream": True}}),
    ("/v1/embeddings", "POST", {"body": {"model": MODEL, "input": ["hello", "sea"]}}),
    ("/v1/models", "GET", {}),
    ("/v1/models/{model}", "GET", {"path_parameters": {"model": MODEL}}),
    ("/healthz", "GET", {}),
    ("/readyz", "GET", {}),
    ("/metrics", "GET", {}),
    ("/openapi.json", "GET", {}),
]


class Documented:
    """Calls of a server, whose replies must be what the document says."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self._fuzzer = fuzzer
        self.succeeded: set[str] = set()

    def call(self, path: str, method: str, *, status: int = 200, **parts: Any) -> Response:
        """Call one operation and hold its reply to the document."""
        operation = self._fuzzer.schema[path][method]
        if "body" in parts:
            parts.setdefault("media_type", "application/json")
        case = operation.Case(**parts)
        response = case.call(self._fuzzer.url)
        check_call(case, response)
        assert response.status_code == status, response.content
        if status < 300:
            self.succeeded.add(operation.label)
        return response


@pytest.fixture(scope="module")
def fuzzer(batch_rig: DeploymentRig) -> Iterator[Fuzzer]:
    """Random calls of the deployment."""
    with closing(Fuzzer(f"http://127.0.0.1:{batch_rig.port}")) as made:
        yield made


def upload(documented: Documented, purpose: str, content: bytes) -> str:
    """Upload a file; its id."""
    body = {"purpose": purpose, "file": content}
    form: Parts = {"body": body, "media_type": "multipart/form-data"}
    return str(documented.call("/v1/files", "POST", **form).json()["id"])


def test_the_document_is_served_as_it_is_written(batch_rig: DeploymentRig) -> None:
    reply = requests.get(f"http://127.0.0.1:{batch_rig.port}/openapi.json", timeout=60)

    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == load_document()


def test_every_operation_answers_as_the_document_says(
    fuzzer: Fuzzer, batch_rig: DeploymentRig
) -> None:
    documented = Documented(fuzzer)
    for path, method, parts in PLAIN_CALLS:
        documented.call(path, method, **parts)
    file_id = upload(documented, "batch", jsonl(chat_lines(3)))
    read_and_delete_files(documented, file_id, upload(documented, "batch", b"{}"))
    run_batches(documented, file_id, batch_rig)

    assert documented.succeeded == LABELS - UNSERVED


def read_and_delete_files(documented: Documented, file_id: str, unwanted_id: str) -> None:
    """Every route of files, well and badly."""
    file: Parts = {"path_parameters": {"file_id": file_id}}
    content = "/v1/files/{file_id}/content"
    documented.call("/v1/files", "GET", query={"limit": 1, "order": "asc"})
    documented.call("/v1/files/{file_id}", "GET", **file)
    documented.call(content, "GET", **file)
    documented.call(content, "GET", status=206, headers={"range": "bytes=0-3"}, **file)
    documented.call(content, "GET", status=416, headers={"range": "bytes=99999-"}, **file)
    unreadable: Parts = {"path_parameters": {"file_id": upload(documented, "user_data", b"?")}}
    documented.call(content, "GET", status=400, **unreadable)
    unwanted: Parts = {"path_parameters": {"file_id": unwanted_id}}
    documented.call("/v1/files/{file_id}", "DELETE", **unwanted)
    documented.call("/v1/files/{file_id}", "DELETE", status=404, **unwanted)


def run_batches(documented: Documented, file_id: str, rig: DeploymentRig) -> None:
    """A batch that completes, one that fails, one that is cancelled."""

    def create(input_file_id: str) -> Parts:
        fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        body = {"input_file_id": input_file_id, **fields}
        batch_id = documented.call("/v1/batches", "POST", body=body).json()["id"]
        return {"path_parameters": {"batch_id": batch_id}}

    one, cancel = "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"
    for input_file_id, end in ((file_id, "completed"), ("file-unknown", "failed")):
        batch = create(input_file_id)
        with connect(rig.port) as caller:
            caller.wait_for_status(batch["path_parameters"]["batch_id"], end)
        assert documented.call(one, "GET", **batch).json()["status"] == end
        documented.call(cancel, "POST", status=409, **batch)
    with offline_work_held(rig):
        documented.call(cancel, "POST", **create(file_id))
    documented.call("/v1/batches", "GET", query={"limit": 2})


def test_events_of_streams_are_as_the_document_says(fuzzer: Fuzzer) -> None:
    schemas = load_document()["components"]["schemas"]
    for path, body, chunk in (
        ("/v1/chat/completions", CHAT, "ChatChunk"),
        ("/v1/completions", COMPLETION, "CompletionChunk"),
    ):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        reply = requests.post(fuzzer.url + path, json=body | options, timeout=60)
        *events, end = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        schema = {**schemas[chunk], "components": {"schemas": schemas}}
        for event in events:
            jsonschema_rs.validate(schema, json.loads(event))
        assert len(events) > 2
        assert end == "[DONE]"


@pytest.mark.nightly
@pytest.mark.parametrize("label", DELETING_LAST)
def test_random_calls_of_an_operation_are_answered_well(fuzzer: Fuzzer, label: str) -> None:
    (operation,) = (made for made in fuzzer.operations() if made.label == label)

    tally = fuzzer.call(operation, NUM_EXAMPLES)

    assert tally.problem is None, tally.problem
    assert tally.statuses.total() >= NUM_EXAMPLES


@pytest.mark.slow
def test_random_calls_of_any_path_are_answered_well(fuzzer: Fuzzer) -> None:
    tally = fuzzer.call_oddly(NUM_EXAMPLES)

    assert tally.problem is None, tally.problem
    assert {404, 405} <= tally.statuses.keys()


@pytest.mark.nightly
def test_odd_values_in_bodies_are_answered_well(fuzzer: Fuzzer) -> None:
    tally = fuzzer.call_with_odd_values()

    assert tally.problem is None, tally.problem
    assert {200, 400} <= tally.statuses.keys()
