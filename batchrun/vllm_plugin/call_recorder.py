"""Arrival and lengths of online calls, kept for the daemon while it asks for them; never text."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from itertools import islice

from batchrun.wire import MAX_CALLS_SENT, RecordedCall, Recording

MAX_KEPT = 16_384
"""Ended calls that wait to be fetched; the oldest give way."""
LEASE_S = 30.0
"""It ends when the daemon has not asked for so long: it may be dead."""


class CallRecorder:
    """The scheduler's thread reports calls, the channel's thread switches and collects.

    `is_on` is read before each report, so that nothing is paid for while it is off. Memory is
    bounded by `MAX_KEPT` calls and those that live.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._asked_at_s = 0.0
        self._lock = threading.Lock()
        self._begin()

    def switch(self, *, on: bool) -> None:
        """Begin to record, with an id of its own, or go on; or stop and forget all calls."""
        self._asked_at_s = time.monotonic()
        if on is not self.is_on:
            with self._lock:
                self._begin()
                self.is_on = on

    def arrived(self, request_id: str, arrived_at: float) -> None:
        """A call has come in; `arrived_at` in UTC epoch seconds."""
        if time.monotonic() - self._asked_at_s > LEASE_S:
            self.switch(on=False)
            return
        with self._lock:
            self._open[request_id] = arrived_at

    def ended(self, request_id: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A call has ended; one that came before the recording is not part of it."""
        with self._lock:
            arrived_at = self._open.pop(request_id, None)
            if arrived_at is None:
                return
            if len(self._ended) == MAX_KEPT:
                self._first_number += 1
            self._ended.append(RecordedCall(arrived_at, num_prompt_tokens, num_output_tokens))

    def collect(self, from_number: int) -> Recording:
        """The calls from this number on, as many as a message takes. They stay, so that an answer
        that is lost loses nothing."""
        with self._lock:
            first = max(from_number, self._first_number)
            start = first - self._first_number
            return Recording(
                self._id,
                first,
                tuple(islice(self._ended, start, start + MAX_CALLS_SENT)),
                oldest_open_at=next(iter(self._open.values()), None),
            )

    def _begin(self) -> None:
        self._id = secrets.token_hex(8)
        self._first_number = 0
        self._ended: deque[RecordedCall] = deque(maxlen=MAX_KEPT)
        self._open: dict[str, float] = {}
