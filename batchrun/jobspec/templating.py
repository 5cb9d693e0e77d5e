"""The Jinja2 environment of job files: sandboxed, strict, without loader or globals of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEXT_LIMIT_CHARS = 64 << 20
"""Longest text that a template may produce."""

_SIZED = (str, bytes, list, tuple)


class JobEnvironment(ImmutableSandboxedEnvironment):
    """Jinja2 without reach into Python, and with the results of `*` and `**` bounded in size."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses operators whose result would be enormous (raises SecurityError)."""
        if operator == "**" and abs(right) > 64:
            raise SecurityError("the exponent is over 64")
        if operator == "*" and _product_size(left, right) > TEXT_LIMIT_CHARS:
            raise SecurityError("the product is too long")
        return super().call_binop(context, operator, left, right)


def make_environment() -> JobEnvironment:
    """A fresh environment for one job's templates."""
    environment = JobEnvironment(
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        finalize=_refuse_null,
    )
    environment.filters["fromjson"] = json.loads
    environment.filters["tojson"] = _to_json
    return environment


def is_template(text: str) -> bool:
    """Whether Jinja2 would do anything to `text`."""
    return "{{" in text or "{%" in text or "{#" in text


def single_expression(environment: JobEnvironment, text: str) -> str | None:
    """The expression of a template that is one `{{ expression }}` and nothing else."""
    stripped = text.strip()
    body = environment.parse(stripped).body
    if len(body) != 1 or not isinstance(body[0], nodes.Output) or not stripped.startswith("{{"):
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
        return failure.lineno, failure.message or "syntax error"
    return None


def _refuse_null(value: object) -> object:
    if value is None:
        raise ValueError("a value is null; write {{ column | default('', true) }} to allow it")
    if isinstance(value, bytes):
        raise ValueError("a value is bytes, not text")
    return value


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_plain_text)


def _plain_text(value: object) -> str:
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
