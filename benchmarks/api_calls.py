"""Random calls of the HTTP API, made from its OpenAPI document, and what every reply must be.

Half of the calls of an operation follow the document, half break it somewhere (schemathesis). Some
name a file, a batch or a model that is there; some carry headers and query keys that nobody wants.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.specs.openapi import checks

ENVELOPE = {"message", "type", "param", "code"}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
HEADERS = (
    "accept",
    "accept-encoding",
    "authorization",
    "content-encoding",
    "content-type",
    "cookie",
    "idempotency-key",
    "if-none-match",
    "if-range",
    "openai-organization",
    "openai-project",
    "priority",
    "range",
    "te",
    "x-batchrun-class",
    "x-batchrun-gateway",
    "x-forwarded-for",
    "x-http-method-override",
    "x-request-id",
)
VALUES = (
    "",
    "0",
    "-1",
    "gzip",
    "identity",
    "bytes=0-1",
    "bytes=9-1",
    "bytes=999999999-",
    "bytes=0-0,2-2",
    "text/plain",
    "text/event-stream",
    "application/json",
    "application/json; charset=utf-16",
    "multipart/form-data",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
    "Bearer ",
    "Bearer wrong",
    "Basic Og==",
    "batchrun-1",
    "trailers",
)
SEGMENTS = (
    "/",
    "/..",
    "%2e%2e%2f",
    "%00",
    "%ff",
    "%",
    "%zz",
    ";a=b",
    "x" * 5_000,
    "%20",
    "//",
    "batch_\u0041",
    "/cancel",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
ODD_BODIES = (None, b"", b"{", b"null", b"[]", b"{}", b"\xff", b"[" * 50_000, b"a=b", b"\0")


class BadReplyError(AssertionError):
    """A reply that no caller may get."""


@dataclass(frozen=True, slots=True)
class Things:
    """What is there on the server: ids to name, and the input of a batch."""

    model: str
    file_id: str
    batch_id: str


@dataclass(frozen=True, slots=True)
class OddCall:
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
    latin = st.text(st.characters(min_codepoint=33, max_codepoint=255), min_size=1, max_size=30)
    value = st.sampled_from(VALUES) | latin.filter(lambda text: text < "\x7f" or text > "\xa0")
    name = st.sampled_from(HEADERS) | st.from_regex(r"x-[a-z]{1,20}", fullmatch=True)
    return st.dictionaries(name, value, max_size=3)


def calls(operation: APIOperation[Any, Any, Any, Any], things: Things) -> st.SearchStrategy[Case]:
    """Calls of one operation, good and bad ones."""
    kinds = [operation.as_strategy(GenerationMode.POSITIVE)]
    if _can_be_broken(operation):
        kinds.append(operation.as_strategy(GenerationMode.NEGATIVE))
    queries = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2)

    def dress(case: Case, headers: dict[str, str], query: dict[str, str]) -> Case:
        case.headers = {**(case.headers or {}), **headers}
        case.query = {**query, **(case.query or {})}
        return case

    made_up = st.one_of(kinds)
    named = made_up.map(lambda case: _name_what_is_there(case, things))
    rarely = st.one_of(st.just({}), st.just({}), odd_headers())
    extras = st.one_of(st.just({}), st.just({}), queries)
    return st.builds(dress, made_up | named, rarely, extras)


def _can_be_broken(operation: APIOperation[Any, Any, Any, Any]) -> bool:
    """Whether it takes anything that can be wrong."""
    return bool(list(operation.iter_parameters()) or list(operation.body))


def _name_what_is_there(case: Case, things: Things) -> Case:
    """Put things that exist in the place of made-up ones."""
    known = {"file_id": things.file_id, "batch_id": things.batch_id, "model": things.model}
    for key in known.keys() & (case.path_parameters or {}).keys():
        case.path_parameters[key] = known[key]
    if "after" in (case.query or {}):
        is_files = case.path == "/v1/files"
        case.query["after"] = things.file_id if is_files else things.batch_id
    if isinstance(case.body, dict):
        named = {
            "model": things.model,
            "input_file_id": things.file_id,
            "completion_window": "24h",
        }
        case.body = {key: named.get(key, value) for key, value in case.body.items()}
    return case


def check_reply(status: int, headers: Mapping[str, str], body: bytes, *, is_head: bool) -> None:
    """What holds for the reply to any request. Raises BadReplyError."""
    if not headers.get("x-request-id"):
        raise BadReplyError(f"{status} without x-request-id")
    if status >= 500 or status == 422:
        raise BadReplyError(f"{status}: {body[:2_000]!r}")
    if status < 400 or is_head:
        return
    kind = headers.get("content-type", "")
    if not kind.startswith("application/json"):
        raise BadReplyError(f"{status} with content-type {kind!r}")
    _check_envelope(body)


def _check_envelope(body: bytes) -> None:
    document = json.loads(body)
    error = document["error"] if isinstance(document, dict) and set(document) == {"error"} else None
    if not isinstance(error, dict) or set(error) != ENVELOPE:
        raise BadReplyError(f"not the four keys of an error: {body[:2_000]!r}")
    if not all(isinstance(error[key], str) and error[key] for key in ("message", "type")):
        raise BadReplyError(f"an error without message or type: {body[:2_000]!r}")
    if not all(isinstance(error[key], str | None) for key in ("param", "code")):
        raise BadReplyError(f"param or code is no text: {body[:2_000]!r}")


def check_call(case: Case, response: Response) -> None:
    """A reply to a call of an operation fits the document, too."""
    headers = {name: ", ".join(values) for name, values in response.headers.items()}
    check_reply(response.status_code, headers, response.content, is_head=False)
    case.validate_response(response, checks=CHECKS)
