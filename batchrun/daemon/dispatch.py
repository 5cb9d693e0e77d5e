"""Which row goes to which engine next: turns between jobs, planned order within one, room.

The daemon asks on the clock of the machine and the simulator on its own; nothing in here reads a
clock, a store or a socket. Instants are monotonic.

Jobs that share prefixes meet: their rows run while a prefix that one of them began is hot.

Where there are several engines, suspects run on one that is set apart for them: neither online
calls nor other rows suffer when it dies again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from batchrun.daemon.faults import SOLO, Backpressure, Trials
from batchrun.estimator.answer_length import AnswerLengths
from batchrun.hints import SharedPrefixes, rows_to_come
from batchrun.pool.fair_share import JobTurns, Turn
from batchrun.pool.prefix_keys import ChainTable, IntArray
from batchrun.pool.radix_tree import PrefixOrder, rows_with_prefix
from batchrun.pool.row_queue import RowQueue, Window
from batchrun.routing.group_homes import GroupHomes, RowLoad
from batchrun.types import Usage
from batchrun.wire import RowKey

GATEWAYS_LEARN_S = 2.0
"""Gateways look at the list of engines four times a second; one may be busy."""
LEAVING_S = 300.0
MAX_ROWS = 4_096
"""A prefix that more rows of a job begin with is no reason to change its order."""
MAX_LEVELS = 2
LEAST_CHUNKS = 2
"""Rows that share less than that beyond a prefix that they have anyway gain nothing by meeting."""
ASK_AGAIN_S = 0.25
"""A suspect that cannot go now is put aside for so long; other rows go before it."""
COMPANY_WAIT_S = 300.0
"""Suspects wait so long for a second engine; then they run on the only one."""
ROWS_PER_READ = 16


class RowPlan(Protocol):
    """All rows of a job as they are known before any of them ran: the keys of each row's prompt,
    the planned order, and prompt tokens."""

    @property
    def chains(self) -> ChainTable: ...

    @property
    def order(self) -> PrefixOrder: ...

    def estimate_tokens(self, row: int) -> int: ...


class RunningJob(Protocol):
    """A job whose rows go to engines.

    `queue` holds the rows that still have to run, `trials` the suspects among them; from the
    dispatch `answers` learns how long answers are. `left_tokens` is what rows without a result are
    expected to compute when the job joins, `cost_tokens` what one is. `current_node` is kept by the
    dispatch: the prefix node of the row that was handed out last.
    """

    current_node: int | None

    @property
    def id(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def left_tokens(self) -> int: ...

    @property
    def plan(self) -> RowPlan: ...

    @property
    def queue(self) -> RowQueue: ...

    @property
    def group_of(self) -> IntArray: ...

    @property
    def trials(self) -> Trials: ...

    @property
    def answers(self) -> AnswerLengths: ...

    def cost_tokens(self, row: int) -> int: ...


JobT = TypeVar("JobT", bound=RunningJob)
SlotT = TypeVar("SlotT", bound="EngineSlot")


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What a row asks for: room for the tokens of its prompt, with the others of its group.

    `limit` is that of a suspect (see `Trials`); an urgent row has some room beyond the window.
    """

    prompt_tokens: int
    group: int = 0
    limit: int | None = None
    is_urgent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Assignment(Generic[JobT, SlotT]):
    """A row that was taken from its job's queue for an engine, which goes by its number.

    `prefixes` are for its hint, counted when it was taken: rows that were taken with it, a moment
    later, are rows to come.
    """

    job: JobT
    row: int
    slot: SlotT
    engine: int
    demand: Demand
    prefixes: SharedPrefixes

    @property
    def key(self) -> RowKey:
        """What the engine knows the row by."""
        return self.job.id, self.row

    @property
    def tokens(self) -> int:
        """Those of its prompt, as they were estimated."""
        return self.demand.prompt_tokens

    @property
    def is_urgent(self) -> bool:
        """Whether it goes before the rows that wait in the engine: its job's deadline is near."""
        return self.demand.is_urgent

    @property
    def trials(self) -> Trials:
        return self.job.trials


