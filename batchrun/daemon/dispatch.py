"""Which row goes to which engine next: turns between jobs, planned order within one, room.

The daemon asks on the clock of the machine and the simulator on its own; nothing in here reads a
clock, a store or a socket. Instants are monotonic.

Jobs that share prefixes meet: their rows run while a prefix that one of them began is hot.

Where there are several engines of the same models, suspects run on one that is set apart for them:
neither online calls nor other rows suffer when it dies again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Generic

from batchrun.daemon.faults import SOLO, TrialEngine
from batchrun.daemon.in_flight import Assignment, Demand, EngineSlot, JobT, RunningJob, SlotT
from batchrun.daemon.prices import USUAL, output_token_s
from batchrun.hints import SharedPrefixes, rows_to_come
from batchrun.pool.fair_share import NO_POOL, JobTurns, Turn
from batchrun.pool.radix_tree import rows_with_prefix
from batchrun.pool.row_queue import RowLoad, RowQueue
from batchrun.types import DEFAULT_MODEL, Usage
from batchrun.wire import RowKey

ANY = ""
"""Stands for what an engine serves that takes any model."""
MAX_ROWS = 4_096
"""A prefix that more rows of a job begin with is no reason to change its order."""
MAX_LEVELS = 2
LEAST_CHUNKS = 2
"""Rows that share less than that beyond a prefix that they have anyway gain nothing by meeting."""
ASK_AGAIN_S = 0.25
"""A suspect that cannot go now is put aside for so long; other rows go before it."""
ROWS_PER_READ = 16


def bring_together(
    job: RunningJob, row: int, others: Iterable[RunningJob], engine: int = 0
) -> None:
    """`row` goes to an engine. Where it begins a prefix group there, rows of the other jobs with
    the same prefix are the next of theirs on this engine."""
    path = _worthy(job.queue, row)
    if not path or path[-1] == job.current_nodes.get(engine):
        return
    job.current_nodes[engine] = path[-1]
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
                    other.queue.prefer(rows, engine)
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


def may_serve(slots: Iterable[EngineSlot], model: str) -> bool:
    """Whether an engine that is there or may come has this model, or has not told yet."""
    return any(slot.models is None or slot.serves(model) for slot in slots if not slot.is_off)


def pools_of(slots: Sequence[EngineSlot], numbers: dict[str, int]) -> list[int]:
    """Of each engine the number of its pool: of those that share a model, and all that share one
    with one of these. One that is off, or has not told its models, is in none.

    `numbers` has those of models, and learns new ones: a pool keeps its number as engines come, go
    and load adapters.
    """
    told = [set[str]() if slot.is_off else {*(slot.models or ())} for slot in slots]
    pools, taken = list[set[str]](), dict[int, set[str]]()
    for slot, models in zip(slots, told, strict=True):
        serves_any = slot.models == () and not slot.is_off
        joined = models.union({ANY} if serves_any else (), *told if serves_any else ())
        joined = joined.union(*(pool for pool in pools if pool & joined))
        pools = [joined if pool & joined else pool for pool in pools] + [joined]
    for pool in filter(None, pools):
        known = {numbers[model] for model in pool if model in numbers} - taken.keys()
        if pool not in taken.values():
            number = min(known, default=1 + max(numbers.values(), default=-1))
            numbers |= dict.fromkeys(pool, number)
            taken[number] = pool
    return [numbers[min(pool)] if pool else NO_POOL for pool in pools]


@dataclass(slots=True, eq=False)
class _Round:
    """One handing out: the engines that still ask, and what became of the others.

    `loads` has all that any row may go to. `dropped` tells of those without another row whether
    they are full; a window lets in no more before `opens_at_s`.
    """

    asking: dict[int, Any]
    slots: Sequence[EngineSlot]
    now_s: float
    loads: dict[int, RowLoad] = field(init=False)
    assignments: list[Assignment[Any, Any]] = field(default_factory=list)
    dropped: dict[int, bool] = field(default_factory=dict)
    opens_at_s: float | None = None
    _serving: dict[str, dict[int, RowLoad]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loads = {engine: slot.load for engine, slot in self.asking.items()}

    def serving(self, model: str) -> dict[int, RowLoad]:
        """The loads of the engines with this model; of all where none has it: their refusal says
        why the rows do not run."""
        if model not in self._serving:
            serving = {e: load for e, load in self.loads.items() if self.slots[e].serves(model)}
            may_come = may_serve(self.slots, model)
            self._serving[model] = serving if serving or may_come else self.loads
        return self._serving[model]

    def drop(self, engine: int, *, is_full: bool) -> None:
        """The engine takes no more, or there is nothing for it."""
        del self.asking[engine]
        self.dropped[engine] = is_full

    def waits(self, engine: int, tokens: int) -> bool:
        """Whether the engine takes so many tokens later; if so, it is passed over."""
        opens_at_s = self.asking[engine].opens_at_s(tokens, self.now_s)
        if opens_at_s <= self.now_s:
            return False
        del self.asking[engine]
        self.opens_at_s = min(opens_at_s, self.opens_at_s or math.inf)
        return True


class Assigner(Generic[JobT, SlotT]):
    """Takes rows from the queues of the running `jobs` for engines that have room.

    Each row that `assign` returns is settled or given back once, whatever became of its job. Those
    `in_the_way` then are to be aborted and given back a little later: they keep a suspect waiting.
    Of the jobs `resting`, `at_limit` and `waiting`, by id, no row goes. Those `at_limit` have all
    in flight that they may; the last wait for hours: suspects of theirs keep no engine apart.
    """

    def __init__(
        self,
        slots: Sequence[SlotT],
        waiting: Collection[str] = (),
        at_limit: Collection[str] = (),
    ) -> None:
        self.slots = slots
        self.waiting = waiting
        self.at_limit = at_limit
        self.jobs: dict[str, JobT] = {}
        self.turns = JobTurns()
        self.trial_engine = TrialEngine(slots)
        self.in_the_way: dict[RowKey, Assignment[JobT, SlotT]] = {}
        self.resting: Sequence[Collection[str]] = ()
        self._told: object = None
        self._pools: list[int] = []
        self._numbers: dict[str, int] = {}
        self._saturated: dict[int, bool] = {}
        self._num_taken = 0
        self._turn_ended_at: dict[tuple[str, int], int] = {}
        self._pause_rows: dict[tuple[str, int], int] = {}

    def join(self, job: JobT, *, deadline_at: float | None, seq: int = 0) -> None:
        """A job takes its turns from now on; `deadline_at` is its deadline, `seq` its number among
        all jobs as they came."""
        self.jobs[job.id] = job
        self.turns.join(
            job.id, job.weight, job.left_tokens, deadline_at=deadline_at, owner=job.owner, seq=seq
        )
        self.turns.place({job.id: self.pool_of(job.model)[0]})

    def pool_of(self, model: str) -> tuple[int, list[SlotT]]:
        """The pool whose pace the rows of a job of this model have, and its engines."""
        self._place_jobs()
        number = self._number(model)
        engines = zip(self.slots, self._pools, strict=True)
        return number, [slot for slot, pool in engines if pool == number != NO_POOL]

    def _place_jobs(self) -> None:
        """Pools change where engines tell other models."""
        told = [(slot.models, slot.is_off, slot.serves(DEFAULT_MODEL)) for slot in self.slots]
        if told != self._told:
            self._told, self._pools = told, pools_of(self.slots, self._numbers)
            self.turns.place({job_id: self._number(job.model) for job_id, job in self.jobs.items()})

    def _number(self, model: str) -> int:
        """That of the pool of a model."""
        engines = zip(self.slots, self._pools, strict=True)
        served = (pool for slot, pool in engines if slot.serves(model) and not slot.is_off)
        return max(served, default=NO_POOL)

    def leave(self, job: JobT) -> None:
        """No row of the job goes any more. Does nothing when it has left already."""
        if self._takes_part(job):
            del self.jobs[job.id]
            self.turns.leave(job.id)
            for known in (self._turn_ended_at, self._pause_rows):
                for key in [key for key in known if key[0] == job.id]:
                    del known[key]

    def assign(self, now_s: float) -> tuple[list[Assignment[JobT, SlotT]], float | None]:
        """Rows to send now, and when to ask again at the latest, where a window says so."""
        self.in_the_way = {}
        for slot in self.slots:
            slot.end_trials(now_s)
        self._place_jobs()
        are_alike = len({slot.models for slot in self.slots if not slot.is_lost}) == 1
        has_suspects = are_alike and any(
            job.trials.limits and job_id not in self.waiting for job_id, job in self.jobs.items()
        )
        is_apart = self.trial_engine.set_apart(now_s, has_suspects=has_suspects)
        round_ = _Round(self._asking(is_apart=is_apart), self.slots, now_s)
        while round_.asking and len(round_.assignments) < ROWS_PER_READ:
            engine = min(round_.asking, key=lambda each: self.slots[each].load.seconds)
            turn, row = self._next(engine, round_)
            if turn is None:
                round_.drop(engine, is_full=False)
                continue
            job = self.jobs[turn.job_id]
            demand = _demand(job, row, is_urgent=turn.is_urgent)
            if is_apart and demand.limit is not None:
                self._try(turn, row, demand, round_)
            elif not self._has_room(job, engine, demand, round_):
                if demand.limit == SOLO:
                    self.in_the_way |= self.slots[engine].holdouts(now_s)
                round_.drop(engine, is_full=demand.limit is None)
            elif not round_.waits(engine, demand.prompt_tokens):
                self._take(turn, row, engine, demand, round_)
        self._observe(round_)
        return round_.assignments, round_.opens_at_s

    def _try(self, turn: Turn, row: int, demand: Demand, round_: _Round) -> None:
        """A suspect goes to the engine that is set apart, or is put aside."""
        engine = self.trial_engine.find_room(demand, round_.now_s)
        if engine is not None:
            self._take(turn, row, engine, demand, round_)
            return
        if self.trial_engine.slot is not None:
            self.in_the_way |= self.trial_engine.slot.holdouts(round_.now_s)
        job = self.jobs[turn.job_id]
        job.queue.take(row, turn.engine, round_.serving(job.model))
        job.queue.give_back(row, ready_at_s=round_.now_s + ASK_AGAIN_S)

    def _has_room(self, job: JobT, engine: int, demand: Demand, round_: _Round) -> bool:
        slot = self.slots[engine]
        if slot.is_set_apart and demand.limit is None:
            return False
        if not slot.has_room_for(demand, round_.now_s):
            return False
        if len(round_.serving(job.model)) == 1:
            return True
        is_urgent, answer = demand.is_urgent, job.answers.mean_tokens
        return slot.load.has_room(demand.work_s, answer, is_urgent=is_urgent)

    def _observe(self, round_: _Round) -> None:
        """A pool is saturated where all its engines that a job has rows for have what they take, or
        what the job may have in flight."""
        for engine, is_full in round_.dropped.items():
            self.slots[engine].load.observe(round_.now_s, is_full=is_full)
        if not round_.asking and round_.opens_at_s is None:
            found = {pool: list[bool]() for pool in {NO_POOL, *self._saturated, *self._pools}}
            for at_limit in (False, True):
                ready = self._ready(round_.now_s, at_limit=at_limit).values()
                for model in {job.model for job in ready}:
                    sought = round_.serving(model).keys() & round_.dropped.keys()
                    found[self._number(model)] += [at_limit or round_.dropped[e] for e in sought]
            self._saturated = {pool: bool(full) and all(full) for pool, full in found.items()}
        self._tell_turns(round_.now_s)

    def adopt(
        self, job: JobT, row: int, engine: int, now_s: float
    ) -> Assignment[JobT, SlotT] | None:
        """A row that the engine has already, from before; None when it is not pending."""
        if not job.queue.take_out(row):
            return None
        job.answers.sent(row)
        turn = Turn(job.id, is_urgent=False, engine=engine)
        self.turns.now_s = now_s
        self.turns.charge(turn, row, job.cost_tokens(row), ends_subtree=False)
        demand = _demand(job, row, is_urgent=False)
        assignment = Assignment(job, row, self.slots[engine], engine, demand, SharedPrefixes())
        self.slots[engine].take(assignment, now_s)
        return assignment

    def idle(self, now_s: float) -> None:
        """Nothing may go at present; that says nothing of what the engines could do."""
        for slot in self.slots:
            slot.end_trials(now_s)
            slot.load.observe(now_s, is_full=False)
        self.trial_engine.set_apart(now_s, has_suspects=False)
        self._saturated = dict.fromkeys(self._saturated, False)
        self._tell_turns(now_s)

    def _tell_turns(self, now_s: float) -> None:
        self.turns.now_s = now_s
        speeds = self._speeds()
        for pool, is_saturated in self._saturated.items():
            self.turns.observe(now_s, is_saturated=is_saturated, pool=pool, speed=speeds[pool])

    def _speeds(self) -> Mapping[int, float]:
        """How fast the engines of each pool are that may run rows. One whose speed nobody knew
        beforehand is as fast as the others, on average."""
        given = [slot.load.first_speed for slot in self.slots]
        known = [speed for speed in given if speed is not None] or [1.0]
        usual, speeds = fmean(known), defaultdict[int, float](float)
        for slot, pool, speed in zip(self.slots, self._pools, given, strict=False):
            if slot.is_usable:
                speeds[pool] += usual if speed is None else speed
        return speeds

    def settle(
        self, assignment: Assignment[JobT, SlotT], usage: Usage, *, is_ok: bool = True
    ) -> None:
        """The row has ended; an answer of no tokens counts as planned, an error as no work."""
        computed = usage.num_prompt_tokens - usage.num_cached_tokens + usage.num_output_tokens
        if self._takes_part(assignment.job):
            self.turns.settle(assignment.job.id, assignment.row, computed)
        answers, output_tokens = assignment.job.answers, usage.num_output_tokens
        more_tokens = (output_tokens or answers.planned_tokens) - answers.planned_tokens
        more_s = more_tokens * output_token_s(USUAL, float(usage.num_prompt_tokens))
        if is_ok or computed:
            assignment.slot.load.ended(max(0.0, assignment.demand.work_s + more_s))
        answers.ended(assignment.row, output_tokens, usage.num_choices)

    def give_back(
        self, assignment: Assignment[JobT, SlotT], *, ready_at_s: float = 0.0, moves: bool = False
    ) -> None:
        """The row has not ended: it is pending again, and free. One that `moves` goes to another
        engine, where one has its model."""
        job, row = assignment.job, assignment.row
        failed_at = assignment.engine if moves else None
        engine = self._another(assignment) if moves else None
        job.queue.give_back(row, ready_at_s=ready_at_s, failed_at=failed_at, engine=engine)
        job.answers.lost(row)
        if self._takes_part(job):
            self.turns.refund(job.id, row)

    def _another(self, failed: Assignment[JobT, SlotT]) -> int | None:
        """Of those that the row may go to but its own the engine that is done first, one where it
        has not failed before all others."""
        usable, model = self._asking(is_apart=False), failed.job.model
        tried = failed.job.queue.engines_failed(failed.row)
        others = [at for at in usable if at != failed.engine and usable[at].serves(model)]
        return min(others, key=lambda at: (at in tried, usable[at].load.seconds), default=None)

    def _takes_part(self, job: JobT) -> bool:
        return self.jobs.get(job.id) is job

    def _asking(self, *, is_apart: bool) -> dict[int, SlotT]:
        """The engines that any row may go to; where there is none, the one that is set apart."""
        slots = enumerate(self.slots)
        found = {at: slot for at, slot in slots if slot.is_usable and not slot.is_set_apart}
        alone = self.trial_engine.number
        if is_apart and not found and alone is not None:
            found[alone] = self.slots[alone]
        return found

    def _next(self, engine: int, round_: _Round) -> tuple[Turn | None, int]:
        """The job whose turn it is on an engine, and its next row for that."""
        rows, now_s = dict[str, int](), round_.now_s
        ready = self._ready(now_s)
        for job_id, job in ready.items():
            loads = round_.serving(job.model)
            row = job.queue.peek(now_s, engine, loads) if engine in loads else None
            if row is not None:
                rows[job_id] = row
        turn = self.turns.choose(ready.keys(), now_s, rows.keys(), engine)
        return turn, -1 if turn is None else rows[turn.job_id]

    def _ready(self, now_s: float, *, at_limit: bool = False) -> dict[str, JobT]:
        """The jobs with rows that may go now; or those that only their limit keeps from it."""
        resting = (self.waiting, *self.resting)
        return {
            job_id: job
            for job_id, job in self.jobs.items()
            if (job_id in self.at_limit) == at_limit
            and not any(job_id in each for each in resting)
            and job.queue.has_ready(now_s)
        }

    def _take(self, turn: Turn, row: int, engine: int, demand: Demand, round_: _Round) -> None:
        """The row goes to `engine`, mostly the one whose turn it is."""
        job, slot = self.jobs[turn.job_id], self.slots[engine]
        job.queue.take(row, turn.engine, round_.serving(job.model))
        job.answers.sent(row)
        prefixes = shared_prefixes(job, row)
        bring_together(job, row, self.jobs.values(), engine)
        ends_group = not job.queue.goes_on(row, turn.engine)
        self.turns.charge(turn, row, job.cost_tokens(row), ends_subtree=ends_group)
        prefixes = prefixes._replace(next_in_rows=self._next_in_rows(job.id, turn.engine))
        assignment = Assignment(job, row, slot, engine, demand, prefixes)
        slot.take(assignment, round_.now_s)
        round_.assignments.append(assignment)

    def _next_in_rows(self, job_id: str, engine: int) -> int:
        """A row of the job was taken: how many rows on its next one there is expected. Between two
        turns of a job there are about as many rows of others as there were the last time."""
        self._num_taken += 1
        key = job_id, engine
        ended_at = self._turn_ended_at.pop(key, None)
        if ended_at is not None:
            self._pause_rows[key] = self._num_taken - ended_at
        if self.turns.is_in_turn(job_id, engine):
            return 1
        self._turn_ended_at[key] = self._num_taken
        return self._pause_rows.get(key, 1)


def shared_prefixes(job: RunningJob, row: int) -> SharedPrefixes:
    """The prefixes of a row that was just taken, and its key portion; None where that is the row's
    own text. The job's next row is the next one."""
    path, starts = job.queue.path_of(row), job.plan.chains.starts
    key_node = job.queue.key_of(row, int(starts[row + 1] - starts[row]))
    return SharedPrefixes(rows_to_come(path, job.queue.num_to_come), key_node)


def _demand(job: RunningJob, row: int, *, is_urgent: bool) -> Demand:
    tokens, work_s = job.plan.estimate_tokens(row), job.queue.work_s(row)
    return Demand(tokens, work_s, job.trials.limits.get(row), is_urgent)
