"""Where callers in bad faith act: a deployment with two keys, of which one calls in good faith."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import requests

from benchmarks.api_calls import check_reply
from benchmarks.deployment import MODEL, Deployment, prompt, wait_until

CHAT = "/v1/chat/completions"
LATENCY_S = 0.02
NUM_ROWS = 400
WAIT_S = 60.0
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PARTS = ("daemon", "gateway", "engine")


def line_of(custom_id: object, text: object = "hello", **more: object) -> dict[str, object]:
    """A line of a batch."""
    body = {**HELLO, "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def jsonl(*lines: object) -> bytes:
    """Lines, as bytes; those that are bytes stay what they are."""
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def until_taken(call: Callable[[], requests.Response]) -> requests.Response:
    """The reply, when it is none that asks to come again, as OpenAI's client does."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        reply = call()
        if reply.status_code != 503 or time.monotonic() > deadline_s:
            return reply
        assert "Retry-After" in reply.headers, "503 without Retry-After"
        time.sleep(1)


class Api:
    """The calls of one key."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self._headers = {"Authorization": f"Bearer {key}"}

    def call(
        self, method: str, path: str, *, is_odd: bool = True, **what: Any
    ) -> requests.Response:
        """A call; its reply must be one that the API gives."""
        headers = {**self._headers, **what.pop("headers", {})}
        call = partial(requests.request, method, self.url + path, headers=headers, timeout=WAIT_S)
        reply = until_taken(lambda: call(**what))
        if is_odd and reply.status_code != 503:
            names = {name.lower(): value for name, value in reply.headers.items()}
            check_reply(reply.status_code, names, reply.content, is_head=False)
        return reply

    def upload(
        self, content: bytes, name: str = "in.jsonl", purpose: str = "batch"
    ) -> requests.Response:
        """`POST /v1/files`."""
        return self.call(
            "POST", "/v1/files", files={"file": (name, content)}, data={"purpose": purpose}
        )

    def create(self, file_id: object, **more: Any) -> requests.Response:
        """`POST /v1/batches`."""
        headers = more.pop("headers", {})
        wanted = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **more}
        return self.call("POST", "/v1/batches", json=wanted, headers=headers)

    def batch(self, batch_id: str) -> dict[str, Any]:
        """A batch."""
        found: dict[str, Any] = self.call("GET", f"/v1/batches/{batch_id}").json()
        return found

    def started(self, content: bytes) -> str:
        """The id of a new batch of this file."""
        return str(self.create(self.upload(content).json()["id"]).json()["id"])

    def ended(self, batch_id: str) -> dict[str, Any]:
        """A batch, when it has ended."""
        ends = {"completed", "failed", "cancelled", "expired"}
        wait_until(lambda: self.batch(batch_id)["status"] in ends, f"{batch_id} to end", poll_s=0.2)
        return self.batch(batch_id)


class Scene:
    """A deployment with a fake engine and two callers: `bad`, and `good`, whose batch runs."""

    def __init__(self, folder: Path) -> None:
        self.rig = Deployment(folder)
        self.rig.use_fake_engine(LATENCY_S)
        self._pids: dict[str, int] = {}
        self._batch = ""

    @contextmanager
    def running(self) -> Iterator[Self]:
        """The deployment, with the batch of the good caller."""
        with self.rig.running() as url:
            keys = [self.rig.call("keys", "create", name) for name in ("bad", "good")]
            self.bad, self.good = (Api(url, key.stdout.split()[0]) for key in keys)
            wait_until(lambda: self.good.call("GET", "/v1/files").status_code == 200, "the keys")
            lines = (line_of(str(row), prompt("good", row)) for row in range(NUM_ROWS))
            self._batch = self.good.started(jsonl(*lines))
            self.file = str(self.good.upload(jsonl(line_of("kept"))).json()["id"])
            self._pids = {part: self.rig.pid_of(part) for part in PARTS}
            yield self

    def check_others(self) -> None:
        """The good caller is served: online calls, files, batches. Raises AssertionError."""
        for method, path, what in (
            ("POST", CHAT, {"json": HELLO}),
            ("GET", "/v1/files", {}),
            ("GET", f"/v1/batches/{self._batch}", {}),
        ):
            reply = self.good.call(method, path, is_odd=False, **what)
            assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text[:200]}"
        listed = [file["id"] for file in self.good.call("GET", "/v1/files").json()["data"]]
        assert self.file in listed, "the file of the other is gone"
        assert {part: self.rig.pid_of(part) for part in PARTS} == self._pids, "a part was replaced"

    def check_end(self) -> None:
        """The batch of the good caller ends with every answer. Raises AssertionError."""
        batch = self.good.ended(self._batch)
        counts = batch["request_counts"]
        assert (batch["status"], counts["completed"]) == ("completed", NUM_ROWS), counts
        log = (self.rig.home.log / "daemon.log").read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") :][:2_000]
        check = self.rig.call("store", "check")
        assert check.returncode == 0, check.stdout

    def raw(
        self, content: bytes, *, then: Callable[[socket.socket], object] | None = None
    ) -> bytes:
        """Send bytes, do `then`, and take what comes for a while."""
        with socket.create_connection(("127.0.0.1", self.rig.port), timeout=5) as connection:
            with suppress(OSError):
                connection.sendall(content)
            if then is not None:
                then(connection)
                return b""
            answer = bytearray()
            with suppress(OSError):
                while piece := connection.recv(65_536):
                    answer += piece
        return bytes(answer)

    def head(self, path: str, *headers: str, method: str = "POST") -> bytes:
        """The head of a call of the bad caller."""
        lines = (
            f"{method} {path} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {self.bad.key}",
            *headers,
        )
        return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"
