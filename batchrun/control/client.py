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
        self._may_have_heard = True

    @property
    def may_have_heard(self) -> bool:
        """Whether the daemon may have got the last call, which had no answer."""
        return self._may_have_heard

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

    def describe_silence(self) -> str | None:
        """A few words on the daemon that gave the last call no answer, if it lives: it hangs, or
        takes none."""
        address = self._home.read_daemon_address()
        if address is None or StoreLock(self._home.store_lock).find_holder() != address.pid:
            return None
        runs = f"the daemon of {self._home.path} (pid {address.pid}) runs and"
        if not self._may_have_heard:
            return f"{runs} takes no calls, as while it starts or stops"
        return f"{runs} gave no answer within {self._timeout_s:g} s"

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
        self._may_have_heard = False
        address = self._home.read_daemon_address()
        if address is None:
            raise self._missing(method)
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
            cause = getattr(error, "reason", error)
            self._may_have_heard = not isinstance(cause, ConnectionRefusedError)
            raise self._missing(method) from error

    def _missing(self, method: str) -> DaemonUnavailableError:
        if (silence := self.describe_silence()) is None:
            return DaemonUnavailableError(
                f"no daemon runs for {self._home.path}; start one with `batchrun up -d`"
            )
        if not self._may_have_heard:
            return DaemonUnavailableError(f"{silence}; try again")
        told = "" if method == "GET" else "it may do what was asked all the same, "
        return DaemonUnavailableError(f"{silence}; {told}`batchrun down` ends it")


def _as_our_error(status: int, text: str | bytes) -> BatchrunError:
    try:
        envelope = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return BatchrunError(f"the daemon answered HTTP {status}")
    kind = getattr(errors, str(envelope.get("code")), BatchrunError)
    is_ours = isinstance(kind, type) and issubclass(kind, BatchrunError)
    return (kind if is_ours else BatchrunError)(envelope["message"])
