"""Orders for the leader, in the database: taken once, withdrawn, answered, never left for later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from postgres_server import PostgresServer

from batchrun.errors import BatchrunError, NotLeadingError, StoreUnreachableError
from batchrun.store import orders
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import list_settings, write_setting
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
    told = orders.ask_leader(store, ORDER)
    leader.join()

    assert told == OrderAnswer(409, "no")
    assert list_settings(store, "") == {}


def test_an_order_that_nobody_takes_is_withdrawn(store: Store) -> None:
    with pytest.raises(NotLeadingError, match="nothing was done"):
        orders.ask_leader(store, replace(ORDER, wait_s=0.0))

    assert orders.take_orders(store) == {}


def test_an_order_that_was_taken_and_not_answered_may_have_been_done(store: Store) -> None:
    def take() -> None:
        while not orders.take_orders(store):
            pass

    leader = threading.Thread(target=take)
    leader.start()
    with pytest.raises(BatchrunError, match="has not answered within 1 s") as found:
        orders.ask_leader(store, replace(ORDER, wait_s=1.0))
    leader.join()

    assert not isinstance(found.value, NotLeadingError)


def test_what_somebody_left_behind_is_never_carried_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.give_order(store, replace(ORDER, wait_s=-1.0))
    orders.answer_order(store, "1", OrderAnswer(200, "{}"))
    monkeypatch.setattr(orders, "LONGEST_S", -1.0)

    assert orders.take_orders(store) == {}
    orders.forget_answers(store)
    assert list_settings(store, "") == {}


def test_whoever_breaks_off_withdraws_the_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_store: Store, _number: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(orders, "take_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        orders.ask_leader(store, ORDER)

    assert orders.take_orders(store) == {}


def test_a_database_that_goes_for_a_moment_is_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def away_at_first(asked: Store, number: str) -> OrderAnswer | None:
        calls.append(number)
        if len(calls) == 1:
            raise StoreUnreachableError("away")
        orders.answer_order(asked, number, OrderAnswer(200, "{}"))
        monkeypatch.undo()
        return orders.take_answer(asked, number)

    monkeypatch.setattr(orders, "take_answer", away_at_first)

    assert orders.ask_leader(store, ORDER) == OrderAnswer(200, "{}")


def test_an_order_of_another_version_harms_no_other(store: Store) -> None:
    write_setting(store, orders.ORDER_PREFIX + "odd", {"content": {"way": "up"}})
    number = orders.give_order(store, ORDER)

    assert orders.take_orders(store) == {number: ORDER}
