"""Outages of a deployment's processes, and the account of a job that lived through them."""

from __future__ import annotations

import http.client
import json
import re
import signal
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import psutil
from deployment_rig import DeploymentRig
from store_builders import select

WAIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Outage:
    """From just before a kill until the deployment was told to go on; UTC epoch seconds.

    `num_committed` is how many rows had their results when it began.
    """

    began_at: float
    ended_at: float
    num_committed: int


def kill(
    rig: DeploymentRig,
    job_id: str,
    *parts: str,
    signal_number: int = signal.SIGKILL,
    restarts: bool = True,
) -> Outage:
    """End some of daemon, gateway, engine and agent; then start again what nobody watches."""
    began_at = time.time()
    for part in parts:
        rig.kill(part, signal_number)
    num_committed = len(committed_at(rig, job_id))
    if restarts and "agent" in parts:
        rig.start_agent()
    if restarts and "daemon" in parts:
        rig.ask("up", "-d")
    return Outage(began_at, time.time(), num_committed)


def committed_at(rig: DeploymentRig, job_id: str) -> dict[int, float]:
    """When each row's result was committed, as the store tells it."""
    query = (
        "SELECT row, committed_at FROM results JOIN jobs ON jobs.seq = results.job_seq"
        " WHERE jobs.id = ? ORDER BY row"
    )
    return dict(select(rig.store, query, job_id))


def job_state(rig: DeploymentRig, job_id: str) -> str:
    """A job's state in the store."""
    ((state,),) = select(rig.store, "SELECT state FROM jobs WHERE id = ?", job_id)
    return str(state)


def begun_at(rig: DeploymentRig, job_id: str) -> dict[int, list[float]]:
    """When each execution of each row began, as the engine (or the proxy before it) tells it."""
    begun: dict[int, list[float]] = defaultdict(list)
    for entry in rig.executions():
        match = re.fullmatch(rf"batchrun-\d+-{job_id}-(\d+)-\d+", str(entry["request_id"]))
        if match is not None:
            begun[int(match[1])].append(float(entry["at"]))
    return begun


def wait_for_rows(rig: DeploymentRig, job_id: str, num_rows: int) -> None:
    """Wait until so many results are committed."""
    wait_until(lambda: len(committed_at(rig, job_id)) >= num_rows)


def wait_until_running(rig: DeploymentRig, part: str) -> None:
    """Wait until a process of the deployment, which may be restarting, is there."""

    def is_running() -> bool:
        try:
            return psutil.pid_exists(rig.pid_of(part) or -1)
        except (FileNotFoundError, ValueError):
            return False

    wait_until(is_running)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that gives no notice."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def check_account(
    rig: DeploymentRig, job_id: str, outages: Sequence[Outage], output: str = "out.parquet"
) -> None:
    """Every row stands once in the output, in order, and no row ran without need.

    `committed_at` is read from the clock before the commit itself, so an execution that begins
    later than that instant began after its row was done. An execution beyond a row's first needs
    an outage that cut an earlier one: begun before its end, not committed before its beginning.
    """
    wait_until(lambda: job_state(rig, job_id) in {"completed", "paused", "failed"})
    view = rig.job(job_id)
    num_rows = int(view["num_rows"])
    begun, committed = begun_at(rig, job_id), committed_at(rig, job_id)

    assert (view["state"], view["reason"], view["num_failed"]) == ("completed", None, 0)
    assert view["num_completed"] == num_rows
    rows = rig.output(output)
    assert [row["id"] for row in rows] == [f"row-{i}" for i in range(num_rows)]
    assert all(row["error"] is None and row["response"] for row in rows)
    assert set(begun) == set(committed) == set(range(num_rows))
    assert [row for row in begun if max(begun[row]) > committed[row]] == []
    for row, instants in begun.items():
        cuts = [
            outage
            for outage in outages
            if min(instants) <= outage.ended_at and committed[row] >= outage.began_at
        ]
        assert len(instants) - 1 <= len(cuts), f"row {row} ran at {instants}"


def answers(rig: DeploymentRig) -> bool:
    """Whether the gateway passes a call through."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{rig.port}/v1/models") as response:
            return bool(response.status == 200)
    except OSError:
        return False


def read_stream(
    rig: DeploymentRig, body: dict[str, object], on_first: Callable[[], None] = lambda: None
) -> str:
    """The text of a streamed chat through the gateway; `on_first` is called at its first chunk."""
    connection = http.client.HTTPConnection("127.0.0.1", rig.port, timeout=60)
    with closing(connection):
        headers = {"Content-Type": "application/json"}
        document = json.dumps(body | {"stream": True})
        connection.request("POST", "/v1/chat/completions", document, headers)
        events = [line.strip() for line in _lines(connection.getresponse(), on_first)]
    assert events[-1] == b"data: [DONE]"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def _lines(response: http.client.HTTPResponse, on_first: Callable[[], None]) -> list[bytes]:
    assert response.status == 200
    first = response.readline()
    on_first()
    return [line for line in (first, *response) if line.strip()]
