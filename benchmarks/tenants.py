"""Two keys of equal weight, one in bad faith: which rows and calls the other one keeps.

    python -m benchmarks.tenants [--rows N] [--engine fake|vllm] [--json FILE]

The victim has one batch of N rows and makes calls one after the other. Beside it is a key that has
a batch of its own and as many calls at a time as a key may, and then one that floods: forty
batches, files without end, batches made and cancelled, thirty-two calls at a time, and weights,
deadlines and classes that are not its own. Rows are counted where they run, at the fake engine or
the real vLLM with the tiny model, from the victim's first to its last.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import requests

from benchmarks.deployment import MODEL, TINY, Deployment, wait_until
from benchmarks.records import Bar, Record, finish, parser, shown

LATENCY_S = 0.1
WINDOW = {"requests": 16}
VLLM_ARGS = ("--kv-cache-memory-bytes=268435456", "--max-model-len=4096", "--max-num-seqs=16")
ENGINES = {"fake": MODEL, "vllm": TINY}
"""The model that each has."""
NUM_BATCHES = 40
NUM_CALLERS = 32
CALLS_AT_ONCE = 8
CALL_PAUSE_S = 0.1
CALL_BOUND_S = 1.0
FAIR_SHARE = 0.5
LEAST_KEPT = 0.9
TIMEOUT_S = 120.0
FILE_BYTES = 1 << 20
CLASSES = {"voice": {"ttft_s": 0.2}}
VICTIM, OTHER = "victim", "other"


def main() -> int:
    """Measure both, print the bars."""
    made = parser(__doc__, rows=1_500)
    made.add_argument("--engine", choices=ENGINES, default="fake")
    options = made.parse_args()
    records = shown(_both(options.rows, options.engine))
    honest, bad = records
    bars = [
        Bar("share of rows beside a flood", bad["share"], LEAST_KEPT * FAIR_SHARE),
        Bar("rows/s, part kept", bad["rows_per_s"] / honest["rows_per_s"], LEAST_KEPT),
        Bar("attainment of calls, part kept", bad["attained"] / honest["attained"], LEAST_KEPT),
    ]
    return finish(options.json, records, bars)


def _both(num_rows: int, engine: str) -> Iterator[Record]:
    for is_bad in (False, True):
        with tempfile.TemporaryDirectory(prefix="batchrun-tenants-") as folder:
            yield measure(Path(folder), num_rows, engine, is_bad=is_bad)


def measure(folder: Path, num_rows: int, engine: str = "fake", *, is_bad: bool) -> Record:
    """The victim's batch from its first row to its last, beside another key."""
    deployment = Deployment(folder)
    limits = {"concurrent_calls": CALLS_AT_ONCE, "stored_bytes": 64 << 20}
    more: dict[str, Any] = {"slo_classes": CLASSES, "key_limits": limits}
    with ExitStack() as exits:
        if engine == "vllm":
            exits.enter_context(deployment.counted_vllm(*VLLM_ARGS, **more))
        else:
            deployment.use_fake_engine(LATENCY_S, window=WINDOW, **more)
        victim, other = (
            Tenant(deployment, deployment.batchrun("keys", "create", name)["key"], ENGINES[engine])
            for name in (VICTIM, OTHER)
        )
        exits.enter_context(deployment.running())
        deployment.batchrun("offline", "off")
        rows = [other.make_batch(num_rows) for _ in range(NUM_BATCHES if is_bad else 2)]
        batch = victim.make_batch(num_rows)
        for each in (batch, *rows):
            wait_until(partial(victim.is_running, each, other), f"{each} to be planned")
        calls = _Calls(victim)
        with calls.going(), flood(other, rows) if is_bad else other.calling(CALLS_AT_ONCE):
            deployment.batchrun("offline", "on")
            wait_until(lambda: victim.status(batch) == "completed", "the batch", 10 * TIMEOUT_S)
    return {
        "engine": engine,
        "other": "floods" if is_bad else "honest",
        **_rows_of(deployment.executions_path, batch),
        "calls": len(calls.took_s),
        "attained": sum(took_s <= CALL_BOUND_S for took_s in calls.took_s) / len(calls.took_s),
        "slowest_call_s": max(calls.took_s),
        **{f"num_{status}": other.refusals.get(status, 0) for status in ("400", "429")},
    }


