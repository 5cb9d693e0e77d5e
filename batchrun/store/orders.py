"""Orders for the daemon that leads, given in the home of another: a letter box in the database.

An order is taken once, by the leader of that moment, and is gone from the box before it is carried
out: what was not answered may have been done, and is never done twice.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, extract, func, insert, select

from batchrun.errors import BatchrunError, NotLeadingError
from batchrun.store.database import Store
from batchrun.store.jobs import read_leader
from batchrun.store.schema import settings

ORDER_PREFIX, ANSWER_PREFIX = "order:", "answer to order:"
LONGEST_S = 120.0
"""Whoever gives an order waits for less; one that is older was left behind by somebody who died,
and so was an answer."""
LOOK_S = 0.1
DATABASE_TIME = extract("epoch", func.clock_timestamp())
"""Clocks of machines differ."""


@dataclass(frozen=True, slots=True)
class Order:
    """A call of the daemon's control routes."""

    method: str
    path: str
    document: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """What the leader's daemon said: an HTTP status, and JSON text."""

    status: int
    text: str


def ask_leader(store: Store, order: Order, *, wait_s: float) -> OrderAnswer:
    """Have the leader of a PostgreSQL store carry out an order. Blocking.

    Raises NotLeadingError where nobody took it within `wait_s`: nothing was done then, and will
    not be; BatchrunError where it was taken and not answered; StoreError.
    """
    number = give_order(store, order)
    deadline_s = time.monotonic() + wait_s
    while (found := _take_out(store, ANSWER_PREFIX + number)) is None:
        if time.monotonic() >= deadline_s:
            raise _unanswered(store, number, wait_s)
        time.sleep(LOOK_S)
    return OrderAnswer(**found)


def give_order(store: Store, order: Order) -> str:
    """Lay an order into the box; returns its number."""
    number = secrets.token_hex(8)
    _put(store, ORDER_PREFIX + number, asdict(order))
    return number


def withdraw_order(store: Store, number: str) -> bool:
    """Take an order back; whether nobody had taken it."""
    return _take_out(store, ORDER_PREFIX + number) is not None


def take_orders(store: Store) -> dict[str, Order]:
    """The orders that have come, by their numbers; nobody else gets them. For the leader."""
    with store.read() as connection:
        if connection.execute(select(settings.c.key).where(_begins(ORDER_PREFIX))).first() is None:
            return {}
    with store.write() as connection:
        found = connection.execute(
            delete(settings).where(_begins(ORDER_PREFIX)).returning(settings)
        ).all()
        now_s = float(connection.execute(select(DATABASE_TIME)).scalar_one())
        _forget_answers(connection, now_s)
    letters = {row.key.removeprefix(ORDER_PREFIX): json.loads(row.value) for row in found}
    return {
        number: Order(**letter["content"])
        for number, letter in letters.items()
        if now_s - letter["at_s"] <= LONGEST_S
    }


def answer_order(store: Store, number: str, answer: OrderAnswer) -> None:
    """Tell whoever gave the order."""
    _put(store, ANSWER_PREFIX + number, asdict(answer))


def _unanswered(store: Store, number: str, waited_s: float) -> BatchrunError:
    leader = read_leader(store).name
    if withdraw_order(store, number):
        return NotLeadingError(
            f"{store.name}: {leader}, the last that led, did not take the command within "
            f"{waited_s:g} s; nothing was done"
        )
    return BatchrunError(
        f"{store.name}: {leader} took the command and has not answered within {waited_s:g} s; "
        "`batchrun status` shows whether it was done"
    )


def _put(store: Store, key: str, content: Mapping[str, object]) -> None:
    with store.write() as connection:
        at_s = float(connection.execute(select(DATABASE_TIME)).scalar_one())
        value = json.dumps({"at_s": at_s, "content": content})
        connection.execute(insert(settings).values(key=key, value=value))


def _take_out(store: Store, key: str) -> dict[str, Any] | None:
    wanted = settings.c.key == key
    with store.read() as connection:
        if connection.execute(select(settings.c.key).where(wanted)).first() is None:
            return None
    with store.write() as connection:
        removed = delete(settings).where(wanted).returning(settings.c.value)
        found = connection.execute(removed).scalar()
    return None if found is None else dict(json.loads(found)["content"])


def _forget_answers(connection: Connection, now_s: float) -> None:
    query = select(settings).where(_begins(ANSWER_PREFIX))
    for row in connection.execute(query).all():
        if now_s - json.loads(row.value)["at_s"] > LONGEST_S:
            connection.execute(delete(settings).where(settings.c.key == row.key))


def _begins(prefix: str) -> ColumnElement[bool]:
    return settings.c.key.startswith(prefix, autoescape=True)
