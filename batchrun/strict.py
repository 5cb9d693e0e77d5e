"""Strict readers: JSON that strangers send, and YAML whose problems name file, line and key.

JSON is what replies, lines of inputs and bodies of calls are made of. What `parse_json` takes,
every part behind it reads alike and can write again.

YAML is for job files and `batchrun.yaml`. The text is read as YAML 1.2 by ruamel.yaml, checked by a
pydantic model, and pydantic's complaints are led back to the lines they come from.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, from_json
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from batchrun.errors import InputError, suggestion

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


LARGE_JSON_BYTES = 1 << 20
"""Texts above this are looked over before anything is built of them, and built one at a time."""
MAX_JSON_PARTS = 500_000
"""Objects, lists and keys of one text: some 100 bytes of memory each."""
MAX_JSON_ITEMS = 4_000_000
"""Commas of one text: a vector of numbers has one for 32 bytes of memory."""
REPLY_TIMES = 20
"""So much more may an engine's reply hold, all that 64 MiB of logprobs do: each has 5 parts."""
_PIECE_BYTES = 1 << 20
_building = threading.Lock()


def parse_json(text: bytes, *, times: int = 1) -> object:
    """The value that a JSON text stands for. Raises ValueError, with the reason.

    Refused are: what is not UTF-8, a byte order mark, lone surrogates, NaN and Infinity, whole
    numbers of over 4,300 digits, values nested over 200 deep, and texts of which more than
    `MAX_JSON_PARTS` or `MAX_JSON_ITEMS`, so many `times`, would be built. Of a large text other
    threads are held up for a few milliseconds at a time until it is known to be no trap.
    """
    if len(text) <= LARGE_JSON_BYTES:
        return from_json(text, allow_inf_nan=False, cache_strings="keys")
    with _building:
        _check_size(text, times)
        return from_json(text, allow_inf_nan=False, cache_strings="keys")


def parse_reply(text: bytes) -> object:
    """What an engine's JSON stands for. Raises ValueError."""
    return parse_json(text, times=REPLY_TIMES)


def _check_size(text: bytes, times: int) -> None:
    """Count what stands outside of strings. Raises ValueError."""
    num_parts = num_items = 0
    rest, is_inside = b"", False
    for start in range(0, len(text), _PIECE_BYTES):
        piece = rest + text[start : start + _PIECE_BYTES]
        num_slashes = len(piece) - len(piece.rstrip(b"\\"))
        rest = b"\\" * (num_slashes % 2)
        piece = piece.removesuffix(rest).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        num_parts += sum(map(outside.count, (b"{", b"[", b":")))
        num_items += outside.count(b",")
        if num_parts > MAX_JSON_PARTS * times or num_items > MAX_JSON_ITEMS * times:
            raise ValueError("it holds too many values")


M = TypeVar("M", bound=BaseModel)
NOTHING = re.compile(r"(?!)")
_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}

FILE_LIMIT_BYTES = 1 << 20
NODE_LIMIT = 100_000
DEPTH_LIMIT = 64
"""Aliases can make a small file expand without end; nobody writes this much by hand."""


