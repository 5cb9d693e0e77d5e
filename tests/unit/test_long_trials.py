"""A suspect that takes long, or for ever, holds up nobody for long, and nobody suffers for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from job_builders import make_tree_job

from batchrun.config import load_deployment
from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.faults import COMPANY_WAIT_S, SOLO, TRIAL_S
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.supervisor import Supervisor
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.home import Home
from batchrun.pool.row_queue import Window
from batchrun.types import EnginePhase, Usage

JOB = "job_a"
USUAL_S = 1.0


class Deployment:
    """Engines and a job on a clock of seconds. Rows end after `takes_s` (else `USUAL_S`), and an
    engine dies of those that have run there for as long as `kills_after_s` says."""

    def __init__(
        self,
        num_rows: int,
        *,
        takes_s: Mapping[int, float] | None = None,
        kills_after_s: Mapping[int, float] | None = None,
        room: int = 32,
        num_engines: int = 1,
    ) -> None:
        self.takes_s, self.kills_after_s = takes_s or {}, kills_after_s or {}
        self.slots = []
        for _ in range(num_engines):
            engine = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9000"))
            engine.state = EnginePhase.READY
            self.slots.append(Slot(engine, uses_priority=False, window=Window(room, 10**9)))
        self.assigner = Assigner[ActiveJob, Slot](self.slots)
        self.job = make_tree_job(JOB, ["a"] * num_rows)
        self.assigner.join(self.job, deadline_at=None)
        self.now_s = 0.0
        self.sent_at_s: dict[int, float] = {}
        self.answered_at_s: dict[int, float] = {}
        self.guilty: set[int] = set()
        self.num_deaths = 0

    def run(self, seconds: float) -> None:
        """Let so much time go by."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            while self._hand_out():
                pass
            self.now_s += 1
            for slot in self.slots:
                self._work(slot)

    def _hand_out(self) -> bool:
        """Whether anything went or came back."""
        rows = self.assigner.assign(self.now_s)[0]
        self.sent_at_s |= {sent.row: self.now_s for sent in rows}
        for holdout in self.assigner.in_the_way.values():
            holdout.slot.release(holdout)
            self.assigner.give_back(holdout, ready_at_s=self.now_s + 1)
        return bool(rows or self.assigner.in_the_way)

    def _work(self, slot: Slot) -> None:
        slot.apart_since_s = 0.0 if slot.is_set_apart else None
        ran_s = {
            sent.row: self.now_s - self.sent_at_s[sent.row] for sent in slot.in_flight.values()
        }
        if any(at_s >= self.kills_after_s.get(row, math.inf) for row, at_s in ran_s.items()):
            self.kill(slot)
        for sent in list(slot.in_flight.values()):
            if ran_s[sent.row] >= self.takes_s.get(sent.row, USUAL_S):
                slot.answered(ran_s[sent.row])
                self.answered_at_s[sent.row] = self.now_s
                self._end(slot, sent.row)

    def kill(self, slot: Slot) -> None:
        """The engine dies, and is there again."""
        self.num_deaths += 1
        slot.accuse()
        for sent in list(slot.in_flight.values()):
            if self.job.trials.is_guilty(sent.row):
                self.guilty.add(sent.row)
                self._end(slot, sent.row)
            else:
                slot.release(sent)
                self.assigner.give_back(sent)
        slot.came_back()

    def _end(self, slot: Slot, row: int) -> None:
        sent = slot.in_flight[JOB, row]
        slot.release(sent)
        self.assigner.settle(sent, Usage(64, 8, 0))
        self.job.trials.clear(row)
        self.job.queue.finish(row)


def test_a_suspect_that_never_ends_leaves_the_engine_to_others() -> None:
    rows = Deployment(40, takes_s={0: math.inf}, room=1)
    rows.run(5)
    rows.kill(rows.slots[0])
    assert rows.job.trials.limits == {0: SOLO}
    rows.slots[0].window.max_waiting = 32
    rows.run(TRIAL_S - 1)
    assert rows.answered_at_s == {}
    rows.run(10)

    assert sorted(rows.answered_at_s) == list(range(1, 40))
    assert not rows.slots[0].alone


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("hung", [range(8), range(20)])
def test_suspects_that_never_end_hold_up_neither_others_nor_each_other(
    hung: range, num_engines: int
) -> None:
    rows = Deployment(100, takes_s=dict.fromkeys(hung, math.inf), num_engines=num_engines)
    rows.run(5)
    for slot in rows.slots:
        rows.kill(slot)
    rows.run(20 * TRIAL_S)

    assert set(range(100)) - rows.answered_at_s.keys() == set(hung)
    assert rows.guilty == set() and rows.job.trials.limits == {}


