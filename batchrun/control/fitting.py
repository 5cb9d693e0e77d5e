"""What engines that are up can take, beside what a job asks of them: said before its rows fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchrun.config import Deployment
from batchrun.control.client import DaemonClient
from batchrun.control.starting import LOOK_WAIT_S
from batchrun.errors import BatchrunError, InputError
from batchrun.home import Home
from batchrun.jobs.inputs.input_data import InputData, open_pinned
from batchrun.jobs.pin import InputPin
from batchrun.jobs.prompts.prompt_text import prefix_text
from batchrun.jobs.prompts.template import RequestTemplate, RowRenderError
from batchrun.jobs.prompts.tokens import DEFAULT_BYTES_PER_TOKEN, TokenCounter, read_prompts
from batchrun.jobs.spec import JobSpec
from batchrun.store.jobs import NewJob

SUBMIT_S = 2.0
"""So long a submission looks for rows that are too long; a dry run looks at all."""
COUNTED_BYTES = 1 << 18
AUTO_TOOLS = (None, "auto")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The fields that reserve room for an answer, by endpoint."""


@dataclass(frozen=True, slots=True)
class Takers:
    """Engines that are up: the longest context of a job's model among them, in tokens, and whether
    any of them calls tools by itself; None where they do not tell."""

    context_tokens: int | None
    takes_tools: bool | None


def find_fleet(spec: JobSpec, home: Home) -> Takers | None:
    """The engines that a job would run on; None without a daemon. Raises InputError for a model
    that none of them serves."""
    try:
        told = DaemonClient(home, timeout_s=LOOK_WAIT_S).get(
            f"/served?model={quote(spec.model, safe='')}"
        )
    except InputError:
        raise
    except BatchrunError:
        # Whatever else it says, it may still take the job.
        return None
    contexts = [each["context_tokens"] for each in told["engines"]]
    tools = [each["takes_tools"] for each in told["engines"]]
    return Takers(
        max(contexts) if contexts and None not in contexts else None,
        any(tools) if tools and None not in tools else None,
    )


@dataclass(slots=True)
class LongRows:
    """Rows that do not fit a context: how many of the `num_seen` first, and one of them."""

    num_seen: int = 0
    num_long: int = 0
    first_row: int = 0
    first_tokens: int = 0


def find_long_rows(
    spec: JobSpec,
    source: tuple[InputData, RequestTemplate],
    context_tokens: int,
    count: TokenCounter,
    limit_s: float | None,
) -> LongRows:
    """The rows whose prompt, with room for the answer, is longer than a context. No token is
    shorter than a byte: short rows cost no counting."""
    data, template = source
    found = LongRows()
    room = context_tokens - _answer_tokens(spec.request)
    ends_s = None if limit_s is None else time.monotonic() + limit_s
    for first_row, rows in data.iter_rows(template.columns_used):
        for number, row in enumerate(rows, first_row):
            found.num_seen = number + 1
            try:
                body = template.render(row, row_number=number, folder=data.folder(number))
            except RowRenderError:
                continue
            text = prefix_text(body)
            tokens = len(text) if len(text) <= room else _tokens_in(text, count)
            if tokens > room:
                found.num_long += 1
                if found.num_long == 1:
                    found.first_row, found.first_tokens = number, tokens
            if ends_s is not None and number % 64 == 0 and time.monotonic() > ends_s:
                return found
    return found


def _answer_tokens(request: Mapping[str, Any]) -> int:
    given = [request[name] for name in LIMITS if isinstance(request.get(name), int)]
    return max(given, default=1)


def _tokens_in(text: bytes, count: TokenCounter) -> int:
    head = text[:COUNTED_BYTES]
    return round(count(head) * len(text) / len(head))


def four_bytes_each(text: bytes) -> int:
    """Tokens of a text where there is no tokenizer."""
    return round(len(text) / DEFAULT_BYTES_PER_TOKEN)


def unfit(
    spec: JobSpec,
    fleet: Takers,
    source: tuple[InputData, RequestTemplate],
    count: TokenCounter,
    limit_s: float | None = None,
) -> Iterator[str]:
    """What of a job will fail on these engines, a line each."""
    tools, choice = spec.request.get("tools"), spec.request.get("tool_choice")
    if tools and fleet.takes_tools is False and choice in AUTO_TOOLS:
        yield (
            f"{spec.where('request.tools')}: no engine parses calls of tools, so every row will "
            "fail; give vllm_args --enable-auto-tool-choice and --tool-call-parser NAME, or the "
            "request a tool_choice"
        )
    if fleet.context_tokens is None:
        return
    found = find_long_rows(spec, source, fleet.context_tokens, count, limit_s)
    if found.num_long:
        share = "" if found.num_seen == source[0].num_rows else f"of the first {found.num_seen:,} "
        yield (
            f"rows {share}that are longer than the model's context of {fleet.context_tokens:,} "
            f"tokens, the answer included, and will fail: {found.num_long:,}; the first is row "
            f"{found.first_row:,} of about {found.first_tokens:,} tokens"
        )


def unfit_submission(job: NewJob, home: Home, deployment: Deployment) -> list[str]:
    """What of a job that was prepared will fail on the engines that are up; nothing without a
    daemon. Raises InputError for a model that none serves, and DataError."""
    spec = JobSpec.model_validate_json(job.spec)
    fleet = find_fleet(spec, home)
    if fleet is None:
        return []
    folder: Path | None = deployment.model_folder(home)
    pin = InputPin.model_validate_json(job.pin)
    with open_pinned(spec.input, pin, links=home.inputs) as data:
        template = RequestTemplate(spec, data.columns, model=spec.model)
        return list(unfit(spec, fleet, (data, template), _first_loaded(folder), SUBMIT_S))


def _first_loaded(folder: Path | None) -> TokenCounter:
    """Counts with the tokenizer in `folder`, which is read when there is something to count."""
    read = cache(lambda: read_prompts(folder, now=datetime.now().astimezone()).count)

    def count(text: bytes) -> int:
        return (read() or four_bytes_each)(text)

    return count