@dataclass(slots=True, kw_only=True, eq=False)
class EngineSlot:
    """One engine, with what is in flight on it.

    While `is_down` it gets no rows. While it `is_set_apart` only suspects go to it; since
    `apart_since_s` the gateways know it. What the properties below tell is another's to say.
    """

    window: Window
    pressure: Backpressure = field(default_factory=Backpressure)
    load: RowLoad = field(default_factory=RowLoad)
    is_down: bool = False
    is_set_apart: bool = False
    apart_since_s: float | None = None
    in_flight: dict[RowKey, Assignment[Any, Any]] = field(default_factory=dict)
    _limits: dict[RowKey, int] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        """Whether rows may be sent."""
        return not self.is_down

    @property
    def is_lost(self) -> bool:
        """Whether it will never be usable again by itself."""
        return False

    @property
    def runs_scheduler(self) -> bool:
        """Whether batchrun's scheduler runs in it, which chooses among the rows that wait."""
        return True

    @property
    def num_running(self) -> int:
        """Offline rows that the engine runs now, as far as it tells."""
        return 0

    @property
    def num_other_calls(self) -> int:
        """Calls that the engine has besides our rows, as far as it tells: online ones, and those
        that run as offline work."""
        return 0

    def is_left_alone(self, now_s: float) -> bool:
        """Whether online calls and other rows have left an engine that is set apart.

        Calls that do not end are not waited for longer than `LEAVING_S`.
        """
        if self.apart_since_s is None or len(self._limits) < len(self.in_flight):
            return False
        apart_s = now_s - self.apart_since_s
        return apart_s >= (LEAVING_S if self.num_other_calls else GATEWAYS_LEARN_S)

    def take(self, assignment: Assignment[Any, Any], now_s: float) -> None:
        """A row goes to the engine."""
        self.in_flight[assignment.key] = assignment
        limit = assignment.trials.limits.get(assignment.row)
        if limit is not None:
            self._limits[assignment.key] = limit
        self.window.add(assignment.tokens, now_s)
        self.load.add(assignment.tokens)

    def release(self, assignment: Assignment[Any, Any]) -> None:
        """The row is in the engine no longer."""
        del self.in_flight[assignment.key]
        self._limits.pop(assignment.key, None)
        self.window.remove(assignment.tokens)
        self.load.remove(assignment.tokens)

    def has_room_for(self, demand: Demand, now_s: float) -> bool:
        """Whether a row that asks for this may go now."""
        if not (self._lets_in(demand.limit) and self.pressure.allows(len(self.in_flight), now_s)):
            return False
        tokens = demand.prompt_tokens
        return self.window.has_room(tokens, self.num_running, is_urgent=demand.is_urgent)

    def has_room_to_lend(self, demand: Demand, now_s: float) -> bool:
        """Whether a row may go now that another engine is the best for.

        Where batchrun's scheduler runs, what waits beyond a small choice adds nothing.
        """
        if not self.has_room_for(demand, now_s):
            return False
        is_bound = self.runs_scheduler and demand.limit is None and not demand.is_urgent
        tokens = demand.prompt_tokens
        return not is_bound or self.window.has_room(tokens, self.num_running, is_lent=True)

    def _lets_in(self, limit: int | None) -> bool:
        """Whether the suspects among the rows in flight allow another row, of this limit."""
        limits = self._limits.values()
        if limit is None:
            return SOLO not in limits
        if limit == SOLO and self.in_flight:
            return False
        return len(limits) < min([limit, *limits])


def choose_engine(
    slots: Mapping[int, SlotT], demand: Demand, homes: GroupHomes, now_s: float
) -> int | None:
    """The engine of the row's group, or the best of the others when that one is full and
    this one has little to do. None when none of them has room."""
    loads = {engine: slot.load for engine, slot in slots.items()}
    ranked = homes.rank(demand.group, loads)
    if ranked and slots[ranked[0]].has_room_for(demand, now_s):
        return ranked[0]
    return next((each for each in ranked if slots[each].has_room_to_lend(demand, now_s)), None)


def bring_together(job: RunningJob, row: int, others: Iterable[RunningJob]) -> None:
    """`row` goes to an engine. Where it begins a prefix group of its job, rows of the other jobs
    with the same prefix are the next of theirs."""
    path = _worthy(job.queue, row)
    if not path or path[-1] == job.current_node:
        return
    job.current_node = path[-1]
    chains = job.plan.chains
    prefixes = [chains.prefix(row, job.queue.depth_of(node)) for node in path[-MAX_LEVELS:]]
    for other in others:
        if other is job:
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


