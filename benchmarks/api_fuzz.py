"""Every operation of the OpenAPI document, called with so many random examples each.

    python -m benchmarks.api_fuzz [--examples N] [--url URL] [--json FILE]

Without `--url`, a deployment with the fake engine is started for it. No reply may be a 5xx or a
422, miss its `x-request-id`, or be an error without OpenAI's envelope; each must be in the
document, with its content type, headers and schema; and each must come within a minute. Every run
has the same examples. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import http.client
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis.core.result import Ok

from benchmarks.api_calls import (
    BadReplyError,
    Example,
    OddCall,
    Operation,
    Things,
    calls,
    check_call,
    check_reply,
    odd_bodies,
    odd_calls,
)
from benchmarks.deployment import Deployment
from benchmarks.records import Record, describe, finish, parser

TIMEOUT_S = 60.0
PROBLEMS = (AssertionError, BaseExceptionGroup, OSError, http.client.HTTPException)
LINES = b"".join(
    b'{"custom_id": "%d", "method": "POST", "url": "/v1/chat/completions", "body": '
    b'{"model": "%%s", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}}\n' % i
    for i in range(3)
)


@dataclass(slots=True)
class Tally:
    """What came of the calls of one operation."""

    operation: str
    statuses: Counter[int] = field(default_factory=Counter)
    problem: str | None = None
    slowest_s: float = 0.0
    total_s: float = 0.0

    def note(self, status: int, spent_s: float) -> None:
        """Count a reply."""
        self.statuses[status] += 1
        self.slowest_s = max(self.slowest_s, spent_s)
        self.total_s += spent_s

    def record(self) -> Record:
        """One flat object."""
        num_calls = self.statuses.total()
        return {
            "operation": self.operation,
            "calls": num_calls,
            **{f"status {status}": count for status, count in sorted(self.statuses.items())},
            "mean_ms": 1_000 * self.total_s / max(num_calls, 1),
            "slowest_ms": 1_000 * self.slowest_s,
            "problem": self.problem,
        }


class Fuzzer:
    """Calls one server. `close` its session."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = requests.Session()
        document = self._session.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
        self.schema = schemathesis.openapi.from_dict(document)
        self._things = make_things(url, self._session)

    def operations(self) -> list[Operation]:
        """All of the document; those that delete come last, since others name what they delete."""
        results = self.schema.get_all_operations()
        found = [result.ok() for result in results if isinstance(result, Ok)]
        return sorted(found, key=lambda operation: operation.method == "delete")

    def call(self, operation: Operation, num_examples: int) -> Tally:
        """Call one operation."""
        tally = Tally(operation.label)

        def send(example: Example) -> None:
            start_s = time.monotonic()
            response = example.case.call(self.url, session=self._session, timeout=TIMEOUT_S)
            tally.note(response.status_code, time.monotonic() - start_s)
            check_call(example, response)

        tally.problem = _first_problem(calls(operation, self._things), send, num_examples)
        return tally

    def call_with_odd_values(self) -> Tally:
        """Every JSON body that the document shows, with every odd value in every place of it."""
        tally = Tally("odd values in bodies")
        for path, body in shown_bodies(self.schema.raw_schema, self._things.model):
            for changed in odd_bodies(body):
                start_s = time.monotonic()
                reply = self._session.post(self.url + path, json=changed, timeout=TIMEOUT_S)
                tally.note(reply.status_code, time.monotonic() - start_s)
                try:
                    check_reply(reply.status_code, reply.headers, reply.content, is_head=False)
                except BadReplyError as problem:
                    tally.problem = tally.problem or f"{path} {changed!r:.1000}: {problem}"
        return tally

    def call_oddly(self, num_examples: int) -> Tally:
        """Call any path with any method, as the document does not know it."""
        tally = Tally("any method, any path")
        address = urlsplit(self.url).netloc

        def send(odd: OddCall) -> None:
            start_s = time.monotonic()
            with closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
                connection.request(odd.method, odd.target, odd.body, odd.headers)
                reply = connection.getresponse()
                body = reply.read()
            tally.note(reply.status, time.monotonic() - start_s)
            headers = {name.lower(): value for name, value in reply.getheaders()}
            check_reply(reply.status, headers, body, is_head=odd.method == "HEAD")

        tally.problem = _first_problem(odd_calls(list(self.schema)), send, num_examples)
        return tally

    def close(self) -> None:
        """Close the connections."""
        self._session.close()


def shown_bodies(document: Mapping[str, Any], model: str) -> Iterator[tuple[str, Any]]:
    """The path and the body of each example of a JSON request, with a model that is there."""
    for path, item in document["paths"].items():
        body = item.get("post", {}).get("requestBody", {}).get("content", {})
        content = body.get("application/json", {})
        shown = [example["value"] for example in content.get("examples", {}).values()]
        for value in shown or [content["example"]] if content else ():
            yield path, {**value, "model": model} if "model" in value else value


def make_things(url: str, session: requests.Session) -> Things:
    """A file and a batch on the server, to be named in calls."""
    model = session.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]
    file = session.post(
        f"{url}/v1/files",
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", LINES.replace(b"%s", model.encode()))},
        timeout=TIMEOUT_S,
    ).json()
    wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = session.post(
        f"{url}/v1/batches", json={"input_file_id": file["id"], **wanted}, timeout=TIMEOUT_S
    ).json()
    return Things(model, file["id"], batch["id"])


def _first_problem(
    strategy: SearchStrategy[Any], send: Callable[[Any], None], num_examples: int
) -> str | None:
    """Send so many examples, the same ones in every run; the smallest that goes wrong ends it."""

    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(example=strategy)
    def check(example: Any) -> None:
        send(example)

    try:
        check()
    except PROBLEMS as problem:
        return "".join(traceback.format_exception(problem))
    return None


def fuzz(url: str, num_examples: int) -> Iterator[Tally]:
    """All operations of a server, one after the other."""
    with closing(Fuzzer(url)) as fuzzer:
        for operation in fuzzer.operations():
            yield fuzzer.call(operation, num_examples)
        yield fuzzer.call_oddly(num_examples)
        yield fuzzer.call_with_odd_values()


def main() -> int:
    """Print a line for each operation; write the records where `--json` says."""
    made = parser(__doc__)
    made.add_argument("--examples", type=int, default=200, metavar="N")
    made.add_argument("--url", help="a running server, without /v1")
    options = made.parse_args()
    records = []
    with ExitStack() as exits:
        url = options.url
        if url is None:
            folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="batchrun-fuzz-"))
            deployment = Deployment(Path(folder))
            deployment.configure(deployment.fake_engine(0.0))
            url = exits.enter_context(deployment.running())
        for tally in fuzz(url, options.examples):
            records.append(tally.record())
            print(describe(records[-1]), flush=True)
    finish(options.json, records)
    return int(any(record["problem"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
