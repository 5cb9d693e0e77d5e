"""A job's beginning: how much of it lies before a call that comes in between."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from job_builders import make_tree_job
from msgspec.structs import replace

from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.engine_link import SCHEDULER_WINDOW, EngineLink, Slot
from batchrun.daemon.in_flight import (
    ARRIVED_S,
    MAX_BODIES_BYTES,
    ON_THE_WAY_TOKENS,
    Assignment,
    EngineSlot,
    LargeBodies,
    memory_bytes,
)
from batchrun.daemon.job import ActiveJob
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.engine.sockets import EngineSockets
from batchrun.pool.row_queue import Window
from batchrun.types import Usage
from batchrun.wire import ClassTelemetry, Telemetry

CHUNK_TOKENS = 64
LONG_CHUNKS = 2_048
"""A row of 131,072 tokens, as of a hundred thousand words."""
ROW_CHUNKS = 160
TICK_S = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class ToldSlot(EngineSlot):
    """An engine whose scheduler tells how many rows it has seen."""

    told: int | None = None

    @property
    def num_arrived(self) -> int | None:
        return self.told


@dataclass
class Server:
    """Tokenizes one row after another, so many tokens in a tick."""

    slot: ToldSlot
    is_telling: bool
    tokens_a_tick: float
    waiting: deque[float] = field(default_factory=deque)
    num_seen: int = 0

    def tick(self) -> None:
        left = self.tokens_a_tick
        while self.waiting and left > 0:
            done = min(left, self.waiting[0])
            left -= done
            self.waiting[0] -= done
            if not self.waiting[0]:
                self.waiting.popleft()
                self.num_seen += 1
        if self.is_telling:
            self.slot.told = self.num_seen


def most_waiting(*, is_telling: bool, tokens_a_tick: float = 20_000) -> tuple[float, int]:
    """The most tokens that ever lay before a call that came, while rows fill an engine's window;
    and how many rows came in."""
    slot = ToldSlot(window=Window(*SCHEDULER_WINDOW), told=0 if is_telling else None)
    texts = ["b" * LONG_CHUNKS, *(chr(ord("c") + i) + "c" * ROW_CHUNKS for i in range(100))]
    assigner: Assigner[ActiveJob, ToldSlot] = Assigner([slot])
    assigner.join(make_tree_job("long", texts), deadline_at=None)
    server = Server(slot, is_telling, tokens_a_tick)
    most = 0.0
    for tick in range(300):
        while sent := assigner.assign(tick * TICK_S)[0]:
            server.waiting.extend(row.tokens for row in sent)
        most = max(most, sum(server.waiting))
        server.tick()
    return most, len(slot.in_flight)


def test_no_more_lies_before_a_call_than_one_row_or_what_may_be_on_the_way() -> None:
    most, num_rows = most_waiting(is_telling=True)

    assert most <= max(ON_THE_WAY_TOKENS, LONG_CHUNKS * CHUNK_TOKENS)
    assert num_rows == 101


def test_an_engine_that_tells_nothing_gets_rows_at_a_steady_rate() -> None:
    most, num_rows = most_waiting(is_telling=False)

    assert most > 2 * ON_THE_WAY_TOKENS
    assert num_rows == 101


def test_rows_that_never_show_hold_the_others_up_for_a_while_only() -> None:
    slot = ToldSlot(window=Window(*SCHEDULER_WINDOW), told=0)
    assigner: Assigner[ActiveJob, ToldSlot] = Assigner([slot])
    texts = [letter * LONG_CHUNKS for letter in "abc"]
    assigner.join(make_tree_job("lost", texts), deadline_at=None)

    sent = [len(assigner.assign(now_s)[0]) for now_s in (0.0, 5.0, ARRIVED_S + 0.1)]

    assert sent == [1, 0, 1]


def test_a_row_of_many_tokens_makes_its_tick_longer() -> None:
    window = Window(9, 10**9)
    window.add(200_000, 0.0)

    assert window.opens_at_s(1, 0.2) == pytest.approx(0.4)
    assert window.opens_at_s(1, 0.5) == 0.5


def test_jobs_with_large_bodies_rest_while_these_take_all_room_and_others_go_on() -> None:
    assigner: Assigner[ActiveJob, EngineSlot] = Assigner([
        EngineSlot(window=Window(*SCHEDULER_WINDOW))
    ])
    for name, num_chunks in {"texts": ROW_CHUNKS, "short": 1, "pictures": 1, "few": 1}.items():
        assigner.join(make_tree_job(name, ["a" * num_chunks]), deadline_at=None)
    row = {each.job.id: each for each in assigner.assign(0.0)[0]}
    bodies = LargeBodies()

    with ExitStack() as in_flight:
        in_flight.enter_context(bodies.holding(row["texts"], 16 * row["texts"].tokens))
        in_flight.enter_context(bodies.holding(row["short"], 64 << 10))
        in_flight.enter_context(bodies.holding(row["pictures"], MAX_BODIES_BYTES - 100_000))
        assert not bodies.resting
        with bodies.holding(row["few"], 100_000):
            assert bodies.resting == {"pictures", "few"}
        assert not bodies.resting
    with bodies.holding(row["pictures"], 2 * MAX_BODIES_BYTES):
        assert bodies.resting == {"pictures", "few"}, "though one has none in flight"
        bodies.forget_all_but({"pictures"})
        assert bodies.resting == {"pictures"}
        bodies.forget_all_but(())
        assert bodies.resting == {"pictures"}, "it has one in flight"
    assert not bodies.resting
    with bodies.holding(row["pictures"], 1), bodies.holding(row["few"], MAX_BODIES_BYTES):
        assert bodies.resting == {"few"}, "the other sends small ones"


def test_bodies_are_bounded_by_the_memory_of_the_machine_or_of_the_container(
    tmp_path: Path,
) -> None:
    (tmp_path / "memory").mkdir()
    limits = {"memory.max": "max\n", "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}
    for name, limit in limits.items():
        (tmp_path / name).write_text(limit)
    assert memory_bytes(tmp_path) == psutil.virtual_memory().total
    assert max(1 << 30, memory_bytes() // 8) == MAX_BODIES_BYTES

    for name, limit in limits.items():
        (tmp_path / name).write_text("4096\n")
        assert memory_bytes(tmp_path) == 4096
        (tmp_path / name).write_text(limit)


def test_a_job_that_waits_for_its_large_bodies_has_a_pace() -> None:
    bodies, slot = LargeBodies(), EngineSlot(window=Window(*SCHEDULER_WINDOW))
    assigner: Assigner[ActiveJob, EngineSlot] = Assigner([slot], at_limit=bodies.resting)
    assigner.join(make_tree_job("pictures", ["a"] * 400), deadline_at=None)
    in_flight = deque[tuple[Assignment[ActiveJob, EngineSlot], ExitStack]]()

    for second in range(100):
        for row in assigner.assign(float(second))[0]:
            in_flight.append((row, ExitStack()))
            in_flight[-1][1].enter_context(bodies.holding(row, MAX_BODIES_BYTES // 4))
        assigner.assign(second + 0.5)
        row, held = in_flight.popleft()
        held.close()
        slot.release(row)
        assigner.settle(row, Usage(100, 100, 0))

    assert len(in_flight) < SCHEDULER_WINDOW[0], "the window is never full"
    assert assigner.turns.pace()[0] == pytest.approx(200, rel=0.1)
    assert assigner.turns.completions().keys() == {"pictures"}
    assert slot.load.speed == 1.0, "an engine that waits for rows is not slow"


def test_a_scheduler_tells_of_all_rows_that_it_has(tmp_path: Path) -> None:
    engine = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9000"))
    slot = Slot(engine, uses_priority=False, window=Window(9, 10**9))
    slot.link = EngineLink(EngineSockets(tmp_path / "engine"), "one")
    before = slot.num_arrived
    told = Telemetry("start", 0.0, "echo", 512, is_offline_on=True)
    offline = ClassTelemetry(num_running=3, num_waiting=4)
    slot.link._remember(time.monotonic(), replace(told, offline=offline))

    assert (before, slot.num_arrived) == (None, 7)
    assert math.isfinite(slot.opens_at_s(10**6, 0.0))
