"""Asking the running daemon, over HTTP on loopback; watching one job until it ends."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from batchrun import errors
from batchrun.cli.console import ProgressBar, answer, note
from batchrun.errors import (
    BatchrunError,
    DaemonUnavailableError,
    EngineError,
    JobFailedError,
    StoreFullError,
)
from batchrun.home import CONTROL_PREFIX, Home
from batchrun.types import JobState

TIMEOUT_S = 30.0
JsonDocument = dict[str, Any]


class DaemonClient:
    """The daemon of one home. Every call raises DaemonUnavailableError when none answers."""

    def __init__(self, home: Home) -> None:
        self._home = home

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

    def _call(self, method: str, path: str, document: Mapping[str, object] | None) -> JsonDocument:
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
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer: JsonDocument = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise _as_our_error(error) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise missing from error


def _as_our_error(error: urllib.error.HTTPError) -> BatchrunError:
    try:
        envelope = json.load(error)["error"]
    except (ValueError, KeyError, TypeError):
        return BatchrunError(f"the daemon answered HTTP {error.code}")
    kind = getattr(errors, str(envelope.get("code")), BatchrunError)
    is_ours = isinstance(kind, type) and issubclass(kind, BatchrunError)
    return (kind if is_ours else BatchrunError)(envelope["message"])


POLL_INTERVAL_S = 0.3
STALL_PATIENCE_S = 5.0


class RowsFailedError(JobFailedError):
    """Under --strict: the job completed, but rows failed."""

    exit_code = 1


def follow(
    client: DaemonClient, job_id: str, *, strict: bool, as_json: bool, go_on: str | None = None
) -> None:
    """Show a job's progress until it ends, then its summary.

    `go_on` is the command that takes up a paused job again (default: `resume`).
    Raises JobFailedError when it paused, failed, was cancelled or expired, RowsFailedError under
    `strict`, StoreFullError when its results cannot be written.
    """
    view = _watch(client, job_id, go_on)
    state = JobState(view["state"])
    done = _summary(view) if state is JobState.COMPLETED else ()
    answer(view, *done, as_json=as_json)
    if state is JobState.PAUSED:
        raise JobFailedError(
            f"{job_id} paused after {_done(view):,} of {view['num_rows']:,} rows: "
            f"{str(view['reason']).rstrip('.')}; mend the cause, then "
            f"`batchrun {go_on or f'resume {job_id}'}` goes on where it was"
        )
    if state is not JobState.COMPLETED:
        raise JobFailedError(f"{job_id} {state}: {view['reason'] or view['output_path']}")
    if view["num_failed"] and strict:
        raise RowsFailedError(
            f"rows failed: {view['num_failed']:,}; see `batchrun errors {job_id}`"
        )
    if view["num_failed"] and not as_json:
        note(f"why rows failed: batchrun errors {job_id}")


def _watch(client: DaemonClient, job_id: str, go_on: str | None) -> dict[str, Any]:
    stalled_since_s: float | None = None
    with ProgressBar(after_s=0) as progress:
        while True:
            view = client.get(f"/jobs/{job_id}")
            state = JobState(view["state"])
            if state.is_terminal or state is JobState.PAUSED:
                return view
            progress(_describe(view), _done(view), view["num_rows"])
            if view["engine_failure"] is not None:
                raise EngineError(f"no engine is left to run {job_id}: {view['engine_failure']}")
            if view["stalled"] is None:
                stalled_since_s = None
            elif stalled_since_s is None:
                stalled_since_s = time.monotonic()
            elif time.monotonic() - stalled_since_s > STALL_PATIENCE_S:
                then = f"`batchrun {go_on}` goes" if go_on else "the job goes"
                raise StoreFullError(
                    f"results cannot be written: {view['stalled']}; then {then} on where it was"
                )
            time.sleep(POLL_INTERVAL_S)


def _describe(view: dict[str, Any]) -> str:
    late = f", {view['deadline_outlook']}" if view["is_deadline_kept"] is False else ""
    doing = view["stalled"] or view["stage"] or f"{view['rows_per_s']:.1f} rows/s{late}"
    return f"{view['name']}: {doing}"


def _done(view: dict[str, Any]) -> int:
    return int(view["num_completed"]) + int(view["num_failed"])


def _summary(view: dict[str, Any]) -> tuple[str, str]:
    line = (
        f"{view['id']}  {view['name']}: {view['num_completed']:,} rows done, "
        f"{view['num_failed']:,} failed, "
        f"{view['num_prompt_tokens'] + view['num_output_tokens']:,} tokens"
    )
    if view["hit_rate"] is not None:
        line += f", {view['hit_rate']:.0%} of prompt tokens from the prefix cache"
    return line, view["output_path"]
