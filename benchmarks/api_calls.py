"""Random calls of the HTTP API, made from its OpenAPI document, and what every reply must be.

Half of the calls of an operation follow the document, half break it somewhere (schemathesis). Some
name a file, a batch or a model that is there; some carry headers and query keys that nobody wants.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import jsonschema_rs
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.specs.openapi import checks

from batchrun.server.gateway.app import load_document

Operation = APIOperation[Any, Any, Any, Any]
AnyCase = Case[Any]
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
PARTS = (
    *("path_parameters", "query", "headers", "cookies", "body"),
    *("media_type", "multipart_content_types"),
)
ERROR = load_document()["components"]["schemas"]["Error"]
CHECKED_ROUTES = ("/v1/files", "/v1/batches")
"""Their calls are checked against the document; engines check less, or more."""
HEADERS = (
    *("accept", "accept-encoding", "authorization", "content-encoding", "content-type", "cookie"),
    *("idempotency-key", "if-none-match", "if-range", "openai-organization", "openai-project"),
    *("priority", "range", "te", "x-batchrun-class", "x-batchrun-gateway", "x-forwarded-for"),
    *("x-http-method-override", "x-request-id"),
)
VALUES = (
    *("", "0", "-1", "gzip", "identity", "Bearer ", "Bearer wrong", "Basic Og==", "batchrun-1"),
    *("bytes=0-1", "bytes=9-1", "bytes=999999999-", "bytes=0-0,2-2", "trailers"),
    *("text/plain", "text/event-stream", "application/json", "application/json; charset=utf-16"),
    *("multipart/form-data", "multipart/form-data; boundary=x"),
    "application/x-www-form-urlencoded",
)
SEGMENTS = (
    *("/", "/..", "%2e%2e%2f", "%00", "%ff", "%", "%zz", ";a=b", "x" * 5_000, "%20", "//"),
    *("batch_\u0041", "/cancel"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e308, -0.0, 10**30, 10**400, 10**4_200),
    *("", "\0", "\ud800", "x" * 10_000, "24h", "1d" * 500, "9" * 400 + "d", "created_at"),
    *([], ["a"], {}, {"": ""}, {"a": {"b": []}}, [[[[]]]]),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
ODD_BODIES = (None, b"", b"{", b"null", b"[]", b"{}", b"\xff", b"[" * 50_000, b"a=b", b"\0")


class Things(NamedTuple):
    """What is there on the server: ids to name, and the input of a batch."""

    model: str
    file_id: str
    batch_id: str


class OddCall(NamedTuple):
    """A call that the document does not know. `target` is path and query."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None


def odd_calls(paths: Sequence[str]) -> st.SearchStrategy[OddCall]:
    """Any method on the paths of the document and beside them."""
    odd = st.sampled_from(SEGMENTS) | st.text(max_size=12).map(lambda text: quote(text, safe="/%"))

    def target(path: str, segment: str, suffix: str, query: str) -> str:
        filled = re.sub(r"{\w+}", lambda _: segment, path)
        return filled + suffix + (f"?{query}" if query else "")

    targets = st.builds(target, st.sampled_from(paths), odd, st.just("") | odd, st.just("") | odd)
    bodies = st.sampled_from(ODD_BODIES) | st.binary(max_size=40)
    return st.builds(OddCall, st.sampled_from(METHODS), targets, odd_headers(), bodies)


def odd_headers() -> st.SearchStrategy[dict[str, str]]:
    """A few headers with odd values."""
    latin = st.characters(min_codepoint=33, max_codepoint=255, exclude_categories=["Cc", "Zs"])
    value = st.sampled_from(VALUES) | st.text(latin, min_size=1, max_size=30)
    name = st.sampled_from(HEADERS) | st.from_regex(r"x-[a-z]{1,20}", fullmatch=True)
    return st.dictionaries(name, value, max_size=3)


