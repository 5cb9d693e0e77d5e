"""The other end of the failpoints: processes ask, and this decides who goes on and who dies."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

INSIDE_COMMIT = ("store.results.between", "store.commit.before")
INSIDE_RENAME = ("output.rename.before", "output.rename.after")
AROUND = ("store.commit.after", "writer.commit.before", "writer.commit.after", "output.sync.before")
DURING_COMMIT = "store.commit"
"""Not a failpoint: some instant between `store.commit.before` and `store.commit.after`."""
MAX_COMMIT_S = 0.004


@dataclass(slots=True)
class Trap:
    """Kill process `pid` where it passes `place`; `died_at` (UTC epoch seconds) once it is sprung.

    `is_inside` says whether it died with a transaction open, or while a rename was not yet durable.
    """

    pid: int
    place: str
    died_at: float | None = None
    is_inside: bool = False
    sprung: threading.Event = field(default_factory=threading.Event)


class FailpointServer:
    """Answers every failpoint of the processes whose `BATCHRUN_FAILPOINTS` is `spec`."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.num_passes: Counter[str] = Counter()
        self._rng = rng
        self._trap: Trap | None = None
        self._left: set[int] = set()
        path = folder / "failpoints"
        self.spec = f"*=ask:{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def set_trap(self, pid: int, place: str) -> Trap:
        """From now on this process dies at `place` (a failpoint, or `DURING_COMMIT`)."""
        self._left.clear()
        self._trap = Trap(pid, place)
        return self._trap

    def clear(self) -> None:
        """No trap any more."""
        self._trap = None

    def close(self) -> None:
        """Answer no more; whoever asks goes on."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection:
            name, pid = connection.recv(256).decode().split()
            self.num_passes[name] += 1
            if name == "store.commit.after":
                self._left.add(int(pid))
            trap = self._trap
            if trap is None or trap.pid != int(pid) or trap.sprung.is_set():
                connection.sendall(b"go\n")
            elif trap.place == name:
                self._spring(trap, is_inside=name in {*INSIDE_COMMIT, *INSIDE_RENAME})
            elif trap.place == DURING_COMMIT and name == "store.commit.before":
                self._left.clear()
                connection.sendall(b"go\n")
                time.sleep(self._rng.uniform(0, MAX_COMMIT_S))
                self._spring(trap, is_inside=True)
            else:
                connection.sendall(b"go\n")

    def _spring(self, trap: Trap, *, is_inside: bool) -> None:
        self._trap = None
        trap.died_at = time.time()
        os.kill(trap.pid, signal.SIGKILL)
        if trap.place == DURING_COMMIT:
            time.sleep(0.05)
            is_inside = trap.pid not in self._left
        trap.is_inside = is_inside
        trap.sprung.set()
