"""Structured answers: a pydantic model asked for, and its fields as typed columns."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import polars as pl
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic.errors import PydanticUserError

from batchrun.errors import InputError
from batchrun.jobs.prompts.templating import is_template

_TYPES: Mapping[object, pl.DataType] = {
    str: pl.String(),
    int: pl.Int64(),
    float: pl.Float64(),
    bool: pl.Boolean(),
    datetime.date: pl.Date(),
    datetime.datetime: pl.Datetime("us"),
    datetime.time: pl.Time(),
    datetime.timedelta: pl.Duration("us"),
    decimal.Decimal: pl.Float64(),
    bytes: pl.Binary(),
}
"""The column types of plain fields; a field of any other type is JSON text."""


def response_format(schema: type[BaseModel]) -> JsonValue:
    """The field of a request that asks for answers in this form. Raises InputError."""
    try:
        form = schema.model_json_schema()
    except PydanticUserError as failure:
        raise InputError(
            f"the schema {schema.__name__} cannot be asked for: {failure.message}"
        ) from None
    body = {"name": schema.__name__, "schema": form, "strict": True}
    return {"type": "json_schema", "json_schema": _untemplated(body)}


def _untemplated(value: Any) -> JsonValue:
    """A value whose text is sent as it is: a request's strings are templates otherwise."""
    if isinstance(value, str):
        return f"{{% raw %}}{value}{{% endraw %}}" if is_template(value) else value
    if isinstance(value, list):
        return [_untemplated(item) for item in value]
    if isinstance(value, dict):
        return {name: _untemplated(item) for name, item in value.items()}
    plain: JsonValue = value
    return plain


def parsed(
    schema: type[BaseModel], texts: Sequence[str | None]
) -> tuple[pl.DataFrame, list[str | None]]:
    """(a column for each field, for each answer why it does not fit the schema or None)."""
    fields = schema.model_fields
    kinds = {name: column_type(field.annotation) for name, field in fields.items()}
    rows: list[dict[str, object]] = []
    faults: list[str | None] = []
    for text in texts:
        values, fault = _parse(schema, text)
        row = {name: _fitted(values.get(name), kinds[name]) for name in kinds}
        large = next((name for name in row if _is_too_large(row[name])), None)
        if large is not None:
            row, fault = {}, f"invalid_answer: {large}: is beyond 64 bits"
        rows.append(row)
        faults.append(fault)
    plain = {name: pl.String() if kind is None else kind for name, kind in kinds.items()}
    return pl.DataFrame(rows, schema=plain), faults


def _parse(schema: type[BaseModel], text: str | None) -> tuple[dict[str, Any], str | None]:
    if text is None:
        return {}, None
    try:
        found = schema.model_validate_json(text)
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return {}, f"invalid_answer: {place + ': ' if place else ''}{first['msg']}"
    return {name: getattr(found, name) for name in type(found).model_fields}, None


def column_type(annotation: Any, within: tuple[type, ...] = ()) -> pl.DataType | None:
    """The column type of a field of a model `within` others; None for one that only JSON text can
    hold, as what holds itself."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return column_type(arguments[0], within)
    if origin in {Union, types.UnionType}:
        some = [part for part in arguments if part is not type(None)]
        return column_type(some[0], within) if len(some) == 1 else None
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        return _TYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if origin in {list, tuple, set, frozenset, Sequence}:
        return _list_type(arguments, within)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        kinds = {type(member.value) for member in annotation}
        return _TYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None if annotation in within else _struct_type(annotation, within)
    return _TYPES.get(annotation)


def _list_type(arguments: tuple[Any, ...], within: tuple[type, ...]) -> pl.DataType | None:
    items = {part for part in arguments if part is not ...}
    inner = column_type(items.pop(), within) if len(items) == 1 else None
    return None if inner is None else pl.List(inner)


def _struct_type(model: type[BaseModel], within: tuple[type, ...]) -> pl.DataType | None:
    within = (*within, model)
    fields = model.model_fields.items()
    kinds = {name: column_type(field.annotation, within) for name, field in fields}
    whole = {name: kind for name, kind in kinds.items() if kind is not None}
    return pl.Struct(whole) if whole and len(whole) == len(kinds) else None


def _fitted(value: Any, kind: pl.DataType | None) -> object:
    """The value as a column of this type takes it."""
    if value is None:
        return None
    if kind is None:
        return json.dumps(_plain(value), ensure_ascii=False, default=str)
    return _in_utc(_plain(value))


def _in_utc(value: object) -> object:
    """The value with each time of a zone as that of UTC, without one, as polars has it."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        with suppress(OverflowError):
            value = value.astimezone(datetime.UTC)
        return value.replace(tzinfo=None)
    if isinstance(value, dict):
        return {name: _in_utc(item) for name, item in value.items()}
    return [*map(_in_utc, value)] if isinstance(value, list) else value


def _is_too_large(value: object) -> bool:
    """Whether a whole number or a time in it, in microseconds, needs more than 64 bits."""
    if isinstance(value, datetime.timedelta):
        value = value // datetime.timedelta(microseconds=1)
    if isinstance(value, int):
        return not -(2**63) <= value < 2**63
    if isinstance(value, dict):
        return any(map(_is_too_large, value.values()))
    return isinstance(value, list) and any(map(_is_too_large, value))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return value