@dataclass(slots=True)
class TrialEngine:
    """Chooses the engine that is set apart, and gives it back to all when no suspect is left."""

    slots: Sequence[EngineSlot]
    slot: EngineSlot | None = None
    _alone_since_s: float | None = None

    def set_apart(self, now_s: float, *, has_suspects: bool) -> bool:
        """Choose, keep or give back the engine. Returns whether suspects wait for it; else they go
        where all rows go."""
        if not has_suspects:
            self._alone_since_s = None
        living = [slot for slot in self.slots if not slot.is_lost] if has_suspects else []
        if len(living) < 2 or self._is_alone(now_s):
            self._give_back()
            return False
        if self.slot is not None and self.slot.is_lost:
            self._give_back()
        usable = [slot for slot in living if slot.is_usable]
        if self.slot is None and len(usable) >= 2:
            self.slot = min(usable, key=lambda slot: slot.load.tokens_in_flight)
            self.slot.is_set_apart = True
        return True

    def find_room(self, demand: Demand, now_s: float) -> int | None:
        """The engine that is set apart, if a suspect may go there now."""
        slot = self.slot
        if slot is None or not slot.is_usable or not slot.is_left_alone(now_s):
            return None
        return self.slots.index(slot) if slot.has_room_for(demand, now_s) else None

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


