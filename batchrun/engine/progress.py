"""Whether an engine that has work gets on with it: what it shows from time to time, and for how
long nothing of that has changed.

An HTTP server may answer for an engine whose core hangs, so its health proves nothing. What proves
life is a sign that only a working core changes: when its scheduler looked at the work last, or the
counters of vLLM.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

SILENT_S = 30.0
"""An engine with work that says nothing for so long hangs, and one whose steps are short and come
no more."""
UNKNOWN_STEP_S = 300.0
"""One that is heard, of whose steps nothing is known, has so long for one: a large model on a CPU
may need a minute."""
NUM_STEPS = 20
"""A step that takes so many times as long as others did never ends."""
DOUBTFUL_S = 5.0
"""Calls go elsewhere first after so long, where there is another engine."""
MAX_GAP_S = 3.0
"""What lies between two looks counts for no more: whoever looks may have been stopped himself."""


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine shows at one moment.

    `mark` is another one after any progress, and `has_work` whether any is due; without progress
    for `bound_s` the engine hangs. `is_told_late`: a core tells of work once it has looked at it.
    """

    mark: Hashable
    has_work: bool
    bound_s: float = SILENT_S
    is_told_late: bool = False


class Progress:
    """How long an engine has had work and not got on with it. Instants are monotonic.

    Give it a `Look` every second or so.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self.num_hangs = 0
        self._bound_s = SILENT_S
        self._moved_s = -math.inf
        self._last: tuple[float, Hashable] | None = None

    @property
    def is_doubtful(self) -> bool:
        """Whether others should be asked first."""
        return self.stalled_s >= DOUBTFUL_S

    @property
    def is_hung(self) -> bool:
        """Whether nothing more is to be hoped for."""
        return self.stalled_s >= self._bound_s

    def see(self, look: Look, now_s: float, newest_s: float = -math.inf) -> None:
        """Take note of what the engine shows now; `newest_s` is when it got the newest row that it
        has. What came after it moved last is work of which it may not have told."""
        last, self._last = self._last, (now_s, look.mark)
        has_moved = last is not None and last[1] != look.mark
        if last is not None and has_moved:
            self._moved_s = last[0]
        has_work = look.has_work or (look.is_told_late and newest_s > self._moved_s)
        if last is None or has_moved or not has_work:
            self.stalled_s = 0.0
            return
        was_hung = self.is_hung
        self._bound_s = look.bound_s
        self.stalled_s += min(now_s - last[0], MAX_GAP_S)
        self.num_hangs += self.is_hung and not was_hung

    def begin_again(self) -> None:
        """The engine is started anew; it owes nothing yet."""
        self.stalled_s, self._last = 0.0, None


def step_bound_s(num_steps: int, total_s: float) -> float:
    """How long the next step may take, after so many that took `total_s`."""
    if not num_steps:
        return UNKNOWN_STEP_S
    return max(SILENT_S, NUM_STEPS * total_s / num_steps)


PREFIX = "vllm:"
STARTED = "process_start_time_seconds "
QUEUES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def look_at_page(page: str) -> Look:
    """What a page of metrics of a vLLM server shows: any counter or gauge of its core that moves
    is progress. A page without the length of its queues shows no work."""
    lines = [line for line in page.splitlines() if line.startswith(PREFIX)]
    lengths = list(_values(lines))
    mark = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
    has_work = any(length > 0 for length in lengths)
    return Look(mark, has_work, UNKNOWN_STEP_S, is_told_late=bool(lengths))


def start_of_page(page: str) -> str | None:
    """When the server's process was started, as its metrics tell it; None where they do not."""
    marked = (line for line in page.splitlines() if line.startswith(STARTED))
    return next((line.removeprefix(STARTED)[:64] for line in marked), None)


def _values(lines: list[str]) -> Iterator[float]:
    for line in lines:
        name, _, _ = line.partition("{")
        if name.partition(" ")[0] in QUEUES:
            try:
                yield float(line.rpartition(" ")[2])
            except ValueError:
                continue


SILENCE = Look(None, has_work=True, bound_s=SILENT_S)
"""An engine that has work and shows nothing."""
