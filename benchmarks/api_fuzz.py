"""Every operation of the OpenAPI document, called with so many random examples each.

    python -m benchmarks.api_fuzz [--examples N] [--json FILE]

The server is a deployment with the fake engine. No reply may be a 5xx or a 422, miss its
`x-request-id`, or be an error without OpenAI's envelope; each must be in the document, with its
content type, headers and schema; and each must come within a minute. Every run has the same
examples. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from openai import OpenAI
from schemathesis.core.result import Ok

from benchmarks.api_calls import (
    AnyCase,
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
from benchmarks.records import Bar, Record, finish, parser, shown

TIMEOUT_S = 60.0
PROBLEMS = (AssertionError, BaseExceptionGroup, OSError, http.client.HTTPException)


@dataclass(slots=True)
class Tally:
    """What came of the calls of one operation."""

    operation: str
    statuses: Counter[int] = field(default_factory=Counter)
    problem: str | None = None
    spent_s: list[float] = field(default_factory=list)

    def note(self, status: int, began_s: float) -> None:
        """Count a reply."""
        self.statuses[status] += 1
        self.spent_s.append(time.monotonic() - began_s)

    def record(self) -> Record:
        """One flat object."""
        num_calls = len(self.spent_s)
        return {
            "operation": self.operation,
            "calls": num_calls,
            **{f"status {status}": count for status, count in sorted(self.statuses.items())},
            "mean_ms": 1_000 * sum(self.spent_s) / max(num_calls, 1),
            "slowest_ms": 1_000 * max(self.spent_s, default=0.0),
            "problem": self.problem,
        }


class Fuzzer:
    """Calls one server. `close` its session."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = requests.Session()
        document = self._session.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
        self.schema = schemathesis.openapi.from_dict(document)
        self._things = make_things(url)

    def operations(self) -> list[Operation]:
        """All of the document; those that delete come last, since others name what they delete."""
        results = self.schema.get_all_operations()
        found = [result.ok() for result in results if isinstance(result, Ok)]
        return sorted(found, key=lambda operation: operation.method == "delete")

    def call(self, operation: Operation, num_examples: int) -> Tally:
        """Call one operation."""
        tally = Tally(operation.label)

        def send(case: AnyCase) -> None:
            began_s = time.monotonic()
            response = case.call(self.url, session=self._session, timeout=TIMEOUT_S)
            tally.note(response.status_code, began_s)
            check_call(case, response)

        tally.problem = _first_problem(calls(operation, self._things), send, num_examples)
        return tally

    def call_with_odd_values(self) -> Tally:
        """Every JSON body that the document shows, with every odd value in every place of it."""
        tally = Tally("odd values in bodies")
        for path, body in shown_bodies(self.schema.raw_schema, self._things.model):
            for changed in odd_bodies(body):
                began_s = time.monotonic()
                reply = self._session.post(self.url + path, json=changed, timeout=TIMEOUT_S)
                tally.note(reply.status_code, began_s)
                try:
                    check_reply(reply.status_code, reply.headers, reply.content, is_head=False)
                except AssertionError as problem:
                    tally.problem = tally.problem or f"{path} {changed!r:.1000}: {problem}"
        return tally

    def call_oddly(self, num_examples: int) -> Tally:
        """Call any path with any method, as the document does not know it."""
        tally = Tally("any method, any path")
        address = urlsplit(self.url).netloc

        def send(odd: OddCall) -> None:
            began_s = time.monotonic()
            with closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
                connection.request(odd.method, odd.target, odd.body, odd.headers)
                reply = connection.getresponse()
                body = reply.read()
            tally.note(reply.status, began_s)
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


def make_things(url: str) -> Things:
    """A file and a batch on the server, to be named in calls."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S) as client:
        model = client.models.list().data[0].id
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        call = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        lines = "".join(json.dumps({"custom_id": str(i), **call}) + "\n" for i in range(3))
        file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    return Things(model, file.id, batch.id)


def _first_problem(
    strategy: SearchStrategy[Any], send: Callable[[Any], None], num_examples: int
) -> str | None:
    """Send so many examples, the same ones in every run; the smallest that goes wrong ends it."""
    same = settings(derandomize=True, database=None, deadline=None, max_examples=num_examples)
    checks = settings(same, suppress_health_check=list(HealthCheck))
    try:
        checks(given(strategy)(send))()
    except PROBLEMS as problem:
        return "".join(traceback.format_exception(problem))
    return None


def tallies(url: str, num_examples: int) -> Iterator[Tally]:
    """All operations of a server, one after the other."""
    with closing(Fuzzer(url)) as fuzzer:
        for operation in fuzzer.operations():
            yield fuzzer.call(operation, num_examples)
        yield fuzzer.call_oddly(num_examples)
        yield fuzzer.call_with_odd_values()


def main() -> int:
    """Print a line for each operation; write the records where `--json` says."""
    options = parser(__doc__, examples=200).parse_args()
    with tempfile.TemporaryDirectory(prefix="batchrun-fuzz-") as folder:
        deployment = Deployment(Path(folder))
        deployment.use_fake_engine(0.0)
        with deployment.running() as url:
            records = shown(tally.record() for tally in tallies(url, options.examples))
    num_problems = sum(record["problem"] is not None for record in records)
    return finish(options.json, records, [Bar("problems", num_problems, 0, is_most=True)])


if __name__ == "__main__":
    raise SystemExit(main())
