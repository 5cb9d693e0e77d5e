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
from batchrun.estimator.tide import DAY, KEPT, MINUTE_S, course_of_day, minutes_to_cheap_time
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
    """Says of each job of a daemon whether its rows wait in this minute."""

    def __init__(self, daemon: Daemon, figures: GatewayFigures, file: Path) -> None:
        """Takes up the minutes in `file`. Blocking."""
        self._daemon, self._figures, self._file = daemon, figures, file
        self._minute = this_minute()
        known, num_missed = read_minutes(file, self._minute)
        self._loads = deque(known, maxlen=KEPT)
        self._fill(num_missed)
        self._day = course_of_day(self.loads)
        self._tokens: int | None = None
        daemon.before_start = self.review

    @property
    def loads(self) -> list[float]:
        """Tokens that calls brought in each minute that is known, the oldest first."""
        return [*self._loads]

    async def run(self) -> None:
        """Look each minute, until cancelled."""
        while True:
            await asyncio.sleep(MINUTE_S - time.time() % MINUTE_S)
            try:
                self.look(this_minute(), time.monotonic())
            except Exception:
                log.exception("jobs wait or go as they did: the look at calls failed")
            if self._minute % SAVE_MINUTES == 0:
                await asyncio.to_thread(keep_minutes, self._file, self.loads, self._minute)

    def look(self, minute: int, now_s: float) -> None:
        """This minute has begun, at `now_s` (monotonic): note what calls brought since the last
        look, and have jobs wait or go on."""
        self._note_load(max(minute - self._minute, 1), now_s)
        self._minute = minute
        self._day = course_of_day(self.loads)
        for job in list(self._daemon.active.values()):
            self.review(job)

    def review(self, job: ActiveJob) -> None:
        """Have the job's rows wait, which `status` says, or go."""
        waiting, stages = self._daemon.dispatcher.waiting, self._daemon.stages
        minutes = 0 if job.spec.start == "now" else self._minutes_to_wait(job)
        if not minutes:
            if job.id in waiting:
                log.info("%s: goes on, calls leave room now", job.id)
                waiting.remove(job.id)
                stages.pop(job.id, None)
                self._daemon.dispatcher.wake()
            return
        at = f"{datetime.fromtimestamp(time.time() + minutes * MINUTE_S).astimezone():%H:%M}"
        if job.id not in waiting:
            log.info("%s: waits until about %s, when calls leave more room", job.id, at)
        waiting.add(job.id)
        stages[job.id] = Stage(f"waits for cheap hours, about {at}")

    def _minutes_to_wait(self, job: ActiveJob) -> int:
        """None while nobody knows how fast an engine is; one while none is there. All work that is
        due no later has to be done besides."""
        slots = [each for each in self._daemon.slots if each.is_usable and each.serves(job.model)]
        if not slots or not all(slot.load.is_speed_known for slot in slots):
            return 0 if slots else 1
        left_s = job.left_s
        jobs = {each.id: each for each in [job, *self._daemon.active.values()]}.values()
        due = [each for each in jobs if each is job or each.left_s <= left_s]
        work_s = sum(each.queue.left_work_s for each in due)
        speed = sum(slot.load.speed for slot in slots)
        return minutes_to_cheap_time(self._day, work_s / (SPARE * speed), left_s)

    def _note_load(self, num_minutes: int, now_s: float) -> None:
        totals = self._figures.totals()
        if totals is None or self._figures.silent_s(now_s) >= MINUTE_S:
            self._fill(num_minutes)
            return
        before, self._tokens = (
            self._tokens,
            sum(
                each.num_prompt_tokens - each.num_cached_tokens + each.num_output_tokens
                for each in totals.values()
            ),
        )
        if before is None:
            self._fill(num_minutes)
            return
        # A count that went back is that of another gateway.
        since = self._tokens - before if self._tokens >= before else self._tokens
        self._loads.extend([since / num_minutes] * min(num_minutes, KEPT))

    def _fill(self, num_minutes: int) -> None:
        """Minutes that nobody saw were as those of the day before; without one, what was seen
        before them tells nothing of a whole day."""
        if num_minutes > SAVE_MINUTES and len(self._loads) < DAY:
            self._loads.clear()
            return
        for _ in range(min(num_minutes, KEPT)):
            place = -DAY if len(self._loads) >= DAY else -1
            self._loads.append(self._loads[place] if self._loads else 0.0)
