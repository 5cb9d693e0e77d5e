"""A deployment for as long as somebody needs it: calls at once share it, the last one stops it.

Calls are those of Python and `batchrun run`, in any number of threads and processes. Each holds a
shared `flock` while it needs the deployment, so that one which was killed counts no more.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from weakref import WeakSet

from batchrun.control.client import DaemonClient
from batchrun.control.following import ProgressBar
from batchrun.control.starting import (
    POLL_INTERVAL_S,
    find_daemon,
    find_running,
    start_in_background,
    stop_everything,
)
from batchrun.engine import process
from batchrun.errors import BatchrunError
from batchrun.files import try_lock
from batchrun.home import Home

_lock_files: WeakSet[IO[bytes]] = WeakSet()


def _close_inherited() -> None:
    """A forked process shares the open files, and would hold their locks for as long as it lives.
    Closing them there leaves them to the process that took them."""
    for file in _lock_files:
        file.close()


os.register_at_fork(after_in_child=_close_inherited)


@contextmanager
def deployment_up(
    home: Home, flags: Sequence[str] = (), *, is_shown: bool = True
) -> Iterator[DaemonClient]:
    """The deployment of a home: the one that runs, or one that is started for calls and, when the
    last of them leaves, stopped.

    Raises what made the daemon give up, as one line.
    """
    home.create()
    with _lock_file(home.run / "calls.lock") as calls:
        _wait_for(calls, fcntl.LOCK_SH, "stops the deployment", is_shown=is_shown)
        try:
            with in_turn(home.run / "start.lock", is_shown=is_shown):
                _start(home, flags, is_shown=is_shown)
            yield DaemonClient(home)
        finally:
            # A second Ctrl-C would leave an engine running.
            with _uninterrupted():
                if try_lock(calls.fileno()) and (before := _ran_before(home)) is not None:
                    stop_everything(home, spared=before)


@contextmanager
def in_turn(
    path: Path, others: str = "starts or stops the deployment", *, is_shown: bool = True
) -> Iterator[None]:
    """One thread of one process at a time, by a lock on a file; what `others` do is shown."""
    with _lock_file(path) as file:
        _wait_for(file, fcntl.LOCK_EX, others, is_shown=is_shown)
        yield


def _start(home: Home, flags: Sequence[str], *, is_shown: bool) -> None:
    """Start what does not run, and note that it is there for calls alone."""
    if DaemonClient(home).is_running():
        return
    before, of_calls = find_running(home), _ran_before(home)
    if of_calls is not None:
        before &= of_calls  # The others an earlier call began, and was killed.
    try:
        start_in_background(home, flags, is_shown=is_shown)
    except BaseException as failure:
        # A daemon that was faster serves as well.
        if isinstance(failure, BatchrunError) and DaemonClient(home).is_running():
            return
        _undo(home, before)
        raise
    try:
        record = process.read_record(home.daemon_process)
        _note(home).write_text("\n".join(["" if record is None else record.nonce, *before]))
    except BaseException:
        _undo(home, before)
        raise


def _undo(home: Home, before: set[str]) -> None:
    """End what was begun, unless a daemon that this is not has it."""
    own, holder = find_daemon(home)
    is_own = own is not None and own.pid == holder and own.nonce not in before
    if holder is None or is_own:
        with _uninterrupted():
            stop_everything(home, spared=before)


def _ran_before(home: Home) -> set[str] | None:
    """What ran before a daemon was started for calls; None where what runs was started by
    `batchrun up`."""
    record, holder = find_daemon(home)
    with suppress(FileNotFoundError):
        nonce, *before = _note(home).read_text().split("\n")
        if record is not None and nonce == record.nonce and holder in {None, record.pid}:
            return set(before)
    return None


def _note(home: Home) -> Path:
    return home.run / "started-for-calls"


def _lock_file(path: Path) -> IO[bytes]:
    file = path.open("ab")
    _lock_files.add(file)
    return file


def _wait_for(file: IO[bytes], kind: int, others: str, *, is_shown: bool) -> None:
    with ProgressBar(is_shown=is_shown) as progress:
        while not try_lock(file.fileno(), kind):
            progress(f"another call {others}", 0, 0)
            time.sleep(POLL_INTERVAL_S)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
