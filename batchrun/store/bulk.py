"""Many new rows in few statements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql as postgresql_dialect
from sqlalchemy.dialects import sqlite as sqlite_dialect

STATEMENT_ROWS = (256, 32, 4, 1)
"""Rows of one statement. A statement for every row takes about one and a half times as long: the
driver gives the interpreter back for each and has to wait for it."""


def insert_new(connection: Connection, table: Table, rows: Sequence[Sequence[object]]) -> int:
    """Insert the rows (values in the order of the table's columns) whose key is not there yet.

    Returns how many that were. Of two rows with one key the first is inserted.
    """
    num_new = 0
    start = 0
    for size in STATEMENT_ROWS:
        while len(rows) - start >= size:
            num_new += _insert(connection, table, rows[start : start + size])
            start += size
    return num_new


def _insert(connection: Connection, table: Table, rows: Sequence[Sequence[object]]) -> int:
    text, names = _statement(connection.dialect.name, table, len(rows))
    values = tuple(chain.from_iterable(rows))
    parameters = values if names is None else dict(zip(names, values, strict=True))
    return connection.exec_driver_sql(text, parameters).rowcount


@cache
def _statement(name: str, table: Table, num_rows: int) -> tuple[str, tuple[str, ...] | None]:
    """The statement's text and, unless its parameters go by position, their names."""
    dialect = postgresql_dialect if name == "postgresql" else sqlite_dialect
    empty = [{column.name: None for column in table.columns}] * num_rows
    statement = dialect.insert(table).values(empty).on_conflict_do_nothing()
    compiled = statement.compile(dialect=dialect.dialect())
    return str(compiled), None if compiled.positiontup else tuple(compiled.params)
