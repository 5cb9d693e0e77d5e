"""Online calls of a running deployment, asked for again and again until the recording ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from batchrun.cli.daemon_client import DaemonClient
from batchrun.errors import DaemonUnavailableError, StateError
from batchrun.traces import Trace
from batchrun.wire import MAX_CALLS_SENT, RecordedCall, Recording

POLL_S = 1.0
DRAIN_S = 60.0
"""After the time is up, calls that still run are waited for so long."""


class _Told(msgspec.Struct):
    """The daemon's answer: what each engine recorded, and which engines cannot."""

    engines: dict[str, Recording | None]
    unrecorded: list[str]


@dataclass(slots=True)
class CallRecording:
    """What has come of one recording so far. Instants are UTC epoch seconds.

    `begin` starts it, `poll` fetches what is new, `trace` makes a trace of it.
    """

    client: DaemonClient
    started_at: float = 0.0
    num_lost: int = 0
    """Calls that an engine had to forget before they were fetched."""
    silent: set[str] = field(default_factory=set)
    """Engines that have not told any recording yet."""
    unrecorded: list[str] = field(default_factory=list)
    trouble: DaemonUnavailableError | None = None
    """Why the recording ended before its time."""
    _calls: list[RecordedCall] = field(default_factory=list)
    _places: dict[str, tuple[str, int]] = field(default_factory=dict)
    _oldest_open_at: dict[str, float | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Make the engines record. Raises DaemonUnavailableError, and StateError if none can."""
        told = self._ask()
        self.unrecorded, self.silent = told.unrecorded, set(told.engines)
        self.started_at = time.time()
        self.take(told.engines)

    def poll(self) -> None:
        """Fetch what has ended since. Raises DaemonUnavailableError."""
        while self.take(self._ask().engines):
            pass

    @property
    def wanted(self) -> dict[str, int]:
        """The number of the next call of each engine that has told any."""
        return {name: number for name, (_, number) in self._places.items()}

    def is_waiting_for(self, ended_at: float) -> bool:
        """Whether a call that arrived before `ended_at` still runs."""
        return any(at is not None and at < ended_at for at in self._oldest_open_at.values())

    def run(self, seconds: float | None, report: Callable[[int], None]) -> float:
        """Record for so long, or until interrupted; returns when it ended.

        Calls that run at the end are waited for, up to `DRAIN_S`; an interrupt ends that as well.
        A daemon that goes away ends it too, and is the `trouble`. `report` is told the number of
        calls.
        """
        ended_at = float("inf") if seconds is None else self.started_at + seconds
        try:
            self._watch(ended_at, report)
        except KeyboardInterrupt:
            ended_at = min(ended_at, time.time())
            with suppress(DaemonUnavailableError):
                self.poll()
        except DaemonUnavailableError as error:
            ended_at = min(ended_at, time.time())
            self.trouble = error
        return ended_at

    def _watch(self, ended_at: float, report: Callable[[int], None]) -> None:
        while (left_s := ended_at - time.time()) > 0:
            time.sleep(min(POLL_S, left_s))
            self.poll()
            report(len(self._calls))
        while self.is_waiting_for(ended_at) and time.time() < ended_at + DRAIN_S:
            time.sleep(POLL_S)
            self.poll()

    def trace(self, ended_at: float) -> tuple[Trace, int]:
        """The calls that arrived from the start to `ended_at`, and how many of them got no token
        and are left out. Raises StateError without a call."""
        arrived = [call for call in self._calls if self.started_at <= call.arrived_at < ended_at]
        calls = [call for call in arrived if call.num_output_tokens and call.num_prompt_tokens]
        if not calls:
            duration_s = ended_at - self.started_at
            raise StateError(
                f"no online call arrived and ended within {duration_s:.0f} s; nothing was written"
            )
        calls.sort(key=lambda call: call.arrived_at)
        began = datetime.fromtimestamp(self.started_at, UTC)
        trace = Trace.of(
            [call.arrived_at for call in calls],
            [call.num_prompt_tokens for call in calls],
            [call.num_output_tokens for call in calls],
            source=f"recorded {began:%Y-%m-%d %H:%M:%S} UTC",
        )
        begins_s = calls[0].arrived_at - self.started_at
        moved = trace.shifted(begins_s, ended_at - self.started_at)
        return moved, len(arrived) - len(calls)

    def _ask(self) -> _Told:
        return msgspec.convert(self.client.post("/calls", {"numbers": self.wanted}), _Told)

    def take(self, told: Mapping[str, Recording | None]) -> bool:
        """Keep what is new of each engine's answer; whether one has more to tell at once."""
        has_more = False
        for name, recording in told.items():
            if recording is None:
                continue
            self.silent.discard(name)
            self._oldest_open_at[name] = recording.oldest_open_at
            known = self._places.get(name)
            if known is not None and known[0] != recording.id:
                # Another start of the engine: its numbers begin at 0, what it ran is gone.
                self._places[name] = recording.id, 0
                has_more = True
                continue
            self.num_lost += recording.first_number - (known[1] if known else 0)
            self._calls += recording.calls
            after = recording.first_number + len(recording.calls)
            self._places[name] = recording.id, after
            has_more = has_more or len(recording.calls) == MAX_CALLS_SENT
        return has_more
