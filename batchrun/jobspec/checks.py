"""What pydantic cannot see in a job file: how its keys must fit together."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from batchrun.jobspec.model import JobFile
from batchrun.jobspec.templating import is_template, syntax_problem

CONTENT_KEYS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
}
"""The body field that carries the prompt, by endpoint; also the key in the job file's `input`."""

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


def _content_problems(job: JobFile, key: str, content: JsonValue) -> Iterator[Problem]:
    if content_key_is_messages(job) and not isinstance(content, str):
        yield from _message_problems(key, content)
    elif not isinstance(content, str | list):
        yield key, "must be text or a list"
    yield from _template_problems(key, content)


def content_key_is_messages(job: JobFile) -> bool:
    """Whether the prompt is a list of chat messages."""
    return job.endpoint == "/v1/chat/completions"


def _message_problems(key: str, messages: JsonValue) -> Iterator[Problem]:
    if not isinstance(messages, list) or not messages:
        yield key, "must be a list of messages, each with role and content"
        return
    for index, message in enumerate(messages):
        here = f"{key}[{index}]"
        if not isinstance(message, dict):
            yield here, "must be a message with role and content"
        elif not isinstance(message.get("role"), str):
            yield f"{here}.role", "is required and must be text"
        elif not {"content", "tool_calls"} & message.keys():
            yield f"{here}.content", "is required"


def _request_problems(job: JobFile, content_key: str) -> Iterator[Problem]:
    for field in job.request:
        if field == "model":
            yield "request.model", "belongs at the top of the file: model: NAME"
        elif field == content_key:
            yield f"request.{field}", f"belongs under input: input.{content_key}"
        elif field in {"stream", "stream_options"}:
            yield f"request.{field}", "a job's answers go to a file; streaming is not possible"
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
        if "image" in value:
            yield from _image_problems(f"{key}.image", value["image"])
        for name, item in value.items():
            yield from _template_problems(f"{key}.{name}", item)


def _image_problems(key: str, image: JsonValue) -> Iterator[Problem]:
    known = {"column", "detail"}
    if not isinstance(image, dict) or not isinstance(image.get("column"), str):
        yield key, "must name a column: image: {column: NAME}"
    elif image.keys() - known:
        yield key, "knows the keys column and detail only"