def calls(operation: Operation, things: Things) -> st.SearchStrategy[AnyCase]:
    """Calls of one operation, good and bad ones: as the document made them, and copies changed."""
    kinds = [operation.as_strategy(GenerationMode.POSITIVE)]
    if [*operation.iter_parameters(), *operation.body]:
        kinds.append(operation.as_strategy(GenerationMode.NEGATIVE))
    plain = st.one_of(kinds)
    copied = plain.map(_copy)
    named = copied.map(lambda case: _name_what_is_there(case, things))
    queries = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2)

    def dress(case: AnyCase, headers: dict[str, str], query: dict[str, str]) -> AnyCase:
        case.headers.update(headers)
        case.query = {**query, **case.query}
        return case

    dressed = st.builds(dress, copied | named, st.just({}) | odd_headers(), st.just({}) | queries)
    return plain | named | dressed


def _copy(case: AnyCase) -> AnyCase:
    """The same call, to be changed. Without `meta` schemathesis does not know how it was made."""
    derived = case.derive()
    made: AnyCase = case.operation.Case(**{part: getattr(derived, part) for part in PARTS})
    return made


def _name_what_is_there(case: AnyCase, things: Things) -> AnyCase:
    """Put things that exist in the place of made-up ones."""
    known = things._asdict()
    case.path_parameters.update({key: known[key] for key in known.keys() & case.path_parameters})
    if "after" in case.query:
        case.query["after"] = known["file_id" if case.path == "/v1/files" else "batch_id"]
    if isinstance(case.body, dict):
        known |= {"input_file_id": things.file_id, "completion_window": "24h"}
        case.body.update({key: known[key] for key in known.keys() & case.body})
    return case


def odd_bodies(body: Any) -> Iterator[Any]:
    """A JSON body with an odd value in one of its places: each value in each place."""
    for way in _ways(body):
        for value in ODD_VALUES:
            changed = place = copy.deepcopy(body)
            for key in way[:-1]:
                place = place[key]
            place[way[-1]] = value
            yield changed


def _ways(value: Any) -> Iterator[tuple[Any, ...]]:
    """The keys and indexes that lead to each place within a value."""
    if not isinstance(value, dict | list):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (key,)
        yield from ((key, *way) for way in _ways(inner))


def check_reply(status: int, headers: Mapping[str, str], body: bytes, *, is_head: bool) -> None:
    """What holds for the reply to any request. Raises AssertionError."""
    if not headers.get("x-request-id"):
        raise AssertionError(f"{status} without x-request-id")
    if status >= 500 or status == 422:
        raise AssertionError(f"{status}: {body[:2_000]!r}")
    if status < 400 or is_head:
        return
    kind = headers.get("content-type", "")
    if not kind.startswith("application/json"):
        raise AssertionError(f"{status} with content-type {kind!r}")
    try:
        jsonschema_rs.validate(ERROR, json.loads(body))
    except ValueError as error:
        raise AssertionError(f"not the four keys of an error: {body[:2_000]!r}") from error


def check_call(case: AnyCase, response: Response) -> None:
    """A reply to a call of an operation fits the document, too."""
    headers = {name: ", ".join(values) for name, values in response.headers.items()}
    check_reply(response.status_code, headers, response.content, is_head=False)
    case.validate_response(response, checks=CHECKS)
    is_checked = case.path.startswith(CHECKED_ROUTES)
    if case.meta is not None and is_checked and not _depends_on_more(response):
        case.validate_response(response, checks=[checks.positive_data_acceptance])
        if case.media_type != "multipart/form-data":  # Whatever breaks a file makes another file.
            case.validate_response(response, checks=[checks.negative_data_rejection])


def _depends_on_more(response: Response) -> bool:
    """A refusal that the document cannot know: the file's first line, the windows of the server."""
    if response.status_code != 400:
        return False
    error = response.json()["error"]
    is_window = (error["param"], error["code"]) == ("completion_window", "invalid_value")
    return is_window or error["message"].startswith("Invalid file format")
