"""Whether the daemon gets on: a thread looks at its loop, and everybody at its writer.

A loop that stands still answers nobody, so the thread alone can say so: in the journal, with the
place where it stands, and in the end by ending the process. Whoever started it starts it anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from batchrun.errors import BatchrunError

log = logging.getLogger(__name__)

SHOWN_S = 10.0
"""A loop or a writer without progress for so long is shown."""
ENDED_S = 60.0
"""A loop that stands for so long ends the process."""
LOOK_S = 0.5


class LoopWatch:
    """Watches the event loop that `beat` runs on, once `start` was called there.

    `on_end` is called in the thread, with one line, when the loop has stood for `ended_s`. Time in
    which the whole process was stopped, or had no core, counts for little. `writer_waits_s` tells
    at an instant (monotonic) for how long results have been waiting to be committed.
    """

    def __init__(
        self, *, shown_s: float = SHOWN_S, ended_s: float = ENDED_S, look_s: float = LOOK_S
    ) -> None:
        self.on_end: Callable[[str], None] = end_process
        self.writer_waits_s: Callable[[float], float] = lambda now_s: 0.0
        self.num_stalls = 0
        self.longest_s = 0.0
        self.last_at: float | None = None
        self._shown_s = shown_s
        self._ended_s = ended_s
        self._look_s = look_s
        self._stopped = threading.Event()
        self._num_beats = 0
        self._thread_id = 0

    def start(self) -> None:
        """Watch the thread that calls this, from now on."""
        self._thread_id = threading.get_ident()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no more: the loop ends."""
        self._stopped.set()

    async def beat(self) -> None:
        """Show that the loop turns, until cancelled."""
        while True:
            self._num_beats += 1
            await asyncio.sleep(self._look_s / 2)

    def _watch(self) -> None:
        num_seen, stood_s, does_writer_wait = -1, 0.0, False
        looked_s, cpu_s = time.monotonic(), time.process_time()
        while not self._stopped.wait(self._look_s):
            now_s, now_cpu_s = time.monotonic(), time.process_time()
            # What this thread missed counts where the process was at work meanwhile.
            missed_s = now_s - looked_s
            gap_s = min(missed_s, max(2 * self._look_s, now_cpu_s - cpu_s))
            if missed_s - gap_s >= self._shown_s:
                self._count(missed_s)
                log.error("the daemon's process was stopped, or had no core, for %.0f s", missed_s)
            looked_s, cpu_s = now_s, now_cpu_s
            does_writer_wait = self._see_writer(now_s, was_waiting=does_writer_wait)
            if self._num_beats != num_seen:
                self._note(stood_s)
                num_seen, stood_s = self._num_beats, 0.0
                continue
            was_shown = stood_s >= self._shown_s
            stood_s += gap_s
            if stood_s >= self._shown_s and not was_shown:
                log.error("the daemon's loop has stood for %.0f s in %s", stood_s, self._place())
            if stood_s >= self._ended_s:
                self.on_end(f"the daemon's loop stood for {stood_s:.0f} s in {self._place()}")
                return

    def _see_writer(self, now_s: float, *, was_waiting: bool) -> bool:
        waits_s = self.writer_waits_s(now_s)
        if waits_s >= self._shown_s and not was_waiting:
            log.error("results have waited for %.0f s to be committed", waits_s)
        return waits_s >= self._shown_s

    def _note(self, stood_s: float) -> None:
        """The loop turns."""
        self.longest_s = max(self.longest_s, stood_s)
        if stood_s >= self._shown_s:
            self._count(stood_s)
            log.error("the daemon's loop turns again after %.0f s", stood_s)

    def _count(self, stood_s: float) -> None:
        self.num_stalls += 1
        self.longest_s = max(self.longest_s, stood_s)
        self.last_at = time.time()

    def _place(self) -> str:
        """Where the loop is, innermost first, in one line."""
        frames: dict[int, FrameType] = sys._current_frames()  # noqa: SLF001 - documented
        frame = frames.get(self._thread_id)
        calls = traceback.extract_stack(frame)[-3:] if frame is not None else []
        places = [f"{Path(each.filename).name}:{each.lineno}" for each in reversed(calls)]
        return " < ".join(places) or "an unknown place"


def end_process(line: str) -> None:
    """End at once, with this last line and an exit code that is not 0."""
    sys.stderr.write(f"batchrun: {line}; it ends, start it anew\n")
    sys.stderr.flush()
    os._exit(BatchrunError.exit_code)
