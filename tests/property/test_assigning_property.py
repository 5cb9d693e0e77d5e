"""Handing rows out over jobs and engines: no row is lost, at two places at once, or left behind."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from job_builders import make_tree_job

from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.dispatcher import SentRow
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.faults import SOLO
from batchrun.daemon.job import ActiveJob
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.pool.row_queue import Window
from batchrun.types import EnginePhase, Usage

words = st.lists(st.sampled_from("abc"), max_size=4).map("".join)
trees = st.lists(words, min_size=1, max_size=12)


@dataclass
class Submitted:
    """What the test knows of one job: its rows, which of them ended, and how it runs now."""

    texts: list[str]
    weight: float
    deadline_at: float | None
    active: ActiveJob | None
    done: frozenset[int] = frozenset()


class AssignMachine(RuleBasedStateMachine):
    """Jobs come, pause, end and restart; engines fill up, die and come back; rows fail."""

    @initialize(num_engines=st.integers(1, 3), max_waiting=st.integers(1, 24))
    def begin(self, num_engines: int, max_waiting: int) -> None:
        self.now_s = 0.0
        self.engines = [
            AttachedEngine(AttachedSettings(name=f"e{i}", url=f"http://127.0.0.1:{9000 + i}"))
            for i in range(num_engines)
        ]
        for engine in self.engines:
            engine.state = EnginePhase.READY
        slots = [
            Slot(e, uses_priority=False, window=Window(max_waiting, 3_000)) for e in self.engines
        ]
        self.assigner = Assigner[ActiveJob, Slot](slots)
        self.jobs: dict[str, Submitted] = {}
        self.in_flight: list[SentRow] = []

    @rule(texts=trees, weight=st.sampled_from([0.5, 1.0, 4.0]), left_s=st.sampled_from([None, 9.0]))
    def submit(self, texts: list[str], weight: float, left_s: float | None) -> None:
        deadline_at = None if left_s is None else self.now_s + left_s
        name = f"job-{len(self.jobs)}"
        self.jobs[name] = Submitted(texts, weight, deadline_at, None)
        self.take_up(name)

    @rule(pick=st.integers(0, 9))
    def take_up(self, pick: int | str) -> None:
        """Start, or go on after a pause or a restart, with the rows that have no result."""
        name = pick if isinstance(pick, str) else self.name(pick)
        told = self.jobs.get(name)
        if told is not None and told.active is None:
            told.active = make_tree_job(name, told.texts, told.weight, told.done)
            self.assigner.join(told.active, deadline_at=told.deadline_at)

    @rule(pick=st.integers(0, 9))
    def pause(self, pick: int) -> None:
        """The job leaves the windows at once; its rows in flight are aborted afterwards."""
        told = self.jobs.get(self.name(pick))
        if told is None or told.active is None:
            return
        self.assigner.leave(told.active)
        mine = [a for a in self.in_flight if a.job is told.active]
        self.assign()
        assert len(mine) == sum(a.job is told.active for a in self.in_flight)
        for assignment in mine:
            self.come_back(assignment, 0.0)
        told.active = None

    @rule()
    def assign(self) -> None:
        for slot in self.assigner.slots:
            if slot.is_set_apart and slot.apart_since_s is None:
                slot.apart_since_s = self.now_s
        for assignment in self.assigner.assign(self.now_s)[0]:
            is_suspect = assignment.row in assignment.trials.limits
            assert is_suspect or not assignment.slot.is_set_apart
            usable = [slot for slot in self.assigner.slots if slot.is_usable]
            assert not is_suspect or assignment.slot.is_set_apart or len(usable) == 1
            mine = {a.row for a in self.in_flight if a.job is assignment.job}
            assert assignment.row not in mine
            assert assignment.slot.engine.state is EnginePhase.READY
            self.in_flight.append(assignment)

    @precondition(lambda self: self.in_flight)
    @rule(pick=st.integers(0, 99), cached=st.integers(0, 50))
    def finish(self, pick: int, cached: int) -> None:
        assignment = self.in_flight.pop(pick % len(self.in_flight))
        job, row = assignment.job, assignment.row
        usage = Usage(50, 8, cached)
        assignment.slot.release(assignment)
        self.assigner.settle(assignment, usage)
        job.trials.clear(row)
        job.queue.finish(row)
        told = self.jobs[job.record.id]
        told.done |= {row}
        if job.queue.is_finished:
            self.assigner.leave(job)
            told.active = None

    @precondition(lambda self: self.in_flight)
    @rule(pick=st.integers(0, 99), delay_s=st.sampled_from([0.0, 0.5, 4.0]), moves=st.booleans())
    def fail(self, pick: int, delay_s: float, *, moves: bool) -> None:
        self.come_back(self.in_flight[pick % len(self.in_flight)], delay_s, moves=moves)

    @rule(pick=st.integers(0, 2))
    def engine_dies(self, pick: int) -> None:
        engine = self.engines[pick % len(self.engines)]
        engine.state = EnginePhase.UNREACHABLE
        mine = [a for a in self.in_flight if a.slot.engine is engine]
        for slot in {id(a.slot): a.slot for a in mine}.values():
            slot.accuse()
        for assignment in mine:
            self.come_back(assignment, 0.0)

    @rule(pick=st.integers(0, 2))
    def engine_is_back(self, pick: int) -> None:
        engine = self.engines[pick % len(self.engines)]
        engine.state = EnginePhase.READY
        for slot in self.assigner.slots:
            if slot.engine is engine:
                slot.came_back()

    @rule(seconds=st.sampled_from([0.05, 1.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def every_account_balances(self) -> None:
        self.assigner.turns.check()
        for told in self.jobs.values():
            if told.active is not None:
                told.active.queue.check()
        for slot in self.assigner.slots:
            mine = [a.tokens for a in self.in_flight if a.slot is slot]
            assert (slot.window.num_rows, slot.window.num_tokens) == (len(mine), sum(mine))

    @invariant()
    def suspects_keep_to_their_limits(self) -> None:
        for slot in self.assigner.slots:
            mine = list(slot.in_flight.values())
            limits = [a.trials.limits[a.row] for a in mine if a.row in a.trials.limits]
            assert not limits or len(limits) <= min(limits)
            assert SOLO not in limits or len(mine) == 1

    def teardown(self) -> None:
        """Once everything is well, every row of every job ends."""
        for engine in self.engines:
            engine.state = EnginePhase.READY
        for name in self.jobs:
            if len(self.jobs[name].done) < len(self.jobs[name].texts):
                self.take_up(name)
        for _ in range(10_000):
            if all(len(told.done) == len(told.texts) for told in self.jobs.values()):
                return
            self.now_s += 5.0
            self.assign()
            while self.in_flight:
                self.finish(0, 0)
        raise AssertionError("rows were left behind")

    def name(self, pick: int) -> str:
        return f"job-{pick % max(len(self.jobs), 1)}"

    def come_back(self, assignment: SentRow, delay_s: float, *, moves: bool = False) -> None:
        self.in_flight.remove(assignment)
        assignment.slot.release(assignment)
        ready_at_s = self.now_s + delay_s
        self.assigner.give_back(assignment, ready_at_s=ready_at_s, moves=moves)


def test_no_row_is_lost_doubled_or_left_behind() -> None:
    run_state_machine_as_test(
        AssignMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
