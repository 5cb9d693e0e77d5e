"""Has jobs with `start: cheap` wait for the hours in which calls leave the most room, as far as
their deadlines let them.

What calls bring is counted in tokens that engines compute for them, by the minute, and kept in a
file, so that a daemon that starts knows the days before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from datetime import datetime
from pathlib import Path

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.writer import Stage
from batchrun.estimator.tide import KEPT, MINUTE_S, minutes_to_cheap_time
from batchrun.server.api.replica_follower import (
    SAVE_MINUTES,
    keep_minutes,
    read_minutes,
    this_minute,
)
from batchrun.server.web.gateway_figures import GatewayFigures

log = logging.getLogger(__name__)

SPARE = 0.5
"""Calls may take as much of the engines' time as this leaves."""


class CheapStarts:
    """Says of each job of a daemon whether its rows may go in this minute."""

    def __init__(self, daemon: Daemon, figures: GatewayFigures, file: Path) -> None:
        """Takes up the minutes in `file`. Blocking."""
        self._daemon, self._figures, self._file = daemon, figures, file
        self._minute = this_minute()
        self._loads = deque(read_minutes(file, self._minute), maxlen=KEPT)
        self._tokens: int | None = None
        self._waiting: set[str] = set()
        daemon.may_start = self.may_start

    @property
    def loads(self) -> list[float]:
        """Tokens that calls brought in each minute that is known, the oldest first."""
        return [*self._loads]

    async def run(self) -> None:
        """Look each minute, until cancelled."""
        while True:
            await asyncio.sleep(MINUTE_S - time.time() % MINUTE_S)
            self.look(this_minute())
            if self._minute % SAVE_MINUTES == 0:
                await asyncio.to_thread(keep_minutes, self._file, self.loads, self._minute)

    def look(self, minute: int) -> None:
        """This minute has begun: note what calls brought since the last look, and have jobs wait or
        go on."""
        self._note_load(max(minute - self._minute, 1))
        self._minute = minute
        jobs, going = list(self._daemon.active.values()), self._daemon.dispatcher.jobs
        self._waiting.intersection_update(job.id for job in jobs)
        for job in jobs:
            if job.id in going and not self.may_start(job):
                self._daemon.dispatcher.hold(job)
            elif job.id in self._waiting and self.may_start(job):
                log.info("%s: goes on, calls leave room now", job.id)
                self._daemon.dispatcher.add(job)

    def may_start(self, job: ActiveJob) -> bool:
        """Whether the job's rows may go now; else it waits, and `status` says until when."""
        if job.spec.start == "now":
            return True
        slots = [each for each in self._daemon.slots if not each.is_off and each.serves(job.model)]
        speed = sum(slot.load.speed for slot in slots) or 1.0
        work_s = job.queue.left_work_s / (SPARE * speed)
        minutes = minutes_to_cheap_time(self.loads, work_s, job.left_s)
        if not minutes:
            if job.id in self._waiting:
                self._waiting.remove(job.id)
                self._daemon.stages.pop(job.id, None)
            return True
        at = datetime.fromtimestamp(time.time() + minutes * MINUTE_S).astimezone()
        if job.id not in self._waiting:
            log.info("%s: waits until about %s, when calls leave more room", job.id, f"{at:%H:%M}")
        self._waiting.add(job.id)
        self._daemon.stages[job.id] = Stage(f"waits for cheap hours, about {at:%H:%M}")
        return False

    def _note_load(self, num_minutes: int) -> None:
        """Minutes of which the gateway told nothing were as the one before them."""
        totals = self._figures.totals()
        load = self._loads[-1] if self._loads else 0.0
        if totals is not None:
            before, self._tokens = (
                self._tokens,
                sum(
                    each.num_prompt_tokens - each.num_cached_tokens + each.num_output_tokens
                    for each in totals.values()
                ),
            )
            if before is not None:
                # A count that went back is that of another gateway.
                since = self._tokens - before if self._tokens >= before else self._tokens
                load = since / num_minutes
        self._loads.extend([load] * num_minutes)
