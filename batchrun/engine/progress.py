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
from dataclasses import dataclass, replace

from batchrun.wire import Telemetry

SILENT_S = 30.0
"""An engine with work that says nothing for so long hangs, and one whose steps are short and come
no more."""
UNKNOWN_STEP_S = 300.0
"""One that is heard, of whose steps nothing is known, has so long for one: a large model on a CPU
may need a minute."""
NUM_STEPS = 20
"""A step that takes so many times as long as others did never ends."""
NUM_LONGEST = 4
"""Nor one that takes so many times as long as the longest did, or as one of the whole budget would
by the largest, of which half at least grows with its tokens; these count for `UNKNOWN_STEP_S` at
most, as one of them may have been stuck."""
STALE_S = 5.0
"""What a scheduler told counts for so long: it repeats that every second."""
DOUBTFUL_S = 5.0
"""Calls go elsewhere first after so long, where there is another engine."""
MAX_GAP_S = 3.0
"""What lies between two looks counts for no more: whoever looks may have been stopped himself."""


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine shows at one moment.

    `mark` is another one after any progress, and `has_work` whether any is due (None: not told);
    without progress for `bound_s` the engine hangs. `is_told_late`: a core tells of work once it
    has looked at it. `pause` is as in `Telemetry`, and 2 while the engine sleeps: none is due then.
    """

    mark: Hashable
    has_work: bool | None
    bound_s: float = SILENT_S
    is_told_late: bool = False
    pause: int = 0


class Progress:
    """How long an engine has had work and not got on with it. Instants are monotonic.

    Give it a `Look` every second or so.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self.num_hangs = 0
        self.is_held = False
        """It begins nothing new until somebody ends its pause or sleep."""
        self._bound_s = SILENT_S
        self._moved_s = -math.inf
        self._last: tuple[float, Hashable] | None = None

    @property
    def is_doubtful(self) -> bool:
        """Whether others should be asked first."""
        return self.is_held or self.stalled_s >= DOUBTFUL_S

    @property
    def is_hung(self) -> bool:
        """Whether nothing more is to be hoped for."""
        return self.stalled_s >= self._bound_s

    def see(self, look: Look, now_s: float, newest_s: float = -math.inf) -> None:
        """Take note of what the engine shows now; `newest_s` is when it got the newest row that it
        has. What came after it moved last is work of which it may not have told."""
        last, self._last, self.is_held = self._last, (now_s, look.mark), look.pause > 0
        has_moved = last is not None and last[1] != look.mark
        if last is not None and has_moved:
            self._moved_s = last[0]
        has_work = look.has_work or (look.is_told_late and newest_s > self._moved_s)
        if last is None or has_moved or not has_work or look.pause > 1:
            self.stalled_s = 0.0
            return
        was_hung = self.is_hung
        self._bound_s = look.bound_s
        self.stalled_s += min(now_s - last[0], MAX_GAP_S)
        self.num_hangs += self.is_hung and not was_hung

    def begin_again(self) -> None:
        """The engine is started anew; it owes nothing yet."""
        self.stalled_s, self._last, self.is_held = 0.0, None, False


def step_bound_s(told: Telemetry) -> float:
    """How long the next step may take, by those before."""
    step = told.step
    if not step.num_timed_steps:
        return UNKNOWN_STEP_S
    mean_s = step.measured_s / step.num_timed_steps
    fixed_s = min(mean_s, step.largest_s / 2)
    grown = told.token_budget / max(step.largest_tokens, 1)
    full_s = fixed_s + (step.largest_s - fixed_s) * grown
    longest_s = min(NUM_LONGEST * max(step.longest_s, full_s), UNKNOWN_STEP_S)
    return max(SILENT_S, NUM_STEPS * mean_s, longest_s)


def num_due(told: Telemetry, *, has_rows: bool) -> int:
    """How many requests are to get steps; offline ones only where there are rows that may run."""
    classes = (told.online, told.offline) if has_rows else (told.online,)
    num_running = sum(each.num_running for each in classes)
    num_waiting = sum(each.num_waiting for each in classes)
    return (num_running + num_waiting, num_running, 0)[told.pause]


def without_held(look: Look, heard: tuple[float, Telemetry] | None, now_s: float) -> Look:
    """What a page shows, less the work that the scheduler holds back, as it told last, and when."""
    if heard is None or now_s - heard[0] > STALE_S:
        return look
    told = heard[1]
    if told.is_offline_on and not told.pause:
        return look
    has_work = look.has_work and num_due(told, has_rows=told.is_offline_on) > 0
    return replace(look, has_work=has_work, is_told_late=look.is_told_late and not told.pause)


PREFIX = "vllm:"
STARTED = "process_start_time_seconds "
SLEEP = "vllm:engine_sleep_state{"
QUEUES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def look_at_page(page: str) -> Look:
    """What a page of metrics of a vLLM server shows: any counter or gauge of its core that moves
    is progress. A page without the length of its queues does not tell of work."""
    lines = [line for line in page.splitlines() if line.startswith(PREFIX)]
    lengths = list(_values(lines))
    mark = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
    states = [line for line in lines if line.startswith(SLEEP) and '"awake"' in line]
    pause = 2 if any(line.endswith(" 0.0") for line in states) else 0
    has_work = any(length > 0 for length in lengths) if lengths else None
    return Look(mark, has_work, UNKNOWN_STEP_S, is_told_late=bool(lengths), pause=pause)


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
