"""Templates compiled once per job: nested values in which strings are Jinja2.

A string that is one `{{ expression }}` keeps its native value where `native` is allowed.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Template, meta
from pydantic import JsonValue

from batchrun.inputs.images import image_url
from batchrun.jobspec.templating import (
    TEXT_LIMIT_CHARS,
    JobEnvironment,
    is_template,
    single_expression,
)

Values = Mapping[str, object]
Renderer = Callable[[Values], object]
_TEXT_KEYS = frozenset({"content", "text", "role", "name", "refusal"})


class Compiler:
    """Turns template values into renderers and notes which columns each key uses."""

    def __init__(
        self, environment: JobEnvironment, columns: Iterable[str], folders: Sequence[Path]
    ) -> None:
        self._environment = environment
        self._builtins = environment.globals.keys() - set(columns)
        self._folders = tuple(folders)
        self.columns_by_key: dict[str, frozenset[str]] = {}

    def compile(self, key: str, value: JsonValue, *, native: bool) -> Renderer:
        """A function from a row to the value that `value` stands for.

        The function raises ValueError, TypeError or Jinja2's errors for a row that does not fit.
        """
        if isinstance(value, str):
            return self._string(key, value, native=native)
        if isinstance(value, list):
            items = [
                self.compile(f"{key}[{index}]", item, native=native)
                for index, item in enumerate(value)
            ]
            return lambda row: [item(row) for item in items]
        if isinstance(value, dict):
            return self._mapping(key, value, native=native)
        return lambda row: value

    def _mapping(self, key: str, value: dict[str, JsonValue], *, native: bool) -> Renderer:
        if isinstance(value.get("image"), dict):
            return self._image_part(f"{key}.image", value["image"])
        fields = {
            name: self.compile(f"{key}.{name}", item, native=native or name not in _TEXT_KEYS)
            for name, item in value.items()
        }
        return lambda row: {name: field(row) for name, field in fields.items()}

    def _string(self, key: str, text: str, *, native: bool) -> Renderer:
        if not is_template(text):
            return lambda row: text
        undeclared = meta.find_undeclared_variables(self._environment.parse(text))
        self.columns_by_key[key] = frozenset(undeclared - self._builtins)
        if native and (expression := single_expression(self._environment, text)) is not None:
            evaluate = self._environment.compile_expression(expression, undefined_to_none=False)
            return lambda row: plain_value(evaluate(**row))
        template = self._environment.from_string(text)
        return lambda row: render_text(template, row)

    def _image_part(self, key: str, image: JsonValue) -> Renderer:
        column = str(image["column"]) if isinstance(image, dict) else ""
        detail = (
            {"detail": image["detail"]} if isinstance(image, dict) and "detail" in image else {}
        )
        self.columns_by_key[f"{key}.column"] = frozenset({column})

        def render(row: Values) -> object:
            url = image_url(row[column], self._folders)
            return {"type": "image_url", "image_url": {"url": url, **detail}}

        return render


def render_text(template: Template, row: Values) -> str:
    """The text of a template; ValueError when it grows over the limit."""
    pieces = list(_bounded(template.root_render_func(template.new_context(dict(row)))))
    return "".join(pieces)


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > TEXT_LIMIT_CHARS:
            raise ValueError(f"the text grows over {TEXT_LIMIT_CHARS >> 20} Mi characters")
        yield piece


def plain_value(value: object) -> object:
    """`value` as JSON types. Raises TypeError or ValueError when it has no JSON form."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number is NaN or infinite, which JSON cannot say")
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    # str() of an undefined value raises Jinja2's own explanation.
    raise TypeError(f"a {type(value).__name__} has no JSON form: {str(value)[:80]}")
