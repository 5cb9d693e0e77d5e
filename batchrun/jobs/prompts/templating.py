"""Templates compiled once per job: nested values in which strings are Jinja2.

The environment is sandboxed and strict, without loader or globals of ours. A string that is one
`{{ expression }}` keeps its native value where `native` is allowed. Image columns become data URLs;
their paths stay within the folder of the input file.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import do_batch, make_attrgetter, sync_do_slice
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from pydantic import JsonValue

from batchrun.errors import shortened
from batchrun.media.images import IMAGE_LIMIT_BYTES, MEDIA_KEYS, ImageError, data_url
from batchrun.strict import parse_json


def image_url(value: object, folder: Path | None) -> str:
    """The URL for a column's value: a path below `folder`, bytes, a URL, or a struct
    with `bytes` or `path` as Hugging Face writes them.

    Raises ImageError with the reason when it is none of these, or no image, or too large a one.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return data_url(value)
    if not isinstance(value, str) or not value:
        raise ImageError("the image column holds neither a path nor bytes")
    if value.startswith(("data:", "http://", "https://")):
        return value
    try:
        with _confined(value, folder).open("rb") as file:
            return data_url(file.read(IMAGE_LIMIT_BYTES + 1))
    except (OSError, RuntimeError) as failure:
        why = getattr(failure, "strerror", "its links lead in a circle")
        raise ImageError(f"image {shortened(value)!r} cannot be read: {why}") from None
    except ImageError as problem:
        raise ImageError(f"image {shortened(value)!r}: {problem}") from None


def _confined(name: str, folder: Path | None) -> Path:
    if len(name) > _MAX_PATH_CHARS:
        raise ImageError("is no path; base64 needs data:image/...;base64, before it")
    if folder is None:
        raise ImageError("is a path, which needs an input on the local disk")
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) and not _is_cached(path, root):
        raise ImageError("lies outside the folder of the input file")
    if not path.is_file():
        raise ImageError("no such file beside the input file")
    return path


def _is_cached(path: Path, folder: Path) -> bool:
    """Whether it is what a data set's snapshot, in the Hugging Face cache, has links to."""
    blobs, file_folders = path.parent, (folder, *folder.parents)
    is_of_set = blobs.name == "blobs" and blobs.parent.name.startswith("datasets--")
    return is_of_set and blobs.parent / "snapshots" in file_folders


TEXT_LIMIT_CHARS = 64 << 20
"""Longest text that a template may produce."""

_MAX_PATH_CHARS = 4_096
_SIZED = (str, bytes, list, tuple)


