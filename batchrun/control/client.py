"""Asking the running daemon, over HTTP on loopback, or where it stands by the one that leads."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from typing import Any

from batchrun import errors
from batchrun.errors import BatchrunError, DaemonUnavailableError, NotLeadingError
from batchrun.files import StoreLock
from batchrun.home import CONTROL_PREFIX, Home

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs past every proxy of the environment, as the daemon and the gateway do."""
TIMEOUT_S = 30.0
JsonDocument = dict[str, Any]
LEADERS = ("/jobs/", "/offline", "/keys", "/engines", "/fleets", "/served", "/foretell")
"""What the leader does wherever it is asked for. The rest is about a machine: its files, its
gateway."""


class DaemonClient:
    """The daemon of one home. Every call raises DaemonUnavailableError when none answers.

    What only the leader can do, it does; NotLeadingError then means that nobody leads, else that
    the command belongs into the leader's home. StoreError.
    """

    def __init__(self, home: Home, *, timeout_s: float = TIMEOUT_S) -> None:
        self._home = home
        self._timeout_s = timeout_s

    def get(self, path: str) -> JsonDocument:
        """GET a control route."""
        return self._call("GET", path, None)

    def post(self, path: str, document: Mapping[str, object] | None = None) -> JsonDocument:
        """POST a JSON object to a control route."""
        return self._call("POST", path, document or {})

    def is_running(self) -> bool:
        """Whether a daemon answers."""
        try:
            self.get("/status")
        except DaemonUnavailableError:
            return False
        return True

    def ask_leader(
        self, method: str, path: str, document: Mapping[str, object] | None
    ) -> JsonDocument:
        """Call a control route of the daemon that leads on the home's database."""
        from batchrun.store.database import open_store
        from batchrun.store.orders import Order, ask_leader

        order = Order(method, path, document, self._timeout_s)
        with closing(open_store(self._home.store_location)) as store:
            answer = ask_leader(store, order)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise _as_our_error(answer.status, answer.text)
        told: JsonDocument = json.loads(answer.text)
        return told

    def is_silent(self) -> bool:
        """Whether the daemon that is not heard lives: it hangs, or only just begins to lead."""
        address = self._home.read_daemon_address()
        holder = StoreLock(self._home.store_lock).find_holder()
        return address is not None and holder == address.pid

    def _call(self, method: str, path: str, document: Mapping[str, object] | None) -> JsonDocument:
        try:
            return self._ask_here(method, path, document)
        except NotLeadingError:
            if not path.startswith(LEADERS):
                raise
            return self.ask_leader(method, path, document)

    def _ask_here(
        self, method: str, path: str, document: Mapping[str, object] | None
    ) -> JsonDocument:
        missing = DaemonUnavailableError(
            f"no daemon runs for {self._home.path}; start one with `batchrun up -d`"
        )
        address = self._home.read_daemon_address()
        if address is None:
            raise missing
        request = urllib.request.Request(
            address.url + CONTROL_PREFIX + path,
            method=method,
            data=None if document is None else json.dumps(document).encode(),
            headers={
                "Authorization": f"Bearer {address.token}",
                "Content-Type": "application/json",
            },
        )
        try:
            with DIRECT.open(request, timeout=self._timeout_s) as response:
                answer: JsonDocument = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise _as_our_error(error.code, error.read()) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise missing from error


def _as_our_error(status: int, text: str | bytes) -> BatchrunError:
    try:
        envelope = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return BatchrunError(f"the daemon answered HTTP {status}")
    kind = getattr(errors, str(envelope.get("code")), BatchrunError)
    is_ours = isinstance(kind, type) and issubclass(kind, BatchrunError)
    return (kind if is_ours else BatchrunError)(envelope["message"])
