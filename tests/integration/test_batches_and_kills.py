"""`kill -9` of the daemon in each state of a batch, seen by a caller that goes on polling."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from batch_rig import (
    MODEL,
    NUM_STUCK_ONCE,
    REFUSED,
    STUCK,
    Caller,
    Line,
    chat_lines,
    connect,
    counts,
    engine_rules,
    stuck_once,
)
from deployment_rig import DeploymentRig
from kill_rig import job_state, wait_until

from batchrun.failpoints import VARIABLE

SLOW = {
    "validating": "store.commit.before=sleep:2",
    "finalizing": "output.rename.before=sleep:5",
}
"""What makes a state last until the kill, where nothing else does; the next daemon has none of
it."""


def lines_for(state: str) -> list[Line]:
    """Twenty good requests and two bad ones; some that no engine answers before the kill."""
    lines = [*chat_lines(20), *chat_lines(2, REFUSED)]
    if state == "running":
        lines += chat_lines(NUM_STUCK_ONCE, stuck_once("sync"))
    if state == "cancelling":
        lines += chat_lines(3, STUCK)
    return lines


def start(rig: DeploymentRig, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment in which a batch stays in this state for a while."""
    rig.use_fake_engine(f"--model={MODEL}", rules=engine_rules())
    monkeypatch.setenv(VARIABLE, SLOW.get(state, ""))
    rig.ask("up", "-d")
    monkeypatch.delenv(VARIABLE)


def bring_to(caller: Caller, rig: DeploymentRig, state: str, lines: list[Line]) -> str:
    """Create a batch and see it come to a state; its id."""
    batch = caller.create(lines)
    if state == "running":
        rig.wait_for_executions(20 + NUM_STUCK_ONCE)
    if state == "cancelling":
        caller.wait_for_counts(batch.id, 22)
        caller.batches.cancel(batch.id)
    wait_until(lambda: job_state(rig, batch.id) == state)
    return batch.id


@pytest.mark.nightly
@pytest.mark.parametrize(
    "state", ["validating", "running", "finalizing", "cancelling", "completed"]
)
def test_a_poller_sees_the_end_of_its_batch_in_spite_of_a_kill(
    rig: DeploymentRig, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(rig, state, monkeypatch)
    lines = lines_for(state)
    with connect(rig.port, max_retries=20) as caller, ThreadPoolExecutor(1) as pool:
        batch_id = bring_to(caller, rig, state, lines)
        polled = pool.submit(caller.wait_until_ended, batch_id)
        rig.kill("daemon")
        assert job_state(rig, batch_id) == state
        rig.ask("up", "-d")

        ended = polled.result()

        assert ended == caller.wait_until_ended(batch_id)
        assert ended.status == ("cancelled" if state == "cancelling" else "completed")
        num_done = len(lines) - (5 if state == "cancelling" else 2)
        assert counts(ended) == (len(lines), num_done, 2)
        assert set(caller.results(ended)) == {line["custom_id"] for line in lines}
        listed = {file.id for file in caller.files.list(purpose="batch_output")}
        assert listed == {ended.output_file_id, ended.error_file_id}
