"""Job file -> `JobSpec`: strict YAML, absolute paths, an OpenAI batch input recognised.

Also how keys must fit together, which pydantic cannot see.
"""

from __future__ import annotations

import glob
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue
from pydantic_core import from_json

from batchrun.errors import DataError, InputError, JobSpecError, suggestion
from batchrun.files import absolute, is_url
from batchrun.jobs import objects
from batchrun.jobs.inputs.rows import BOM
from batchrun.jobs.inputs.text_files import unpacked
from batchrun.jobs.prompts.templating import is_template, syntax_problem
from batchrun.jobs.request_fields import IMPOSSIBLE, field_problems
from batchrun.jobs.spec import InputFormat, JobFile, JobSpec, Source
from batchrun.strict import Document, read_document, validate_document

CONTENT_KEYS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
}
"""The body field that carries the prompt, by endpoint; also the key in the job file's `input`."""

MAX_DEADLINE_S = 3_653 * 86_400.0

Problem = tuple[str, str]
"""(dotted key, what is wrong)"""


def content_template(job: JobFile) -> JsonValue:
    """The template of the request's prompt, or None for an OpenAI batch file."""
    content: JsonValue = getattr(job.input, CONTENT_KEYS[job.endpoint])
    return content


def find_problems(job: JobFile) -> Iterator[Problem]:
    """Each way in which the keys of a job file contradict each other or their templates fail."""
    content_key = CONTENT_KEYS[job.endpoint]
    for other in ("messages", "prompt", "input"):
        if other != content_key and getattr(job.input, other) is not None:
            yield f"input.{other}", f"{job.endpoint} takes input.{content_key} instead"
    content = content_template(job)
    if content is not None:
        if job.input.format == "openai-batch":
            yield f"input.{content_key}", "an OpenAI batch file already holds whole requests"
        yield from _content_problems(job, f"input.{content_key}", content)
    yield from _request_problems(job, content_key)
    if job.start == "cheap" and job.deadline is None:
        yield "start", "cheap hours are those before a deadline: add one"


def _content_problems(job: JobFile, key: str, content: JsonValue) -> Iterator[Problem]:
    if job.endpoint == "/v1/chat/completions" and not isinstance(content, str):
        yield from _message_problems(key, content)
    elif not isinstance(content, str | list):
        yield key, "must be text or a list"
    yield from _template_problems(key, content)


def _message_problems(key: str, messages: JsonValue) -> Iterator[Problem]:
    if not isinstance(messages, list) or not messages:
        yield key, "must be a list of messages, each with role and content"
        return
    for index, message in enumerate(messages):
        here = f"{key}[{index}]"
        if not isinstance(message, dict):
            yield here, "must be a message with role and content"
        elif not isinstance(role := message.get("role"), str):
            yield f"{here}.role", f"is required and must be text{_given(message, 'role')}"
        elif not {"content", "tool_calls"} & message.keys():
            yield f"{here}.content", f"is required{_given(message, 'content')}"
        elif role not in ROLES and (hint := suggestion(role, ROLES)):
            yield f"{here}.role", f"no model knows {role!r}{hint}"


ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Chat templates may know others; a word that is nearly one of these is a slip."""


def _given(message: Mapping[str, JsonValue], wanted: str) -> str:
    """The key of the message that was to be another."""
    near = next((key for key in message if suggestion(key, [wanted])), None)
    return "" if near is None or near == wanted else f"; {near!r} stands there instead"


def _request_problems(job: JobFile, content_key: str) -> Iterator[Problem]:
    for field in job.request:
        if field == "model":
            yield "request.model", "belongs at the top of the file: model: NAME"
        elif field == content_key:
            yield f"request.{field}", f"belongs under input: input.{content_key}"
        elif field in {"stream", "stream_options"}:
            yield f"request.{field}", "a job's answers go to a file; streaming is not possible"
        elif field in IMPOSSIBLE and job.request[field]:
            yield f"request.{field}", IMPOSSIBLE[field]
    others = {name: each for name, each in job.request.items() if name not in ELSEWHERE}
    yield from field_problems(job.endpoint, others)
    if job.input.format == "openai-batch" and job.request:
        yield "request", "an OpenAI batch file already holds whole requests"
    yield from _template_problems("request", dict(job.request))


def _template_problems(key: str, value: JsonValue) -> Iterator[Problem]:
    if isinstance(value, str) and is_template(value):
        if problem := syntax_problem(value):
            yield key, f"template line {problem[0]}: {problem[1]}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _template_problems(f"{key}[{index}]", item)
    elif isinstance(value, dict):
        if "image" in value and key.startswith("input."):
            yield from _image_problems(f"{key}.image", value["image"])
        for name, item in value.items():
            yield from _template_problems(f"{key}.{name}", item)


def _image_problems(key: str, image: JsonValue) -> Iterator[Problem]:
    if not isinstance(image, dict) or not isinstance(image.get("column"), str):
        yield key, "must name a column: image: {column: NAME}"
    elif image.keys() - {"column", "detail"}:
        yield key, "knows the keys column and detail only"


TABLE_SUFFIXES = (".parquet", ".pq", ".csv", ".tsv", ".json", ".xlsx", ".xls", ".ods")
ELSEWHERE = frozenset({"model", "stream", "stream_options"})
"""Fields of a request that a job file says elsewhere, or cannot have."""

FIRST_LINE_LIMIT_BYTES = 64 << 20
BATCH_KEYS = {"custom_id", "method", "url", "body"}


def load_job_file(path: Path, *, cwd: Path) -> JobSpec:
    """Reads a job file: inputs relative to the file, the output relative to `cwd`.

    Raises JobSpecError with one line that names file, line and key, or DataError when the
    input must be looked at (no template is given) and cannot be read.
    """
    for place in (path.absolute(), cwd.absolute()):
        _check_name(place, JobSpecError)
    document = read_document(path, JobSpecError, verbatim=re.compile(r"on_done\b"))
    job = validate_document(document, JobFile, JobSpecError)
    _raise_first(document, find_problems(job))
    if job.deadline is not None and job.deadline > MAX_DEADLINE_S:
        raise JobSpecError(f"{document.where('deadline')}: is over ten years away")
    folder = path.absolute().parent
    inputs = tuple(_input_place(folder, item) for item in job.input.path)
    output = _absolute(cwd.absolute(), job.output.path)
    if output in inputs:
        raise JobSpecError(f"{document.where('output.path')}: would overwrite the input file")
    values = job.model_dump()
    values["input"] |= {"path": inputs, "format": _format(document, job, inputs)}
    values["output"] |= {"path": output}
    if job.on_done is not None:
        values["on_done"] = job.on_done.located(folder)
    source = Source(path=str(path), lines=dict(document.lines))
    return JobSpec.model_validate({**values, "source": source})


def input_files(paths: Iterable[str]) -> list[Path]:
    """The files that paths and globs stand for, each glob in sorted order.

    Raises DataError when a path does not exist or a glob matches nothing.
    """
    files: list[Path] = []
    for path in paths:
        if is_url(path):
            raise DataError(f"{path}: an object is fetched before it is read")
        if glob.has_magic(path) and not os.path.exists(path):  # noqa: PTH110 - Path's raises
            # pathlib's glob would also match hidden files, half-written ones among them.
            names = glob.glob(path, recursive=True)  # noqa: PTH207
            found = sorted(filter(os.path.isfile, names))
            if not found:
                is_name = glob.escape(unescaped(path)) == path
                problem = "no such file" if is_name else "no file matches this pattern"
                raise DataError(f"{unescaped(path)}: {problem}")
            files.extend(Path(name) for name in found)
        else:
            files.append(Path(path))
    for file in files:
        _check_name(file, DataError)
    return files


def _check_name(path: Path, error: type[InputError]) -> None:
    """Raises `error` for a path that no job can hold as text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise error(f"{os.fsencode(path)!r}: not UTF-8; rename the file or folder") from None


