"""Row -> OpenAI request body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError

from batchrun.errors import JobSpecError
from batchrun.jobs.inputs.input_data import BATCH_COLUMNS, no_column
from batchrun.jobs.inputs.rows import Row
from batchrun.jobs.job_file import CONTENT_KEYS, content_template, find_problems
from batchrun.jobs.prompts.templating import Compiler, Renderer
from batchrun.jobs.request_fields import IMPOSSIBLE
from batchrun.jobs.spec import JobSpec
from batchrun.media.images import IMAGE_CODE, ImageError, check_media
from batchrun.types import RowError

_SHOWN_CHARS = 300


class RowRenderError(Exception):
    """One row does not fit the template.

    `row_error` is what the row ends with; it leaves out the row's number, so that a fault which
    all rows share can be seen to be one.
    """

    def __init__(self, row_number: int, reason: str, *, code: str = "template_error") -> None:
        super().__init__(f"row {row_number}: {reason}")
        self.row_error = RowError(code, reason)


ROW_FAULTS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
)


class RequestTemplate:
    """A job's templates, compiled. Stateless once built.

    `columns` are those the input has; `model` is the engine's id for the job's model. Without
    `may_name_media` all prompts are text. Raises JobSpecError when a template is malformed or names
    a column that is not there.
    """

    def __init__(self, spec: JobSpec, columns: Sequence[str], *, model: str) -> None:
        self._model = model
        self._endpoint = spec.endpoint
        self._fields: dict[str, Renderer] = {}
        self.may_name_media = True
        if spec.is_openai_batch:
            self.columns_used: tuple[str, ...] = BATCH_COLUMNS
            return
        for key, problem in find_problems(spec):
            raise JobSpecError(f"{spec.where(key)}: {problem}")
        compiler = Compiler(spec.endpoint, columns)
        content_key = CONTENT_KEYS[spec.endpoint]
        content = content_template(spec)
        if content is None:
            raise JobSpecError(f"{spec.where(f'input.{content_key}')}: is required")
        native = isinstance(content, str) and spec.endpoint != "/v1/completions"
        self._fields[content_key] = compiler.compile(f"input.{content_key}", content, native=native)
        self.may_name_media = compiler.may_name_media
        for name, value in spec.request.items():
            self._fields[name] = compiler.compile(f"request.{name}", value, native=True)
        _check_columns(spec, compiler, columns)
        used = frozenset().union(*compiler.columns_by_key.values())
        self.columns_used = tuple(name for name in columns if name in used)

    def render(
        self, row: Mapping[str, object], *, row_number: int, folder: Path | None = None
    ) -> Row:
        """The request body of one row, `model` set. `row` holds at least `columns_used`; in
        `folder` lie the images that it names by paths.

        Raises RowRenderError when the row does not fit.
        """
        try:
            body = self._batch_body(row) if not self._fields else self._templated_body(row, folder)
            if self.may_name_media:
                check_media(body)
        except ImageError as problem:
            raise RowRenderError(row_number, str(problem), code=IMAGE_CODE) from None
        except ROW_FAULTS as failure:
            reason = " ".join(str(failure).split())[:_SHOWN_CHARS] or type(failure).__name__
            raise RowRenderError(row_number, reason) from None
        except RecursionError:
            raise RowRenderError(row_number, "nested too deeply") from None
        except MemoryError:
            raise RowRenderError(row_number, "needs more memory than there is") from None
        return body

    def _templated_body(self, row: Mapping[str, object], folder: Path | None) -> Row:
        body: Row = {"model": self._model}
        for name, render in self._fields.items():
            body[name] = render(row, folder)
        key = CONTENT_KEYS[self._endpoint]
        body[key] = _without_nulls(body[key])
        _refuse_empty(body)
        return body

    def _batch_body(self, row: Mapping[str, object]) -> Row:
        body = row["body"]
        if not isinstance(body, dict):
            raise ValueError("'body' must be an object")
        if row["method"] != "POST":
            raise ValueError(f"'method' must be POST (got {row['method']!r})")
        if row["url"] != self._endpoint:
            raise ValueError(f"'url' is {row['url']!r} but the job's endpoint is {self._endpoint}")
        if body.get("stream"):
            raise ValueError("'stream' must not be set in a batch")
        _refuse_impossible(body)
        if body.get("model") in {None, "default"}:
            return {**body, "model": self._model}
        return body


_AS_GIVEN = frozenset({"arguments", "input_schema", "parameters"})
"""Keys of calls and tools below which null may have a meaning."""


def _without_nulls(value: object) -> object:
    """Without the keys that messages, their parts and calls have in Parquet as others have them."""
    if isinstance(value, list):
        return [*map(_without_nulls, value)]
    if not isinstance(value, dict):
        return value
    return {
        key: item if key in _AS_GIVEN else _without_nulls(item)
        for key, item in value.items()
        if item is not None or (key == "content" and value.get("role"))
    }


def _check_columns(spec: JobSpec, compiler: Compiler, columns: Sequence[str]) -> None:
    for key, names in compiler.columns_by_key.items():
        for name in sorted(names - set(columns)):
            raise JobSpecError(f"{spec.where(key)}: {no_column(name, columns)}")
    for key, names in compiler.other_names_by_key.items():
        for name in sorted(names):
            text = f"{name} is a word of templates, not the column {name!r}; rename it in the input"
            raise JobSpecError(f"{spec.where(key)}: {text}")


def _refuse_impossible(body: Mapping[str, object]) -> None:
    for name, why in IMPOSSIBLE.items():
        if body.get(name):
            raise ValueError(f"{name!r} {why}")


def _refuse_empty(body: Mapping[str, object]) -> None:
    _refuse_impossible(body)
    if "messages" in body:
        _refuse_empty_messages(body["messages"])
        return
    content = body.get("prompt", body.get("input"))
    items = content if isinstance(content, list) else [content]
    if not items or any(_is_blank(_said(item)) for item in items):
        raise ValueError("the prompt is empty")
    if not isinstance(content, str | list):
        raise ValueError("the prompt must be text or a list")


def _refuse_empty_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("each message must be an object with role and content")
        if _is_blank(_said(message)):
            raise ValueError("the prompt is empty (a user message without content)")


def _said(item: object) -> object:
    """What a user's message says; any other item of a prompt as it is."""
    if isinstance(item, dict) and item.get("role") == "user":
        return item.get("content")
    return item


def _is_blank(content: object) -> bool:
    """Whether there is neither text nor media in a content, a part or a prompt."""
    if isinstance(content, dict):
        return not content or ("text" in content and _is_blank(content["text"]))
    if isinstance(content, list):
        return all(map(_is_blank, content))
    return content is None or (isinstance(content, str) and not content.strip())
