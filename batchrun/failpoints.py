"""Places where a process can be stopped, slowed or failed on purpose, for the fault harness.

`BATCHRUN_FAILPOINTS` says what happens where, as `NAME=ACTION` with commas between; without it a
failpoint costs one comparison, and nothing happens. `*` stands for every name.

    kill            the process ends at once, as by `kill -9`
    raise           an OSError: no space left on the device
    sleep:S         it waits S seconds
    ask:SOCKET      it tells a Unix socket `NAME PID`, waits, and does what the answer says: `kill`,
                    `raise`, `sleep:S`, or to go on; so it does when nobody answers

`clock=FILE` is no failpoint: it moves this process's wall clock (`time.time`) by the seconds that
stand in the file, read at every look at the clock; nothing while there is no file.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "BATCHRUN_FAILPOINTS"
NAMES = (
    "file.rename.before",
    "store.migrate.before",
    "store.results.between",
    "store.commit.before",
    "store.commit.after",
    "writer.commit.before",
    "writer.commit.after",
    "output.sync.before",
    "output.rename.before",
    "output.rename.after",
)
"""Every failpoint: before and after each commit and each rename, and between the two tables that
one result is written to."""
ACTIONS = frozenset({"kill", "raise", "sleep", "ask"})
EVERY = "*"
CLOCK = "clock"


def failpoint(name: str) -> None:
    """Do what the environment asks for at this place; nothing without it."""
    if _ACTIONS:
        _act(name)


def parse_actions(text: str) -> dict[str, str]:
    """Action by name. Raises ValueError for a name or an action that does not exist."""
    actions: dict[str, str] = {}
    for entry in filter(None, text.split(",")):
        name, _, action = entry.partition("=")
        if name not in {*NAMES, EVERY, CLOCK}:
            raise ValueError(f"{VARIABLE}: no such failpoint: {name!r}")
        if name != CLOCK and action.partition(":")[0] not in ACTIONS:
            raise ValueError(f"{VARIABLE}: {name}: no such action: {action!r}")
        actions[name] = action
    return actions


def _act(name: str) -> None:
    assert name in NAMES, name
    kind, _, argument = _ACTIONS.get(name, _ACTIONS.get(EVERY, "")).partition(":")
    if kind == "ask":
        kind, _, argument = _ask(name, argument).partition(":")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "raise":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif kind == "sleep":
        time.sleep(float(argument))


def _ask(name: str, path: str) -> str:
    """The answer, or nothing when there is none."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(f"{name} {os.getpid()}\n".encode())
        return connection.recv(64).decode().strip()
    return ""


def _move_clock(actions: Mapping[str, str]) -> None:
    """Put a wall clock in place of `time.time` that is off by what the file of `clock` says."""
    if CLOCK not in actions:
        return
    file, read_clock = Path(actions[CLOCK]), time.time

    def moved() -> float:
        with suppress(OSError, ValueError):
            return read_clock() + float(file.read_text())
        return read_clock()

    vars(time)["time"] = moved


_ACTIONS = parse_actions(os.environ.get(VARIABLE, ""))
_move_clock(_ACTIONS)
