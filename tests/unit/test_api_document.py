"""The OpenAPI document: valid, whole, with examples everywhere, of the routes that are there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import pytest
import schemathesis
from fastapi import APIRouter
from fastapi.routing import APIRoute

from batchrun.daemon.daemon import Daemon
from batchrun.jobs.results.file_bytes import FileBytes
from batchrun.media.connections import open_session
from batchrun.server.api.batches import ENDPOINTS, KEYS, Batches, batches_router
from batchrun.server.api.files import Files, files_router
from batchrun.server.api.upload import FILE_FIELD, PURPOSES, TEXT_FIELDS, Traffic
from batchrun.server.gateway.admission import Door, KeyRing
from batchrun.server.gateway.app import Gateway, GatewaySettings, document_json, load_document
from batchrun.server.gateway.balancer import Balancer
from batchrun.server.gateway.forward import Forwarder
from batchrun.server.gateway.shared_book import SharedBook, create
from batchrun.server.gateway.tally import Tally, create_tally
from batchrun.store.database import Store

DOCUMENT = load_document()
METHODS = {"get", "post", "put", "patch", "delete"}
SCHEMAS = DOCUMENT["components"]["schemas"]
REQUEST_ID = {"$ref": "#/components/headers/request-id"}

Json = dict[str, Any]


def resolved(node: Json) -> Json:
    """The node, or what its reference leads to."""
    if "$ref" not in node:
        return node
    found: Any = DOCUMENT
    for key in node["$ref"].removeprefix("#/").split("/"):
        found = found[key]
    return cast(Json, found)


def operations() -> Iterator[tuple[str, str, Json]]:
    """Method, path, operation."""
    for path, item in DOCUMENT["paths"].items():
        for method in METHODS & item.keys():
            yield method.upper(), path, item[method]


def responses() -> Iterator[tuple[str, Json]]:
    """Every reply, with a name for messages."""
    for method, path, operation in operations():
        for status, response in operation["responses"].items():
            yield f"{method} {path} {status}", resolved(response)


def contents() -> Iterator[tuple[str, Json]]:
    """Everything that has a media type, in requests and replies, with a name for messages."""
    for method, path, operation in operations():
        for kind, content in operation.get("requestBody", {}).get("content", {}).items():
            yield f"{method} {path} {kind}", content
    for name, response in responses():
        for kind, content in response["content"].items():
            yield f"{name} {kind}", content


def parameters() -> Iterator[tuple[str, Json]]:
    """Every parameter and header, with a name for messages."""
    for path, item in DOCUMENT["paths"].items():
        for holder in (item, *(item[method] for method in METHODS & item.keys())):
            for parameter in holder.get("parameters", []):
                yield path, resolved(parameter)
    yield from DOCUMENT["components"]["headers"].items()


def examples(content: Json) -> list[Any]:
    """The examples of one media type."""
    many = [example["value"] for example in content.get("examples", {}).values()]
    return [*many, content["example"]] if "example" in content else many


def check_example(value: Any, schema: Json) -> None:
    """Raises where an example does not fit its schema."""
    jsonschema_rs.validate({**schema, "components": DOCUMENT["components"]}, value)


def test_the_document_is_valid_openapi() -> None:
    schemathesis.openapi.from_dict(json.loads(document_json())).validate()

    broken = {**load_document(), "paths": {"/v1/files": {"get": {"responses": 1}}}}
    with pytest.raises(Exception, match="is not of type"):
        schemathesis.openapi.from_dict(broken).validate()


def test_every_operation_says_what_it_is() -> None:
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    found = list(operations())

    assert all(operation["summary"] and operation["tags"] for _, _, operation in found)
    assert {tag for _, _, operation in found for tag in operation["tags"]} == tags
    ids = [operation["operationId"] for _, _, operation in found]
    assert len(set(ids)) == len(ids)


def test_every_reply_is_described_and_has_a_request_id() -> None:
    for name, response in responses():
        assert response["description"], name
        assert response["headers"]["x-request-id"] == REQUEST_ID, name


def test_every_error_has_the_envelope() -> None:
    for name, response in responses():
        if not name.split()[-1].startswith("2"):
            schema = response["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Error"}, name


def test_every_body_has_examples_that_fit_its_schema() -> None:
    for name, content in contents():
        assert examples(content), name
        for value in examples(content):
            check_example(value, content["schema"])


def test_every_parameter_and_header_has_a_description_and_an_example_that_fits() -> None:
    for name, parameter in parameters():
        assert parameter["description"], name
        check_example(parameter["example"], parameter["schema"])


def test_examples_of_events_hold_what_their_schema_says() -> None:
    for event, chunk in (("ChatEvent", "ChatChunk"), ("CompletionEvent", "CompletionChunk")):
        (content,) = (
            content
            for _, content in contents()
            if content["schema"] == {"$ref": f"#/components/schemas/{event}"}
        )
        data = [value["data"] for value in examples(content) if value["data"] != "[DONE]"]
        for text in data:
            check_example(json.loads(text), SCHEMAS[chunk])
        assert data


def daemon_routes(router: APIRouter) -> set[tuple[str, str]]:
    """Method and path of each route."""
    return {
        (method, route.path.replace(":path", ""))
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }


async def test_the_document_has_the_routes_that_are_there_and_no_others(
    store: Store, tmp_path: Path
) -> None:
    settings = GatewaySettings("127.0.0.1", 0, tmp_path / "upstreams.json")
    shared, tally = SharedBook(create(1), 1, 0), Tally(create_tally(1), 1, 0)
    async with open_session() as session:
        gateway = Gateway(settings, Forwarder(Balancer(shared), session), Door(KeyRing()), tally)
    served = {(method, path) for path, (method, _) in gateway._own.items()}
    served |= daemon_routes(files_router(Files(store, FileBytes(tmp_path), Traffic()), []))
    # Of the daemon nothing is asked here.
    batches = Batches(cast(Daemon, None), tmp_path, ["24h"])
    served |= daemon_routes(batches_router(batches, []))

    documented = {(method, path) for method, path, _ in operations()}

    assert documented == served | {("GET", "/v1/models/{model}")}


def test_the_requests_have_the_keys_that_are_read() -> None:
    assert SCHEMAS["BatchRequest"]["properties"].keys() == KEYS
    assert SCHEMAS["BatchRequest"]["properties"]["endpoint"]["enum"] == list(ENDPOINTS)
    assert SCHEMAS["FileUpload"]["properties"].keys() == {FILE_FIELD, *TEXT_FIELDS}
    assert SCHEMAS["FileUpload"]["properties"]["purpose"]["enum"] == list(PURPOSES)