class JobEnvironment(ImmutableSandboxedEnvironment):
    """Jinja2 without reach into Python, and with what a number can make bounded in size: results of
    `*` and `**`, texts and bytes of a given width, batches and slices."""

    intercepted_binops = frozenset({"%", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("center", "format", "indent"):
            self.filters[name] = _bounding(name, self.filters[name])
        self.filters |= {"batch": _batch, "slice": _slice}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses operators whose result would be enormous (SecurityError, ValueError)."""
        if operator == "**" and abs(right) > 64:
            raise SecurityError("the exponent is over 64")
        if operator == "*":
            _check_size(_product_size(left, right))
        elif operator == "%" and isinstance(left, str | bytes):
            text = left.decode("latin-1") if isinstance(left, bytes) else left
            _check_size(_padding_chars(text, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
        """Refuses methods of texts, bytes and integers whose result is enormous (ValueError)."""
        # The sandbox wraps `format`.
        method = getattr(called, "__wrapped__", called)
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str) and name in {"format", "format_map"}:
            values = args[0] if name == "format_map" and args else named
            _BoundedFormatter(self).vformat(text, args, values)
        elif isinstance(text, str | bytes) and name == "expandtabs":
            num_tabs = text.count("\t") if isinstance(text, str) else text.count(b"\t")
            _check_widths(num_tabs, *args, *named.values())
        elif isinstance(text, str | bytes | int) and name in _WIDTH_METHODS:
            _check_widths(1, *args, *named.values())
        return super().call(context, called, *args, **named)


class _RowEnvironment(JobEnvironment):
    """Keys go before methods that are not called, and null is no part of a text."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The value of a key, or else an attribute; the other way round where that is called."""
        name = attribute.lstrip(_CALLED)
        is_key = name == attribute and isinstance(obj, Mapping) and name in obj
        return obj[name] if is_key else super().getattr(obj, name)

    def _generate(self, source: nodes.Template, *names: Any, **how: Any) -> str:
        """Both sides of `~` go through the filter `string`, which refuses null."""
        for call in source.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr):
                call.node.attr = _CALLED + call.node.attr
        for each in source.find_all(nodes.Concat):
            each.nodes = [nodes.Filter(it, "string", [], [], None, None) for it in each.nodes]
        return super()._generate(source, *names, **how)


def make_environment() -> JobEnvironment:
    """A fresh environment for one job's templates."""
    environment = _RowEnvironment(
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        finalize=_refuse_null,
    )
    for name in _TEXT_FILTERS:
        environment.filters[name] = _keeping_null(name, environment.filters[name])
    environment.filters |= {"fromjson": _from_json, "join": _join, "tojson": _to_json}
    return environment


def is_template(text: str) -> bool:
    """Whether Jinja2 would do anything to `text`."""
    return "{{" in text or "{%" in text or "{#" in text


def single_expression(environment: JobEnvironment, text: str) -> str | None:
    """The expression of a template that is one `{{ expression }}` and nothing else."""
    stripped = text.strip()
    body = environment.parse(stripped).body
    is_whole = stripped.startswith("{{") and stripped.endswith("}}")
    if len(body) != 1 or not isinstance(body[0], nodes.Output) or not is_whole:
        return None
    parts = body[0].nodes
    if len(parts) != 1 or isinstance(parts[0], nodes.TemplateData):
        return None
    return stripped[2:-2].strip("-+")


def syntax_problem(text: str) -> tuple[int, str] | None:
    """(line within the template, what is wrong), or None when the template is well-formed."""
    environment = make_environment()
    try:
        environment.from_string(text)
    except TemplateSyntaxError as failure:
        problem = failure.message or "syntax error"
        if problem.startswith("expected token 'end of print statement'"):
            problem += " (a column's name with a space in it cannot be written here; rename it)"
        return failure.lineno, problem
    return None


def _refuse_null(value: object) -> object:
    if value is None:
        raise ValueError("a value is null; write {{ column | default('', true) }} to allow it")
    if isinstance(value, bytes):
        raise ValueError("a value is bytes, not text")
    if callable(value) and not isinstance(value, StrictUndefined):
        raise ValueError("a value is a function, not text")
    return value


_CALLED = "\0"
"""Before the name of an attribute that is called."""
_TEXT_FILTERS = (
    {"capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "replace"}
    | {"safe", "string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize"}
    | {"wordcount", "wordwrap"}
)


def _keeping_null(name: str, text_filter: Callable[..., Any]) -> Callable[..., Any]:
    """Null stays null, for conditions and `default`; a text may not be made of it."""
    first = int(hasattr(text_filter, "jinja_pass_arg"))

    @wraps(text_filter)
    def checked(*values: object, **settings: object) -> object:
        if values[first] is None and name != "string":
            return None
        if name in {"format", "replace", "string"} and any(value is None for value in values):
            _refuse_null(None)
        return text_filter(*values, **settings)

    return checked


@pass_environment
def _join(
    environment: JobEnvironment,
    items: Iterable[object],
    d: object = "",
    attribute: str | int | None = None,
) -> str:
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    return str(d).join(str(_refuse_null(item)) for item in items)


_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "to_bytes", "zfill"})
_MAX_SLICES = 1 << 20
_CONVERSION = re.compile(r"%(?:\([^()]*([()]))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?(.)", re.DOTALL)
"""How its key ends, its width, its precision, its kind."""


def _check_size(size: int) -> None:
    if size > TEXT_LIMIT_CHARS:
        raise ValueError(f"a value grows over {TEXT_LIMIT_CHARS >> 20} Mi characters or items")


def _check_widths(num_times: int, *widths: object) -> None:
    """Of what a filter or method is given, any number may be the width, or the length of a text."""
    sizes = (len(each) if isinstance(each, str) else each for each in widths)
    _check_size(num_times * max((size for size in sizes if isinstance(size, int)), default=0))


def _bounding(name: str, text_filter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(text_filter)
    def checked(value: Any, *given: Any, **named: Any) -> object:
        if name == "format":
            _check_size(_padding_chars(str(value), named or given))
        else:
            num_lines = len(f"{value}\n".splitlines()) if name == "indent" else 1
            _check_widths(num_lines, *given, *named.values())
        return text_filter(value, *given, **named)

    return checked


def _batch(items: Iterable[Any], linecount: int, fill_with: object = None) -> Iterator[list[Any]]:
    """Only what fills the last batch up can be more than the items."""
    _check_size(0 if fill_with is None else linecount)
    return do_batch(items, linecount, fill_with)


def _slice(items: Collection[Any], slices: int, fill_with: object = None) -> Iterator[list[Any]]:
    if slices > _MAX_SLICES:
        raise ValueError(f"slice makes over {_MAX_SLICES >> 20} Mi lists")
    return sync_do_slice(items, slices, fill_with)


def _padding_chars(text: str, values: object) -> int:
    """The sum of the widths and precisions of a `%` format."""
    given = iter(values if isinstance(values, tuple) else ())
    num_chars = 0
    for key_end, *sizes, kind in _CONVERSION.findall(text):
        if key_end == "(":
            raise ValueError("a key of a % format has parentheses in it")
        for size in sizes:
            found = next(given, 0) if size == "*" else int(size or 0)
            num_chars += abs(found) if isinstance(found, int) else 0
        if kind != "%":
            next(given, None)
    return num_chars


class _BoundedFormatter(SandboxedFormatter):
    """`format` with the sum of its widths and precisions bounded."""

    _num_chars = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._num_chars += sum(map(int, re.findall(r"\d+", format_spec)))
        _check_size(self._num_chars)
        return super().format_field(value, format_spec)


def _from_json(text: object) -> object:
    return parse_json(text if isinstance(text, bytes) else str(text).encode())


def _to_json(value: object, indent: int | str | None = None) -> str:
    text = json.dumps(value, ensure_ascii=False, default=_in_json)
    if indent is None:
        return text
    _check_widths(len(text), indent)
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, default=_in_json)
    return "".join(_bounded(encoder.iterencode(value)))


