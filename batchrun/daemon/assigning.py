"""Which row goes to which engine next: turns between jobs, planned order within one, room.

What the daemon tells the scheduler inside an engine about a row (design section 2).

Jobs that share prefixes meet: their rows run while a prefix that one of them began is hot.

Where there are several engines, suspects run on one that is set apart for them: neither online
calls nor other rows suffer when it dies again (design section 4).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from batchrun.daemon.job import ActiveJob, expected_output_tokens
from batchrun.daemon.slots import Assignment, Place, Slot, choose_slot
from batchrun.hints import RowHint, nodes_to_tell, put_hint
from batchrun.pool.fair_share import JobTurns, Turn
from batchrun.pool.radix_tree import rows_with_prefix
from batchrun.pool.row_queue import RowQueue
from batchrun.routing.router import Router
from batchrun.routing.routers import make_router
from batchrun.types import EngineState, Outcome

URGENT_LEAD = 1 << 20
"""An urgent row's rank lies so far ahead: before every row that waits in an engine."""
HINTED_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Hinter:
    """Writes hints. Ranks count all rows sent by this daemon, so they compare over jobs."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_rank = URGENT_LEAD

    def add_hint(
        self,
        body: dict[str, object],
        job: ActiveJob,
        row: int,
        nonce: str,
        *,
        is_urgent: bool = False,
    ) -> None:
        """Put the row's hint into its body, where the endpoint has a place for it."""
        if job.spec.endpoint not in HINTED_ENDPOINTS:
            return
        rank = self._next_rank - (URGENT_LEAD if is_urgent else 0)
        self._next_rank += 1
        hint = RowHint(
            epoch=self._epoch,
            job=job.record.id,
            row=row,
            rank=rank,
            nodes=nodes_to_tell(job.queue.path_of(row), job.queue.num_to_come, rank),
            output_tokens=expected_output_tokens(job.spec, job.counts),
        )
        put_hint(body, hint, nonce)


MAX_ROWS = 4_096
"""A prefix that more rows of a job begin with is no reason to change its order."""
MAX_LEVELS = 2
LEAST_CHUNKS = 2
"""Rows that share less than that beyond a prefix that they have anyway gain nothing by meeting."""


def bring_together(job: ActiveJob, row: int, others: Iterable[ActiveJob]) -> None:
    """`row` goes to an engine. Where it begins a prefix group of its job, rows of the other jobs
    with the same prefix are the next of theirs."""
    path = _worthy(job.queue, row)
    if not path or path[-1] == job.current_node:
        return
    job.current_node = path[-1]
    plan = job.plan
    prefixes = [plan.chains.prefix(row, job.queue.depth_of(node)) for node in path[-MAX_LEVELS:]]
    for other in others:
        if other is job or other.plan.salt != plan.salt:
            continue
        for prefix in reversed(prefixes):
            by_chain = other.plan.order.by_chain
            rows = rows_with_prefix(other.plan.chains, by_chain, prefix, most=MAX_ROWS + 1)
            if len(rows):
                if len(rows) <= MAX_ROWS:
                    other.queue.prefer(rows)
                break


def _worthy(queue: RowQueue, row: int) -> list[int]:
    """The row's path as far as the innermost node that adds enough to the one above it."""
    path = queue.path_of(row)
    while path:
        above_chunks = queue.depth_of(path[-2]) if len(path) > 1 else 0
        if queue.depth_of(path[-1]) - above_chunks >= LEAST_CHUNKS:
            return path
        path.pop()
    return path


ASK_AGAIN_S = 0.25
"""A suspect that cannot go now is put aside for so long; other rows go before it."""
COMPANY_WAIT_S = 300.0
"""Suspects wait so long for a second engine; then they run on the only one."""


@dataclass(slots=True)
class TrialEngine:
    """Chooses the engine that is set apart, and gives it back to all when no suspect is left."""

    slots: Sequence[Slot]
    slot: Slot | None = None
    _alone_since_s: float | None = None

    def set_apart(self, now_s: float, *, has_suspects: bool) -> bool:
        """Choose, keep or give back the engine. Returns whether suspects wait for `find_room`; else
        they go where all rows go. `now_s` is monotonic."""
        living = [slot for slot in self.slots if not _is_lost(slot)]
        if not has_suspects:
            self._alone_since_s = None
        if not has_suspects or len(living) < 2 or self._is_alone(now_s):
            self._give_back()
            return False
        if self.slot is not None and _is_lost(self.slot):
            self._give_back()
        usable = [slot for slot in living if slot.is_usable]
        if self.slot is None and len(usable) >= 2:
            self.slot = min(usable, key=lambda slot: slot.window.num_tokens)
            self.slot.is_set_apart = True
        return True

    def find_room(self, place: Place, now_s: float) -> Slot | None:
        """The engine that is set apart, if a suspect may go there now (monotonic)."""
        slot = self.slot
        if slot is None or not slot.is_usable or not slot.is_left_alone(now_s):
            return None
        return slot if slot.has_room_for(place, now_s) else None

    def _is_alone(self, now_s: float) -> bool:
        """Whether no second engine has answered for long."""
        others = [slot for slot in self.slots if slot is not self.slot and slot.is_usable]
        if len(others) >= (2 if self.slot is None else 1):
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = now_s
        return self._alone_since_s is not None and now_s - self._alone_since_s > COMPANY_WAIT_S

    def _give_back(self) -> None:
        if self.slot is not None:
            self.slot.is_set_apart, self.slot.apart_since_s = False, None
            self.slot = None


def _is_lost(slot: Slot) -> bool:
    return slot.engine.state in {EngineState.FAILED, EngineState.STOPPED}


ROWS_PER_READ = 16


@dataclass(slots=True)
class Assigner:
    """Takes rows from the queues of the running `jobs` for engines that have room.

    Each row that `assign` returns is settled or given back once, whatever became of its job.
    """

    slots: Sequence[Slot]
    jobs: dict[str, ActiveJob] = field(default_factory=dict)
    turns: JobTurns = field(default_factory=JobTurns)
    router: Router = field(default_factory=make_router)
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
        slot = choose_slot(self.slots, place, self.router, now_s)
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
