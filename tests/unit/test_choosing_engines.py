"""Which engine a row goes to, where there are several."""

from __future__ import annotations

from batchrun.daemon.dispatch import Demand, choose_engine
from batchrun.daemon.engine_link import Slot
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.pool.row_queue import Window
from batchrun.routing.group_homes import GroupHomes
from batchrun.types import EnginePhase

ROWS = 8


def slot(name: str, nonce: str | None = "secret") -> Slot:
    engine = AttachedEngine(AttachedSettings(name=name, url="http://127.0.0.1:9"))
    engine.state = EnginePhase.READY
    return Slot(engine, uses_priority=False, window=Window(ROWS, 10**6), hint_nonce=nonce)


def fill(slot: Slot, num_rows: int) -> None:
    for _ in range(num_rows):
        slot.window.add(10, 0.0)
        slot.load.add(10)


def choose(
    slots: list[Slot], group: int, tokens: int = 10, *, is_urgent: bool = False
) -> Slot | None:
    demand = Demand(tokens, group, is_urgent=is_urgent)
    engine = choose_engine(dict(enumerate(slots)), demand, GroupHomes(), 9.0)
    return None if engine is None else slots[engine]


def test_a_group_waits_for_its_engine_while_the_other_has_enough_to_choose_from() -> None:
    own, other = slots = [slot("own"), slot("other")]
    fill(own, ROWS)
    fill(other, 2)
    assert choose(slots, group=0) is None
    assert choose(slots, group=1) is other
    assert choose(slots, group=0, is_urgent=True) is own
    other.window.remove(10)
    assert choose(slots, group=0) is other


def test_an_engine_that_runs_what_it_gets_takes_every_groups_rows() -> None:
    own, other = slots = [slot("own", None), slot("other", None)]
    fill(own, ROWS)
    fill(other, ROWS - 1)
    assert choose(slots, group=0) is other


def test_a_row_larger_than_the_window_goes_where_nothing_is() -> None:
    own, other = slots = [slot("own"), slot("other")]
    fill(own, 1)
    assert choose(slots, group=0, tokens=10**7) is other
