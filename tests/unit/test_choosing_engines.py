"""Which engine a row goes to, where there are several."""

from __future__ import annotations

from batchrun.daemon.slots import Place, Slot, choose_slot
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.pool.window import Window
from batchrun.routing.routers import make_router
from batchrun.types import EngineState

ROWS = 8


def slot(name: str, nonce: str | None = "secret") -> Slot:
    engine = AttachedEngine(AttachedSettings(name=name, url="http://127.0.0.1:9"))
    engine.state = EngineState.READY
    return Slot(engine, uses_priority=False, window=Window(ROWS, 10**6), hint_nonce=nonce)


def fill(slot: Slot, num_rows: int) -> None:
    for _ in range(num_rows):
        slot.window.add(10, 0.0)


def test_a_group_waits_for_its_engine_while_the_other_has_enough_to_choose_from() -> None:
    own, other = slots = [slot("own"), slot("other")]
    fill(own, ROWS)
    fill(other, 2)
    place = Place(group=0, tokens=10)
    assert choose_slot(slots, place, make_router(), 9.0) is None
    assert choose_slot(slots, Place(group=1, tokens=10), make_router(), 9.0) is other
    assert choose_slot(slots, Place(group=0, tokens=10, is_urgent=True), make_router(), 9.0) is own
    other.window.remove(10)
    assert choose_slot(slots, place, make_router(), 9.0) is other


def test_an_engine_that_runs_what_it_gets_takes_every_groups_rows() -> None:
    own, other = slots = [slot("own", None), slot("other", None)]
    fill(own, ROWS)
    fill(other, ROWS - 1)
    assert choose_slot(slots, Place(group=0, tokens=10), make_router(), 9.0) is other


def test_a_row_larger_than_the_window_goes_where_nothing_is() -> None:
    own, other = slots = [slot("own"), slot("other")]
    fill(own, 1)
    assert choose_slot(slots, Place(group=0, tokens=10**7), make_router(), 9.0) is other
