"""Orders for the daemon that leads, given in the home of another: a letter box in the database.

An order is taken once, by the leader of that moment, and is gone from the box before it is carried
out: what was not answered may have been done, and is never done twice.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, extract, func, insert, select

from batchrun.errors import BatchrunError, NotLeadingError, StoreError
from batchrun.store.database import Store
from batchrun.store.jobs import read_leader
from batchrun.store.schema import settings

log = logging.getLogger(__name__)

ORDER_PREFIX, ANSWER_PREFIX = "order:", "answer to order:"
LONGEST_S = 120.0
"""Nobody waits for longer for an answer; one that is older was left by somebody who died."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Order:
    """A call of the daemon's control routes, and for how long its giver waits: then it is void."""

    method: str
    path: str
    document: Mapping[str, object] | None = None
    wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """What the leader's daemon said: an HTTP status, and JSON text."""

    status: int
    text: str


def ask_leader(store: Store, order: Order) -> OrderAnswer:
    """Have the leader of a PostgreSQL store carry out an order. Blocking.

    Raises NotLeadingError where nobody took it while it was waited for: nothing was done then, and
    will not be; BatchrunError where it was taken and not answered; StoreError where it could not
    be given. Whoever breaks off withdraws it.
    """
    number = give_order(store, order)
    deadline_s = time.monotonic() + order.wait_s
    try:
        while time.monotonic() < deadline_s:
            with suppress(StoreError):
                if (found := take_answer(store, number)) is not None:
                    return found
            time.sleep(LOOK_S)
    except BaseException:
        with suppress(StoreError):
            withdraw_order(store, number)
        raise
    if withdraw_order(store, number):
        raise NotLeadingError(
            f"{store.name}: {read_leader(store).name}, the last that led, did not take the command "
            f"within {order.wait_s:g} s; nothing was done"
        )
    if (found := take_answer(store, number)) is not None:
        return found
    raise BatchrunError(
        f"{store.name}: {read_leader(store).name} took the command and has not answered within "
        f"{order.wait_s:g} s; `batchrun status` shows whether it was done"
    )


def give_order(store: Store, order: Order) -> str:
    """Lay an order into the box; returns its number."""
    number = secrets.token_hex(8)
    _put(store, ORDER_PREFIX + number, asdict(order))
    return number


def withdraw_order(store: Store, number: str) -> bool:
    """Take an order back; whether nobody had taken it."""
    return _take_out(store, ORDER_PREFIX + number) is not None


def take_answer(store: Store, number: str) -> OrderAnswer | None:
    """What the leader said to an order, if it has said anything; it is gone then."""
    found = _take_out(store, ANSWER_PREFIX + number)
    return None if found is None else OrderAnswer(**found)


def take_orders(store: Store) -> dict[str, Order]:
    """The orders that have come, by their numbers; nobody else gets them. For the leader."""
    with store.read() as connection:
        if connection.execute(select(settings.c.key).where(_begins(ORDER_PREFIX))).first() is None:
            return {}
    with store.write() as connection:
        found = connection.execute(
            delete(settings).where(_begins(ORDER_PREFIX)).returning(settings)
        ).all()
        now_s = _now_s(connection)
    taken = {}
    for row in found:
        try:
            letter = json.loads(row.value)
            order = Order(**letter["content"])
            if now_s - letter["at_s"] <= order.wait_s:
                taken[row.key.removeprefix(ORDER_PREFIX)] = order
        except (KeyError, TypeError, ValueError) as problem:
            log.error("an order that cannot be read is dropped: %r", problem)
    return taken


def answer_order(store: Store, number: str, answer: OrderAnswer) -> None:
    """Tell whoever gave the order."""
    _put(store, ANSWER_PREFIX + number, asdict(answer))


def forget_answers(store: Store) -> None:
    """Remove what nobody took. For the leader."""
    with store.write() as connection:
        now_s = _now_s(connection)
        for row in connection.execute(select(settings).where(_begins(ANSWER_PREFIX))).all():
            with suppress(KeyError, TypeError, ValueError):
                if now_s - json.loads(row.value)["at_s"] <= LONGEST_S:
                    continue
            connection.execute(delete(settings).where(settings.c.key == row.key))


def _put(store: Store, key: str, content: Mapping[str, object]) -> None:
    with store.write() as connection:
        value = json.dumps({"at_s": _now_s(connection), "content": content})
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


def _now_s(connection: Connection) -> float:
    """By the database: clocks of machines differ."""
    return float(connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one())


def _begins(prefix: str) -> ColumnElement[bool]:
    """PostgreSQL reads all settings to find these: its index is in the order of a locale."""
    return settings.c.key.startswith(prefix, autoescape=True)