def _in_json(value: object) -> str | float:
    if isinstance(value, decimal.Decimal):
        return float(value)
    isoformat: Callable[[], str] | None = getattr(value, "isoformat", None)
    if isoformat is None:
        raise TypeError(f"a value of type {type(value).__name__} has no JSON form")
    return isoformat()


def _product_size(left: object, right: object) -> int:
    if isinstance(left, _SIZED) and isinstance(right, int):
        return len(left) * right
    if isinstance(right, _SIZED) and isinstance(left, int):
        return len(right) * left
    return 0


Values = Mapping[str, object]
Renderer = Callable[[Values, Path | None], object]
"""Of a row and the folder of its file."""
_TEXT_KEYS = frozenset({"content", "text", "role", "name", "refusal"})


class Compiler:
    """Turns template values into renderers and notes which columns each key uses, and whether
    what was compiled so far may name images: text alone cannot. The other names of a key are
    columns too, and mean something else in a template."""

    def __init__(self, endpoint: str, columns: Iterable[str]) -> None:
        self._endpoint = endpoint
        self._environment = make_environment()
        self._columns = tuple(columns)
        for name in self._columns:
            self._environment.globals.pop(name, None)
        self.columns_by_key: dict[str, frozenset[str]] = {}
        self.other_names_by_key: dict[str, frozenset[str]] = {}
        self.may_name_media = False

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
            return lambda row, folder: [item(row, folder) for item in items]
        if isinstance(value, dict):
            return self._mapping(key, value, native=native)
        return lambda row, folder: value

    def _mapping(self, key: str, value: dict[str, JsonValue], *, native: bool) -> Renderer:
        self.may_name_media |= not MEDIA_KEYS.keys().isdisjoint(value)
        if key.startswith("input.") and isinstance(value.get("image"), dict):
            self.may_name_media = True
            return self._image_part(f"{key}.image", value["image"])
        fields = {
            name: self.compile(f"{key}.{name}", item, native=native or name not in _TEXT_KEYS)
            for name, item in value.items()
        }
        return lambda row, folder: {name: field(row, folder) for name, field in fields.items()}

    def _string(self, key: str, text: str, *, native: bool) -> Renderer:
        if not is_template(text):
            return lambda row, folder: text
        parsed = self._environment.parse(text)
        self.columns_by_key[key] = frozenset(meta.find_undeclared_variables(parsed))
        self.other_names_by_key[key] = _own_names(parsed) & {*self._columns}
        if native and (expression := single_expression(self._environment, text)) is not None:
            self.may_name_media = True
            evaluate = self._environment.compile_expression(expression, undefined_to_none=False)
            return lambda row, folder: plain_value(evaluate(row))
        template = self._environment.from_string(text)
        # A chain of dicts until now; to copy it for each row takes longer than all the rest.
        template.globals = dict(template.globals)
        return lambda row, folder: render_text(template, row)

    def _image_part(self, key: str, image: JsonValue) -> Renderer:
        column = str(image["column"]) if isinstance(image, dict) else ""
        detail = (
            {"detail": image["detail"]} if isinstance(image, dict) and "detail" in image else {}
        )
        self.columns_by_key[f"{key}.column"] = frozenset({column})

        def render(row: Values, folder: Path | None) -> object:
            url = image_url(row[column], folder)
            if self._endpoint == "/v1/responses":
                return {"type": "input_image", "detail": "auto", "image_url": url, **detail}
            return {"type": "image_url", "image_url": {"url": url, **detail}}

        return render


_ARGUMENTS = ("args", "kwargs")


def _own_names(parsed: nodes.Template) -> frozenset[str]:
    """The names that Jinja2 gives a meaning of its own, except where arguments have them."""
    calls = parsed.find_all((nodes.Call, nodes.Filter, nodes.Test))
    arguments = [each for call in calls for each in call.iter_child_nodes(only=_ARGUMENTS)]
    given = {id(part) for each in arguments for part in (each, *each.find_all(nodes.Const))}
    used = [each.value for each in parsed.find_all(nodes.Const) if id(each) not in given]
    constants = {str(value) for value in used if value is None or isinstance(value, bool)}
    names = {each.name for each in parsed.find_all(nodes.Name)} & {"self"}
    return frozenset({*names, *constants, *map(str.lower, constants)})


def render_text(template: Template, row: Values) -> str:
    """The text of a template; ValueError when it grows over the limit."""
    pieces = list(_bounded(template.root_render_func(template.new_context(dict(row)))))
    return "".join(pieces)


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        _check_size(num_chars)
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
