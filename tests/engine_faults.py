"""Faults of the engine: it hangs, answers nonsense, hangs up, refuses connections."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fault_trial import LATENCY_S, Fault, expect, trial

from batchrun.types import JobState
from benchmarks.crash_account import read_executions
from benchmarks.deployment import MODEL, wait_until

NUM_BROKEN = 12
STOPPED_WAIT_S = 240.0
"""The daemon gives an engine that does not answer two minutes before it starts it again."""


def answer_garbage(folder: Path) -> None:
    """Replies that are not JSON: the rows are tried again."""
    _break_replies(folder, {"garbage": True})


def hang_up(folder: Path) -> None:
    """Connections dropped without a reply: the rows are tried again."""
    _break_replies(folder, {"drop_connection": True})


def answer_busy(folder: Path) -> None:
    """429 and 503: the rows are tried again, no sooner than the engine asks for."""
    _break_replies(folder, {"status": 503, "retry_after": "1"}, is_execution=False)


def stop_engine(folder: Path) -> None:
    """The engine's process stops without closing anything: it is ended and started again."""
    with trial(folder) as here:
        here.begin()
        pid = here.rig.pid_of("engine")
        os.kill(pid, signal.SIGSTOP)
        states: set[str] = set()

        def is_replaced() -> bool:
            time.sleep(0.5)
            states.update(
                str(engine["state"]) for engine in here.rig.client.get("/status")["engines"]
            )
            return here.rig.pid_of("engine") not in {0, pid} and not here.rig.lives(pid)

        wait_until(is_replaced, "the engine to be replaced", STOPPED_WAIT_S)
        expect("unreachable" in states, f"status showed {states}")
        here.finish(explains_reruns=False)


def never_answer(folder: Path) -> None:
    """One row gets no answer while the engine lives: the others end; a pause frees it."""
    rules = [{"match": {"row": 7}, "action": {"hang": True}, "times": 1}]
    with trial(folder) as here:
        here.rig.use_fake_engine(LATENCY_S, rules=rules, window={"requests": 24})
        here.begin()
        here.wait_for_rows(here.num_rows - 1)
        view = here.rig.job(here.job)
        expect(view["state"] == "running" and view["num_in_flight"] == 1, f"{view}")
        for command in ("pause", "resume"):
            expect(here.rig.call(command, here.job).returncode == 0, f"{command} was refused")
        here.finish(explains_reruns=False)


def refuse_connections(folder: Path) -> None:
    """An engine that somebody else runs goes away and comes back: rows wait for it."""
    with trial(folder) as here:
        port = here.rig.engine_port
        command = [*(sys.executable, "-m", "batchrun.engine.fake", f"--model={MODEL}")]
        command += [f"--port={port}", f"--latency-s={LATENCY_S}"]
        command += [f"--executions={here.rig.executions_path}"]
        here.rig.configure({"attach": f"http://127.0.0.1:{port}"}, window={"requests": 24})
        engine = subprocess.Popen(command)
        try:
            wait_until(lambda: _listens(port), "the engine to listen")
            here.begin()
            engine.kill()
            engine.wait()
            wait_until(
                lambda: here.rig.client.get("/status")["engines"][0]["state"] == "unreachable",
                "it to be missed",
            )
            expect(here.rig.job(here.job)["state"] == JobState.RUNNING, "the job did not wait")
            engine = subprocess.Popen(command)
            here.finish(explains_reruns=False)
        finally:
            engine.kill()
            engine.wait()


def _break_replies(folder: Path, action: dict[str, object], *, is_execution: bool = True) -> None:
    rules: Sequence[object] = [{"match": {"every": 9}, "action": action, "times": NUM_BROKEN}]
    with trial(folder) as here:
        here.rig.use_fake_engine(LATENCY_S, rules=rules, window={"requests": 24})
        here.begin()
        here.finish(explains_reruns=False)
        num_extra = len(read_executions(here.rig.executions_path)) - here.num_rows
        wanted = NUM_BROKEN if is_execution else 0
        expect(num_extra == wanted, f"{num_extra} executions more than rows, not {wanted}")


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


ENGINE_FAULTS = (
    Fault(
        "engine answers garbage",
        f"{NUM_BROKEN} replies of 200 are not JSON",
        "nothing; those rows are tried again, each once more",
        answer_garbage,
    ),
    Fault(
        "engine hangs up",
        f"{NUM_BROKEN} connections are dropped without a reply",
        "nothing; those rows are tried again, each once more",
        hang_up,
    ),
    Fault(
        "engine is busy",
        f"{NUM_BROKEN} replies are 503 with `Retry-After: 1`",
        "nothing; those rows are tried again",
        answer_busy,
    ),
    Fault(
        "engine stops without closing",
        "SIGSTOP to the engine's process",
        "`status` shows the engine `unreachable`; it is ended and started again, after 30 s with "
        "rows in flight, else after 2 minutes",
        stop_engine,
    ),
    Fault(
        "a row is never answered",
        "the engine lives and never answers one row",
        "the other rows end, `status` shows one in flight; `pause` and `resume` send it again",
        never_answer,
    ),
    Fault(
        "connections refused",
        "an attached engine ends, and comes back later",
        "`status` shows the engine `unreachable`; rows wait, and go on when it answers",
        refuse_connections,
    ),
)