@pytest.mark.parametrize("hung", [{}, {0: math.inf}, {0: math.inf, 1: math.inf, 99: 400.0}])
@pytest.mark.parametrize(("kills_after_s", "most"), [(1.0, 5), (20.0, 5), (100.0, 6)])
def test_the_guilty_row_is_found_beside_rows_that_never_end(
    hung: dict[int, float], kills_after_s: float, most: int
) -> None:
    killer = {30: kills_after_s}
    rows = Deployment(100, takes_s=hung | {30: math.inf}, kills_after_s=killer)
    rows.run(40 * TRIAL_S)

    assert rows.guilty == {30}
    assert set(range(100)) - rows.answered_at_s.keys() - {30} <= hung.keys()
    assert rows.num_deaths <= most


def test_deaths_beside_a_row_that_was_let_go_condemn_nobody() -> None:
    rows = Deployment(4, takes_s=dict.fromkeys(range(4), math.inf), room=4)
    for _ in range(4):
        rows.run(100 * TRIAL_S)
        assert len(rows.slots[0].in_flight) == 4
        rows.kill(rows.slots[0])

    assert rows.guilty == set()


def test_a_row_that_ran_before_makes_way_for_a_suspect_that_is_to_run_alone() -> None:
    rows = Deployment(3, takes_s={0: math.inf}, room=1)
    rows.run(2)
    rows.job.trials.limits = {1: SOLO}
    rows.slots[0].window.max_waiting = 8
    rows.run(TRIAL_S + 3)

    assert sorted(rows.answered_at_s) == [1, 2]


def test_rows_that_all_take_long_make_way_later() -> None:
    rows = Deployment(40, takes_s=dict.fromkeys(range(40), 300.0), room=2)
    rows.run(301)
    assert rows.slots[0].trial_s == 600
    rows.job.trials.limits = {5: SOLO}
    sent_at_s = dict(rows.sent_at_s)
    rows.run(400)

    assert {row for row, at_s in sent_at_s.items() if rows.sent_at_s[row] != at_s} == set()


def test_suspects_are_kept_from_calls_beside_a_replica_that_is_not_wanted() -> None:
    rows = Deployment(40, takes_s={0: math.inf}, room=1, num_engines=3)
    unwanted = rows.slots[2].engine
    assert isinstance(unwanted, AttachedEngine)
    rows.slots[2].models, unwanted.state = None, EnginePhase.STOPPED
    rows.run(5)
    rows.kill(rows.slots[0])
    are_apart = []
    for _ in range(10):
        rows.run(1)
        are_apart.append([slot.is_set_apart for slot in rows.slots])

    assert any(apart[:2].count(True) == 1 for apart in are_apart)


def test_suspects_go_to_another_engine_when_theirs_does_not_come_back() -> None:
    rows = Deployment(400, takes_s=dict.fromkeys(range(400), 3), room=4, num_engines=3)
    rows.run(5)
    rows.kill(rows.slots[0])
    rows.run(1)
    (apart,) = (slot for slot in rows.slots if slot.is_set_apart)
    assert isinstance(apart.engine, AttachedEngine)
    apart.engine.state = EnginePhase.UNREACHABLE
    rows.run(COMPANY_WAIT_S - 10)
    assert apart.is_set_apart and rows.job.trials.limits

    rows.run(COMPANY_WAIT_S)

    assert rows.job.queue.is_finished


def test_suspects_that_may_not_go_keep_no_engine_from_calls_but_one_that_runs_does() -> None:
    rows = Deployment(40, takes_s=dict.fromkeys(range(40), 3.0), room=4, num_engines=2)
    rows.run(2)
    first, are_apart = rows.slots[0], []
    rows.kill(first)
    rows._hand_out()
    are_apart.append(first.is_set_apart)
    rows.assigner.idle(rows.now_s)
    are_apart.append(first.is_set_apart)
    rows.run(3)
    assert first.alone
    rows.assigner.idle(rows.now_s)
    are_apart.append(first.is_set_apart)
    rows.assigner.waiting = {JOB}
    rows.run(1)
    rows._hand_out()
    are_apart.append(first.is_set_apart)

    assert rows.job.trials.limits
    assert are_apart == [True, False, True, False]


async def test_suspects_go_though_gateways_have_been_told_nothing_new(tmp_path: Path) -> None:
    config, home = tmp_path / "batchrun.yaml", Home(tmp_path / "home")
    config.write_text("engines: [{attach: 'http://127.0.0.1:9'}]")
    home.create()
    supervisor = Supervisor(load_deployment(config), home, {})
    (slot,) = supervisor.slots
    slot.drained_for.add("a test")
    supervisor._write_upstreams()
    slot.is_set_apart = True
    supervisor._write_upstreams()
    await supervisor.close()

    assert slot.apart_since_s is not None