_PLAIN_WORDS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "too_short": "must not be empty",
    "model_type": "must be a mapping of keys to values",
}
"""What pydantic says in the words of Python, in the words of YAML."""


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML file: its values, and the line (from 1) on which each key stands.

    `lines` has dotted keys, `input.messages[0].role`; the empty key is the whole file.
    """

    path: Path
    values: Mapping[str, object]
    lines: Mapping[str, int]

    def where(self, key: str) -> str:
        """`FILE:LINE: KEY` of a key, or of its nearest parent that is in the file."""
        parent = key
        while parent not in self.lines:
            parent = parent[: max(parent.rfind("."), parent.rfind("["), 0)]
        prefix = f"{self.path}:{self.lines[parent]}"
        return f"{prefix}: {key}" if key else prefix


class Strict(BaseModel):
    """Refuses keys that it does not know, and true and false for numbers; does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_is_a_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool):
            kinds = set(_kinds_in(cls.model_fields[info.field_name or ""].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise PydanticCustomError("float_type", "must be a number")
        return value


def _kinds_in(annotation: object) -> Iterator[object]:
    yield annotation
    for part in get_args(annotation):
        yield from _kinds_in(part)


def load_strict(
    path: Path,
    model: type[M],
    error: type[InputError],
    *,
    context: object = None,
    verbatim: re.Pattern[str] = NOTHING,
) -> M:
    """Reads `path` as YAML and checks it against `model` (which should forbid extra keys).

    Raises `error` with one line, `FILE:LINE: KEY: what is wrong`, for the first problem. The
    validators of `model` find `context` in their `info`.
    """
    document = read_document(path, error, verbatim=verbatim)
    return validate_document(document, model, error, context=context)


def read_document(
    path: Path, error: type[InputError], *, verbatim: re.Pattern[str] = NOTHING
) -> Document:
    """Reads a YAML mapping with its line numbers; raises `error` with one line.

    Numbers under dotted keys that `verbatim` matches are the text that stands there.
    """
    text = _read_text(path, error)
    try:
        values, lines = _parsed(text, verbatim)
    except YAMLError as failure:
        is_double = isinstance(failure, DuplicateKeyError)
        if not is_double and (tab := _tab_line(text)) is not None:
            raise error(f"{path}:{tab}: a tab indents this line; YAML wants spaces") from None
        raise error(_syntax_message(path, text, failure)) from None
    except (RecursionError, _TooManyNodesError):
        raise error(f"{path}: nested too deeply or expanded by aliases; write it out") from None
    except ValueError as failure:
        raise error(f"{path}: not valid YAML: {failure}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise error(f"{path}:1: the file must be a mapping of keys to values, for example 'a: 1'")
    if not _ESCAPE.search(text):
        return Document(path, values, lines)
    try:
        paired = _paired(values)
        lines = {_joined(key, ""): line for key, line in lines.items()}
    except _EscapeError as wrong:
        key, what = wrong.args
        where = Document(path, values, lines).where(key)
        raise error(f"{where}: {what}") from None
    return Document(path, paired, lines)


_MERGED = re.compile(r"(?:^|\.)<<(?:\[\d+\])?(?=\.|$)")


def _parsed(text: str, verbatim: re.Pattern[str]) -> tuple[Any, dict[str, int]]:
    """The values, and the lines of the keys."""
    yaml = YAML(typ="safe", pure=True)
    node = yaml.compose(text)
    lines = {"": 1}
    for place, line, child in _walk(node) if isinstance(node, MappingNode) else ():
        key = _MERGED.sub("", place).lstrip(".")
        lines.setdefault(key, line)
        if child.tag in _NUMBERS and verbatim.match(key):
            child.tag = "tag:yaml.org,2002:str"
    return None if node is None else yaml.constructor.construct_document(node), lines


_ESCAPE = re.compile(r"\\(?:(?:u|U0000)[dD][89a-fA-F]|0|x00|u0000|U00000000)")
"""A null character, or half of an escaped character beyond 16 bits, of which JSON makes two."""


class _EscapeError(Exception):
    """Text holds a null, or a surrogate without its other half: the dotted key, what is wrong."""


def _joined(text: str, key: str) -> str:
    if "\0" in text:
        raise _EscapeError(key, "holds a null character; take it out")
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        half = "a \\u escape is half a character; write the character"
        raise _EscapeError(key, half) from None


def _paired(value: Any, key: str = "") -> Any:
    """The value with each pair of surrogates as the character that it stands for."""
    if isinstance(value, str):
        return _joined(value, key)
    if isinstance(value, dict):
        named = [(_paired(name, key), item) for name, item in value.items()]
        return {name: _paired(item, f"{key}.{name}".lstrip(".")) for name, item in named}
    if isinstance(value, list):
        return [_paired(item, f"{key}[{index}]") for index, item in enumerate(value)]
    return value


def validate_document(
    document: Document, model: type[M], error: type[InputError], *, context: object = None
) -> M:
    """The document as `model`; raises `error` for the first of its problems in file order.

    Keys that are missing altogether come last.
    """
    try:
        return model.model_validate(document.values, context=context)
    except ValidationError as failure:
        problems = failure.errors(include_url=False)
        located = [(_key_of(problem, document), problem) for problem in problems]
        # A misspelt key also makes the right one missing: name the word that stands there.
        located.sort(
            key=lambda item: (item[1]["type"] == "missing", document.lines.get(item[0], 1))
        )
        key, problem = located[0]
        more = f" (and {len(located) - 1} more)" if len(located) > 1 else ""
        text = _describe(problem, model)
        raise error(f"{document.where(key)}: {text}{more}") from None


def _read_text(path: Path, error: type[InputError]) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as failure:
        raise error(f"{path}: cannot be read: {failure.strerror}") from None
    if len(raw) > FILE_LIMIT_BYTES:
        raise error(f"{path}: larger than {FILE_LIMIT_BYTES} bytes; is this the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = raw.count(b"\n", 0, failure.start) + 1
        raise error(f"{path}:{line}: not UTF-8 text (byte {failure.start})") from None


def _tab_line(text: str) -> int | None:
    """The first line indented with a tab."""
    for number, line in enumerate(text.splitlines(), start=1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return number
    return None


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|' + r"'[^']*'")


def _unquoted_template_line(text: str, failure: MarkedYAMLError) -> int | None:
    """The line, from 0, of a template outside quotes that YAML takes for a mapping of its own."""
    lines = text.splitlines()
    for mark in (failure.problem_mark, failure.context_mark):
        if mark is not None and mark.line < len(lines):
            bare = _QUOTED.sub("", lines[mark.line])
            if "{{" in bare or "{%" in bare:
                return int(mark.line)
    return None


def _syntax_message(path: Path, text: str, failure: YAMLError) -> str:
    if not isinstance(failure, MarkedYAMLError):
        return f"{path}: not valid YAML: {' '.join(str(failure).split())}"
    mark = failure.problem_mark or failure.context_mark
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    if (line := _unquoted_template_line(text, failure)) is not None:
        return f'{path}:{line + 1}: quote the template: "{{{{ ... }}}}"'
    problem = " ".join(str(failure.problem or failure.context or "syntax error").split())
    if problem.startswith("found duplicate key"):
        return f"{where}: {problem.split(' with value')[0].removeprefix('found ')}"
    return f"{where}: not valid YAML: {problem}"


class _TooManyNodesError(Exception):
    """The document expands to more nodes than anybody writes by hand."""


def _walk(root: Node) -> Iterator[tuple[str, int, Node]]:
    stack: list[tuple[str, Node, int]] = [("", root, 0)]
    num_nodes = 0
    while stack:
        key, node, depth = stack.pop()
        num_nodes += 1
        if num_nodes > NODE_LIMIT or depth > DEPTH_LIMIT:
            raise _TooManyNodesError
        for child_key, line, child in _children(key, node):
            yield child_key, line, child
            stack.append((child_key, child, depth + 1))


def _children(key: str, node: Node) -> Iterator[tuple[str, int, Node]]:
    """Each made a node of its own: that of an alias is its anchor's."""
    if isinstance(node, MappingNode):
        node.value = [(name, copy(value)) for name, value in node.value]
        for name, value in node.value:
            if isinstance(name, ScalarNode):
                child_key = f"{key}.{name.value}" if key else str(name.value)
                yield child_key, name.start_mark.line + 1, value
    elif isinstance(node, SequenceNode):
        node.value = list(map(copy, node.value))
        for index, value in enumerate(node.value):
            yield f"{key}[{index}]", value.start_mark.line + 1, value


def _key_of(problem: ErrorDetails, document: Document) -> str:
    """The dotted key of a problem, without the names of union members that pydantic adds."""
    key = ""
    last = len(problem["loc"]) - 1
    for index, part in enumerate(problem["loc"]):
        dotted = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}".lstrip(".")
        if dotted in document.lines or (problem["type"] == "missing" and index == last):
            key = dotted
    return key


def _describe(problem: ErrorDetails, model: type[BaseModel]) -> str:
    if problem["type"] == "extra_forbidden":
        known = _fields_at(model, problem["loc"][:-1])
        hint = suggestion(str(problem["loc"][-1]), known)
        listed = f"; the keys here are {', '.join(known)}" if known else ""
        return f"unknown key{hint or listed}"
    if problem["type"] == "missing":
        return "is required"
    text = _PLAIN_WORDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return text
    if problem["loc"][-1:] == ("[key]",):
        text = "a key must be text, in quotes"
    got = repr(problem["input"])
    shown = f" (got {got})" if len(got) <= 60 else ""
    return text[:1].lower() + text[1:] + shown


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys that the model at `loc` knows."""
    here: type[BaseModel] = model
    for part in loc:
        field = here.model_fields.get(str(part))
        inner = _model_in(field.annotation) if field is not None else None
        here = inner or here
    return [field.alias or name for name, field in here.model_fields.items()]


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for part in get_args(annotation) if (m := _model_in(part))), None)
