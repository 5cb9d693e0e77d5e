"""Has jobs with `start: cheap` wait for the hours in which calls leave the most room, as far as
their deadlines let them.

What calls bring is counted in tokens that engines compute for them, by the minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from datetime import datetime

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.dispatch import may_serve
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.writer import Stage
from batchrun.estimator.tide import DAY, KEPT, MINUTE_S, course_of_day, minutes_to_cheap_time
from batchrun.server.web.calls_of_all import (
    SAVE_MINUTES,
    CallsOfAll,
    keep_minutes,
    read_minutes,
    this_minute,
)

log = logging.getLogger(__name__)

MINUTES = "calls"
"""Whose the minutes are that it keeps."""
INTO_MINUTE_S = 0.5
"""A timer may wake a little early: a look at that moment is one in the minute before."""
LAST_S = 900.0
"""A job that runs and would end within this does not wait once more."""
SPARE = 0.5
"""Calls may take as much of the engines' time as this leaves."""


class CheapStarts:
    """Says of each job of a daemon whether its rows wait in this minute."""

    def __init__(self, daemon: Daemon, calls: CallsOfAll) -> None:
        """Takes up the minutes that an earlier leader kept. Blocking. Raises StoreError."""
        self._daemon, self._calls = daemon, calls
        self._minute = this_minute()
        known, num_missed = read_minutes(daemon.store, MINUTES, self._minute)
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
            await asyncio.sleep(MINUTE_S - time.time() % MINUTE_S + INTO_MINUTE_S)
            try:
                await self.look(this_minute(), time.monotonic())
            except Exception:
                log.exception("jobs wait or go as they did: the look at calls failed")
            if self._minute % SAVE_MINUTES == 0:
                await asyncio.to_thread(
                    keep_minutes, self._daemon.store, MINUTES, self.loads, self._minute
                )

    async def look(self, minute: int, now_s: float) -> None:
        """This minute has begun, at `now_s` (monotonic): note what calls brought since the last
        look, and have jobs wait or go on."""
        await self._note_load(max(minute - self._minute, 1), now_s)
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
        """None while nobody knows a whole day, how fast an engine is or how long answers are, and
        where no engine is to have the model; one while such an engine is not there yet. All work
        that is due no later has to be done besides. A job that runs and has hardly any rows left
        ends."""
        slots = [each for each in self._daemon.slots if each.is_usable and each.serves(job.model)]
        known = [slot.load.speed for slot in slots if slot.load.is_speed_known]
        if not known:
            may_come = may_serve(self._daemon.slots, job.model)
            return 0 if self._day is None or slots or not may_come else 1
        speed = sum(known) / len(known) * len(slots)
        runs = job.id not in self._daemon.dispatcher.waiting and job.queue.num_in_flight > 0
        if not job.knows_answers or (runs and job.left_work_s < LAST_S * speed):
            return 0
        left_s = job.left_s
        jobs = {each.id: each for each in [job, *self._daemon.active.values()]}.values()
        due = [each for each in jobs if each is job or each.left_s <= left_s]
        work_s = sum(each.left_work_s for each in due)
        return minutes_to_cheap_time(self._day, work_s / (SPARE * speed), left_s)

    async def _note_load(self, num_minutes: int, now_s: float) -> None:
        if not await self._calls.look(now_s):
            self._tokens = None
            self._fill(num_minutes)
            return
        before, self._tokens = (
            self._tokens,
            sum(
                each.num_prompt_tokens - each.num_cached_tokens + each.num_output_tokens
                for each in self._calls.totals.values()
            ),
        )
        if before is None or num_minutes > SAVE_MINUTES:
            self._fill(num_minutes)
            return
        load = (self._tokens - before) / num_minutes
        self._loads.extend([load] * min(num_minutes, KEPT))

    def _fill(self, num_minutes: int) -> None:
        """Minutes that nobody saw were as those of the day before; without one, what was seen
        before them tells nothing of a whole day."""
        if num_minutes > SAVE_MINUTES and len(self._loads) < DAY:
            self._loads.clear()
            return
        for _ in range(min(num_minutes, KEPT)):
            place = -DAY if len(self._loads) >= DAY else -1
            self._loads.append(self._loads[place] if self._loads else 0.0)
