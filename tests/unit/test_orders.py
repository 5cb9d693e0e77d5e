"""Orders for the leader, in the database: taken once, withdrawn, answered, never left for later."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from postgres_server import PostgresServer

from batchrun.errors import BatchrunError, NotLeadingError
from batchrun.store import orders
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import list_settings
from batchrun.store.orders import Order, OrderAnswer

ORDER = Order("POST", "/offline", {"on": False})


@pytest.fixture
def store(postgres: PostgresServer) -> Iterator[Store]:
    """A new store."""
    made = open_store(postgres.new_store())
    yield made
    made.close()


def test_an_order_is_taken_once_and_its_answer_comes_back(store: Store) -> None:
    def carry_out() -> None:
        while not (taken := orders.take_orders(store)):
            pass
        assert list(taken.values()) == [ORDER]
        assert orders.take_orders(store) == {}
        (number,) = taken
        orders.answer_order(store, number, OrderAnswer(409, "no"))

    leader = threading.Thread(target=carry_out)
    leader.start()
    told = orders.ask_leader(store, ORDER, wait_s=30.0)
    leader.join()

    assert told == OrderAnswer(409, "no")
    assert list_settings(store, "") == {}


def test_an_order_that_nobody_takes_is_withdrawn(store: Store) -> None:
    with pytest.raises(NotLeadingError, match="nothing was done"):
        orders.ask_leader(store, ORDER, wait_s=0.0)

    assert orders.take_orders(store) == {}


def test_an_order_that_was_taken_and_not_answered_may_have_been_done(store: Store) -> None:
    def take() -> None:
        while not orders.take_orders(store):
            pass

    leader = threading.Thread(target=take)
    leader.start()
    with pytest.raises(BatchrunError, match="has not answered within 1 s") as found:
        orders.ask_leader(store, ORDER, wait_s=1.0)
    leader.join()

    assert not isinstance(found.value, NotLeadingError)


def test_what_somebody_left_behind_is_never_carried_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.give_order(store, ORDER)
    orders.answer_order(store, "1", OrderAnswer(200, "{}"))
    monkeypatch.setattr(orders, "LONGEST_S", -1.0)

    assert orders.take_orders(store) == {}
    assert list_settings(store, "") == {}