def _rows_of(executions: Path, batch: str) -> Record:
    """Whose rows began between the first and the last of the victim's."""
    began = [json.loads(line) for line in executions.read_text().splitlines()]
    rows = [each for each in began if "batch_" in each["request_id"]]
    own = [number for number, each in enumerate(rows) if batch in each["request_id"]]
    num_between = own[-1] - own[0] + 1
    span_s = rows[own[-1]]["at"] - rows[own[0]]["at"]
    return {
        "rows": len(own),
        "other_rows": num_between - len(own),
        "share": len(own) / num_between,
        "rows_per_s": len(own) / span_s,
    }


class Tenant:
    """A holder of an API key; `refusals` counts the answers that were errors, by their status."""

    def __init__(self, deployment: Deployment, key: str, model: str) -> None:
        self._url, self._model = f"{deployment.url}/v1", model
        self._headers = {"Authorization": f"Bearer {key}"}
        self.refusals: dict[str, int] = {}

    def ask(self, method: str, path: str, **options: Any) -> Mapping[str, Any]:
        """The answer as JSON; an empty one where it was refused."""
        headers = self._headers | options.pop("headers", {})
        reply = requests.request(
            method, self._url + path, headers=headers, timeout=TIMEOUT_S, **options
        )
        if reply.ok:
            found: Mapping[str, Any] = reply.json()
            return found
        status = str(reply.status_code)
        self.refusals[status] = self.refusals.get(status, 0) + 1
        return {}

    def upload(self, content: bytes, purpose: str = "batch") -> str | None:
        """The id of a new file; None where it was refused."""
        form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": purpose}}
        return self.ask("POST", "/files", **form).get("id")

    def make_batch(self, num_rows: int, **more: object) -> str:
        """A batch of as many rows; its id, "" where it was refused."""
        body = {"model": self._model, "max_tokens": 8}
        lines = [
            {
                "custom_id": str(row),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body
                | {"messages": [{"role": "user", "content": f"{id(self)} asks {row}"}]},
            }
            for row in range(num_rows)
        ]
        file = self.upload("".join(json.dumps(line) + "\n" for line in lines).encode())
        wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
        batch = wanted | {"completion_window": "24h", **more}
        return str(self.ask("POST", "/batches", json=batch).get("id", ""))

    def status(self, batch: str) -> str:
        """Of a batch of this key."""
        return str(self.ask("GET", f"/batches/{batch}").get("status"))

    def is_running(self, batch: str, other: Tenant) -> bool:
        """Whether a batch of this key or the other is past its validation."""
        return "in_progress" in {self.status(batch), other.status(batch)}

    def call(self, **headers: str) -> bool:
        """One online call; whether it was answered."""
        messages = [{"role": "user", "content": f"call at {time.monotonic()}"}]
        body = {"model": self._model, "messages": messages, "max_tokens": 8}
        return bool(self.ask("POST", "/chat/completions", json=body, headers=headers))

    @contextmanager
    def calling(self, num_callers: int) -> Iterator[None]:
        """Within, as many call all the time."""
        with going(self.call, *[self.call] * (num_callers - 1)):
            yield


class _Calls:
    """Calls of a key, one after the other, and how long each took."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self.took_s: list[float] = []

    @contextmanager
    def going(self) -> Iterator[None]:
        with going(self._one):
            yield

    def _one(self) -> None:
        began_s = time.monotonic()
        is_answered = self._tenant.call()
        self.took_s.append(time.monotonic() - began_s if is_answered else float("inf"))
        time.sleep(CALL_PAUSE_S)


@contextmanager
def flood(tenant: Tenant, batches: list[str]) -> Iterator[None]:
    """Within, the key does all that it can to be served before others."""

    def claim() -> None:
        for extension in ({"weight": 1_000_000}, {"deadline": "1m"}):
            tenant.make_batch(1, batchrun=extension)

    def make_and_cancel() -> None:
        batch = tenant.make_batch(200)
        tenant.ask("POST", f"/batches/{batch}/cancel")

    def cancel() -> None:
        tenant.ask("POST", f"/batches/{batches.pop()}/cancel") if len(batches) > 2 else time.sleep(
            1
        )

    def upload() -> None:
        tenant.upload(b"x" * FILE_BYTES, "user_data")

    def voice() -> None:
        tenant.call(**{"x-batchrun-class": "voice"})

    acts = (claim, make_and_cancel, cancel, upload, upload, voice)
    with going(*acts), tenant.calling(NUM_CALLERS):
        yield


@contextmanager
def going(*acts: Callable[[], object]) -> Iterator[None]:
    """Within, each is done again and again, in a thread of its own."""
    is_over = threading.Event()

    def repeat(act: Callable[[], object]) -> None:
        while not is_over.is_set():
            with suppress(requests.RequestException):
                act()

    threads = [threading.Thread(target=repeat, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    raise SystemExit(main())