def is_openai_batch_file(place: str) -> bool:
    """Whether the first line of a file or an object that is not blank is an OpenAI batch request.

    Raises DataError when a file is unreadable, StorageError when an object is.
    """
    try:
        with objects.open_to_read(place) as raw, unpacked(place, raw) as file:
            lines = iter(lambda: file.readline(FIRST_LINE_LIMIT_BYTES).removeprefix(BOM), b"")
            line = next(filter(bytes.strip, lines), b"")
    except (OSError, EOFError, zlib.error) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise DataError(f"{place}: cannot be read: {reason}") from None
    try:
        first = from_json(line)
    except ValueError:
        return False
    return isinstance(first, dict) and first.keys() >= BATCH_KEYS


def _raise_first(document: Document, problems: Iterable[tuple[str, str]]) -> None:
    found = list(problems)
    if found:
        key, text = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise JobSpecError(f"{document.where(key)}: {text}{more}")


def _input_place(folder: Path, path: str) -> str:
    """As `_absolute`; where that is to be a glob, no part of it that was not written is one."""
    plain = _absolute(folder, path)
    if is_url(plain) or os.path.exists(plain):  # noqa: PTH110 - Path's raises
        return plain
    return _absolute(Path(glob.escape(str(folder))), path)


def unescaped(pattern: str) -> str:
    """What `glob.escape` made a pattern of, unless more of it is one."""
    return re.sub(r"\[([*?[])\]", r"\1", pattern)


def _absolute(folder: Path, path: str) -> str:
    return path if is_url(path) else absolute(folder, path)


def _format(document: Document, job: JobFile, inputs: tuple[str, ...]) -> InputFormat:
    if content_template(job) is not None or job.input.format == "openai-batch":
        return job.input.format
    if _is_openai_batch(job, inputs[0]):
        if job.request:
            text = "an OpenAI batch file already holds whole requests"
            raise JobSpecError(f"{document.where('request')}: {text}")
        return "openai-batch"
    key = f"input.{CONTENT_KEYS[job.endpoint]}"
    text = "is required (only an OpenAI batch JSONL file does without)"
    raise JobSpecError(f"{document.where(key)}: {text}")


def _is_openai_batch(job: JobFile, place: str) -> bool:
    if job.input.format not in {"auto", "jsonl"}:
        return False
    name = place.removesuffix(".gz").removesuffix(".zst")
    if job.input.format == "auto" and name.endswith(TABLE_SUFFIXES):
        return False
    first = objects.expand(place)[0] if is_url(place) else str(input_files([place])[0])
    return is_openai_batch_file(first)
