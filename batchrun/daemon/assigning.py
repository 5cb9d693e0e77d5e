"""Which row goes to which engine next: turns between jobs, planned order within one, room."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.meeting import bring_together
from batchrun.daemon.slots import Assignment, Place, Slot, choose_slot
from batchrun.daemon.trial_engine import ASK_AGAIN_S, TrialEngine
from batchrun.pool import JobTurns, Turn
from batchrun.types import Outcome

ROWS_PER_READ = 16


@dataclass(slots=True)
class Assigner:
    """Takes rows from the queues of the running `jobs` for engines that have room.

    Each row that `assign` returns is settled or given back once, whatever became of its job.
    """

    slots: Sequence[Slot]
    jobs: dict[str, ActiveJob] = field(default_factory=dict)
    turns: JobTurns = field(default_factory=JobTurns)
    trial_engine: TrialEngine = field(init=False)
    _is_saturated: bool = False

    def __post_init__(self) -> None:
        self.trial_engine = TrialEngine(self.slots)

    def join(self, job: ActiveJob, *, due_at: float | None) -> None:
        """A job takes its turns from now on; `due_at` is its deadline (monotonic)."""
        job_id = job.record.id
        self.jobs[job_id] = job
        self.turns.join(job_id, job.spec.weight, job.costs.left_tokens, due_at=due_at)

    def leave(self, job: ActiveJob) -> None:
        """No row of the job goes any more. Does nothing when it has left already."""
        if self.jobs.get(job.record.id) is job:
            del self.jobs[job.record.id]
            self.turns.leave(job.record.id)

    def assign(self, now_s: float) -> tuple[list[Assignment], float | None]:
        """Rows to send now, and when to ask again at the latest, where a window says so.

        `now_s` is monotonic.
        """
        assignments: list[Assignment] = []
        opens_at_s = None
        has_suspects = any(job.trials.limits for job in self.jobs.values())
        is_apart = self.trial_engine.set_apart(now_s, has_suspects=has_suspects)
        while len(assignments) < ROWS_PER_READ and opens_at_s is None:
            turn = self._turn(now_s)
            if turn is None:
                self._is_saturated = False
                break
            job = self.jobs[turn.job_id]
            if is_apart and self._try_suspect(job, turn, now_s, assignments):
                continue
            slot, opens_at_s = self._place(job, turn, now_s)
            if slot is None:
                break
            if opens_at_s is None:
                assignments.append(self._take(job, turn, slot, now_s))
        self.turns.observe(now_s, is_saturated=self._is_saturated)
        return assignments, opens_at_s

    def idle(self, now_s: float) -> None:
        """Nothing may go at present; that says nothing of what the engines could do."""
        self._is_saturated = False
        self.turns.observe(now_s, is_saturated=False)

    def settle(self, job: ActiveJob, outcome: Outcome) -> None:
        """The row has ended."""
        usage = outcome.usage
        computed = usage.num_prompt_tokens - usage.num_cached_tokens + usage.num_output_tokens
        if self._takes_part(job):
            self.turns.settle(job.record.id, outcome.row, computed)

    def give_back(self, job: ActiveJob, row: int, *, ready_at_s: float = 0.0) -> None:
        """The row has not ended: it is pending again, and free."""
        job.queue.give_back(row, ready_at_s=ready_at_s)
        if self._takes_part(job):
            self.turns.refund(job.record.id, row)

    def _takes_part(self, job: ActiveJob) -> bool:
        return self.jobs.get(job.record.id) is job

    def _turn(self, now_s: float) -> Turn | None:
        ready = {job_id for job_id, job in self.jobs.items() if job.is_ready(now_s)}
        return self.turns.choose(ready, now_s)

    def _try_suspect(
        self, job: ActiveJob, turn: Turn, now_s: float, assignments: list[Assignment]
    ) -> bool:
        """Send the job's next row to the engine that is set apart, or put it aside for a moment;
        False when it is no suspect."""
        row = job.queue.peek(now_s)
        assert row is not None
        limit = job.trials.limits.get(row)
        if limit is None:
            return False
        place = Place(int(job.group_of[row]), job.plan.estimate_tokens(row), limit)
        slot = self.trial_engine.find_room(place, now_s)
        if slot is None:
            job.queue.take(row)
            job.queue.give_back(row, ready_at_s=now_s + ASK_AGAIN_S)
        else:
            assignments.append(self._take(job, turn, slot, now_s))
        return True

    def _place(self, job: ActiveJob, turn: Turn, now_s: float) -> tuple[Slot | None, float | None]:
        """The engine for the job's next row, and when its window opens if it is shut now."""
        row = job.queue.peek(now_s)
        assert row is not None
        tokens = job.plan.estimate_tokens(row)
        limit = job.trials.limits.get(row)
        place = Place(int(job.group_of[row]), tokens, limit, turn.is_urgent)
        slot = choose_slot(self.slots, place, now_s)
        if slot is None:
            self._is_saturated = limit is None and any(slot.is_usable for slot in self.slots)
            return None, None
        opens_at_s = slot.window.opens_at_s(tokens, now_s)
        return slot, opens_at_s if opens_at_s > now_s else None

    def _take(self, job: ActiveJob, turn: Turn, slot: Slot, now_s: float) -> Assignment:
        row = job.queue.peek(now_s)
        assert row is not None
        job.queue.take(row)
        bring_together(job, row, self.jobs.values())
        following = job.queue.peek(now_s)
        ends_group = following is None or job.group_of[following] != job.group_of[row]
        self.turns.charge(turn, row, job.costs.tokens_of(row), ends_subtree=ends_group)
        tokens = job.plan.estimate_tokens(row)
        assignment = Assignment(job, row, slot, tokens, is_urgent=turn.is_urgent)
        slot.take(assignment, now_s)
        return assignment


def seconds_left(expires_at: float | None) -> float:
    """Until a deadline in Unix time; infinite without one."""
    return math.inf if expires_at is None else max(expires_at - time.time(), 0.0)
