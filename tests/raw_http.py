"""Plain HTTP to a gateway, for what no client would send and what clients hide."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

BOUNDARY = "a-boundary-between-parts"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; names of headers are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class RawHttp:
    """Calls to one port, each on a connection of its own, without retries."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str) -> Reply:
        """GET a path."""
        return self.call("GET", path)

    def post(self, path: str, document: object, **headers: str) -> Reply:
        """POST a JSON document."""
        content = json.dumps(document).encode()
        return self.call("POST", path, content, {"Content-Type": "application/json", **headers})

    def upload(self, *fields: tuple[str, str], file: bytes | None) -> Reply:
        """POST /v1/files with these form fields and then the file, unless it is None."""
        parts = [form_field(*field) for field in fields]
        if file is not None:
            parts.append(file_head() + file + b"\r\n")
        return self.call("POST", "/v1/files", b"".join(parts) + FORM_END, FORM_HEADERS)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Any call; a body of several pieces is sent chunked, unless its length is in `headers`."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        with closing(connection):
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())


def exchange(port: int, request: bytes) -> bytes:
    """Send bytes that are no proper request; all that comes back until the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        with suppress(ConnectionError):
            connection.sendall(request)
        answer = bytearray()
        with suppress(ConnectionResetError):
            while piece := connection.recv(65_536):
                answer += piece
    return bytes(answer)


FORM_HEADERS = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
FORM_END = f"--{BOUNDARY}--\r\n".encode()


def form_field(name: str, value: str) -> bytes:
    """One part of a form."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
    return f"{head}{value}\r\n".encode()


def file_head(filename: str = "input.jsonl") -> bytes:
    """What stands before the bytes of the file; a line end comes after them."""
    disposition = f'form-data; name="file"; filename="{filename}"'
    kind = "application/octet-stream"
    head = f"--{BOUNDARY}\r\nContent-Disposition: {disposition}\r\nContent-Type: {kind}\r\n\r\n"
    return head.encode()
