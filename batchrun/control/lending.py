"""A deployment for as long as somebody needs it: calls at once share it, the last one stops it.

Calls are those of Python and `batchrun run`, in any number of threads and processes. Each holds a
shared `flock` while it needs the deployment, so that one which was killed counts no more.
"""

from __future__ import annotations

import fcntl
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from batchrun.control.client import DaemonClient
from batchrun.control.following import ProgressBar
from batchrun.control.starting import POLL_INTERVAL_S, start_in_background, stop_everything
from batchrun.engine import process
from batchrun.files import try_lock
from batchrun.home import Home


@contextmanager
def deployment_up(
    home: Home, flags: Sequence[str] = (), *, is_shown: bool = True
) -> Iterator[DaemonClient]:
    """The deployment of a home: the one that runs, or one that is started for calls and, when the
    last of them leaves, stopped.

    Raises what made the daemon give up, as one line.
    """
    home.create()
    with (home.run / "calls.lock").open("ab") as calls:
        _wait_for(calls, fcntl.LOCK_SH, is_shown=is_shown)
        try:
            with in_turn(home.run / "start.lock", is_shown=is_shown):
                _start(home, flags, is_shown=is_shown)
            yield DaemonClient(home)
        finally:
            # A second Ctrl-C would leave an engine running.
            with _uninterrupted():
                if try_lock(calls.fileno()) and _is_for_calls(home):
                    stop_everything(home)


@contextmanager
def in_turn(path: Path, *, is_shown: bool = True) -> Iterator[None]:
    """One thread of one process at a time, by a lock on a file."""
    with path.open("ab") as file:
        _wait_for(file, fcntl.LOCK_EX, is_shown=is_shown)
        yield


def _start(home: Home, flags: Sequence[str], *, is_shown: bool) -> None:
    """Start what does not run, and note that it is there for calls alone."""
    if DaemonClient(home).is_running():
        return
    try:
        start_in_background(home, flags, is_shown=is_shown)
        record = process.read_record(home.daemon_process)
        _note(home).write_text("" if record is None else record.nonce)
    except BaseException:
        with _uninterrupted():
            stop_everything(home)
        raise


def _is_for_calls(home: Home) -> bool:
    """Whether what runs was started for calls, and not by `batchrun up`."""
    record = process.read_record(home.daemon_process)
    with suppress(FileNotFoundError):
        return record is not None and _note(home).read_text() == record.nonce
    return False


def _note(home: Home) -> Path:
    return home.run / "started-for-calls"


def _wait_for(file: IO[bytes], kind: int, *, is_shown: bool) -> None:
    with ProgressBar(is_shown=is_shown) as progress:
        while not try_lock(file.fileno(), kind):
            progress("another call starts or stops the deployment", 0, 0)
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