class Assigner(Generic[JobT, SlotT]):
    """Takes rows from the queues of the running `jobs` for engines that have room.

    Each row that `assign` returns is settled or given back once, whatever became of its job.
    """

    def __init__(self, slots: Sequence[SlotT]) -> None:
        self.slots = slots
        self.jobs: dict[str, JobT] = {}
        self.turns = JobTurns()
        self._homes = GroupHomes()
        self.trial_engine = TrialEngine(slots)
        self._is_saturated = False
        self._has_usable = False
        self._num_taken = 0
        self._turn_ended_at: dict[str, int] = {}
        self._pause_rows: dict[str, int] = {}

    def join(self, job: JobT, *, deadline_at: float | None) -> None:
        """A job takes its turns from now on; `deadline_at` is its deadline."""
        self.jobs[job.id] = job
        self.turns.join(job.id, job.weight, job.left_tokens, deadline_at=deadline_at)

    def leave(self, job: JobT) -> None:
        """No row of the job goes any more. Does nothing when it has left already."""
        if self._takes_part(job):
            del self.jobs[job.id]
            self.turns.leave(job.id)
            self._turn_ended_at.pop(job.id, None)
            self._pause_rows.pop(job.id, None)

    def assign(self, now_s: float) -> tuple[list[Assignment[JobT, SlotT]], float | None]:
        """Rows to send now, and when to ask again at the latest, where a window says so."""
        assignments: list[Assignment[JobT, SlotT]] = []
        opens_at_s = None
        has_suspects = any(job.trials.limits for job in self.jobs.values())
        is_apart = self.trial_engine.set_apart(now_s, has_suspects=has_suspects)
        slots = self._for_all_rows()
        while len(assignments) < ROWS_PER_READ and opens_at_s is None:
            turn, row = self._next(now_s)
            if turn is None:
                self._is_saturated = False
                break
            job = self.jobs[turn.job_id]
            demand = _demand(job, row, is_urgent=turn.is_urgent)
            if is_apart and demand.limit is not None:
                engine = self.trial_engine.find_room(demand, now_s)
                if engine is None:
                    job.queue.take(row)
                    job.queue.give_back(row, ready_at_s=now_s + ASK_AGAIN_S)
                    continue
            else:
                engine = choose_engine(slots, demand, self._homes, now_s)
                if engine is None:
                    self._is_saturated = demand.limit is None and self._has_usable
                    break
                opens_at_s = _opens_at_s(slots[engine].window, demand, now_s)
            if opens_at_s is None:
                assignments.append(self._take(turn, row, engine, demand, now_s))
        self.turns.observe(now_s, is_saturated=self._is_saturated)
        return assignments, opens_at_s

    def idle(self, now_s: float) -> None:
        """Nothing may go at present; that says nothing of what the engines could do."""
        self._for_all_rows()
        self._is_saturated = False
        self.turns.observe(now_s, is_saturated=False)

    def settle(self, assignment: Assignment[JobT, SlotT], usage: Usage) -> None:
        """The row has ended."""
        computed = usage.num_prompt_tokens - usage.num_cached_tokens + usage.num_output_tokens
        if self._takes_part(assignment.job):
            self.turns.settle(assignment.job.id, assignment.row, computed)
        assignment.job.answers.ended(assignment.row, usage.num_output_tokens)

    def give_back(self, assignment: Assignment[JobT, SlotT], *, ready_at_s: float = 0.0) -> None:
        """The row has not ended: it is pending again, and free."""
        job, row = assignment.job, assignment.row
        job.queue.give_back(row, ready_at_s=ready_at_s)
        job.answers.lost(row)
        if self._takes_part(job):
            self.turns.refund(job.id, row)

    def _takes_part(self, job: JobT) -> bool:
        return self.jobs.get(job.id) is job

    def _for_all_rows(self) -> dict[int, SlotT]:
        """The engines that any row may go to."""
        usable = {engine: slot for engine, slot in enumerate(self.slots) if slot.is_usable}
        self._has_usable = bool(usable)
        return {engine: slot for engine, slot in usable.items() if not slot.is_set_apart}

    def _next(self, now_s: float) -> tuple[Turn | None, int]:
        """The job whose turn it is, and its next row."""
        rows = {
            job_id: row
            for job_id, job in self.jobs.items()
            if (row := job.queue.peek(now_s)) is not None
        }
        turn = self.turns.choose(rows.keys(), now_s)
        return turn, -1 if turn is None else rows[turn.job_id]

    def _take(
        self, turn: Turn, row: int, engine: int, demand: Demand, now_s: float
    ) -> Assignment[JobT, SlotT]:
        job, slot = self.jobs[turn.job_id], self.slots[engine]
        job.queue.take(row)
        job.answers.sent(row)
        prefixes = shared_prefixes(job, row)
        bring_together(job, row, self.jobs.values())
        following = job.queue.peek(now_s)
        ends_group = following is None or job.group_of[following] != job.group_of[row]
        self.turns.charge(turn, row, job.cost_tokens(row), ends_subtree=ends_group)
        prefixes = prefixes._replace(next_in_rows=self._next_in_rows(job.id))
        assignment = Assignment(job, row, slot, engine, demand, prefixes)
        slot.take(assignment, now_s)
        return assignment

    def _next_in_rows(self, job_id: str) -> int:
        """A row of the job was taken: how many rows on its next one is expected. Between two turns
        of a job there are about as many rows of others as there were the last time."""
        self._num_taken += 1
        ended_at = self._turn_ended_at.pop(job_id, None)
        if ended_at is not None:
            self._pause_rows[job_id] = self._num_taken - ended_at
        if self.turns.is_in_turn(job_id):
            return 1
        self._turn_ended_at[job_id] = self._num_taken
        return self._pause_rows.get(job_id, 1)


def shared_prefixes(job: RunningJob, row: int) -> SharedPrefixes:
    """The prefixes of a row that was just taken; its key portion as `group_rows` has it, but where
    it is the row's own text. The job's next row is the next one."""
    path = job.queue.path_of(row)
    key_node, above = None, 0
    for node in path:
        depth = job.queue.depth_of(node)
        if depth > 2 * above:
            key_node = node
        above = depth
    starts = job.plan.chains.starts
    if starts[row + 1] - starts[row] > 2 * above:
        key_node = None
    return SharedPrefixes(rows_to_come(path, job.queue.num_to_come), key_node)


def _demand(job: RunningJob, row: int, *, is_urgent: bool) -> Demand:
    tokens, group = job.plan.estimate_tokens(row), int(job.group_of[row])
    return Demand(tokens, group, job.trials.limits.get(row), is_urgent)


def _opens_at_s(window: Window, demand: Demand, now_s: float) -> float | None:
    """When a window that has room lets the row in; None: now."""
    opens_at_s = window.opens_at_s(demand.prompt_tokens, now_s)
    return opens_at_s if opens_at_s > now_s else None
