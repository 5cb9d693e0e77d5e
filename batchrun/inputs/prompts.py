"""How a model reads requests: the text of a prompt, and how many tokens a text makes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from batchrun.errors import ConfigError
from batchrun.inputs.chat_template import ChatTemplate
from batchrun.inputs.prefix_text import prefix_text
from batchrun.inputs.token_ratio import TokenCounter, token_counter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """`text` lays a request's body out as the model gets it, so that equal leading bytes mean
    equal leading tokens; `count` counts tokens, where the model's tokenizer is at hand."""

    text: Callable[[Mapping[str, object]], bytes] = prefix_text
    count: TokenCounter | None = None


PLAIN_PROMPTS = PromptReader()
"""For a model of which no files are here: a common layout, four bytes to a token."""


def read_prompts(folder: Path | None, *, now: datetime) -> PromptReader:
    """The reader for the model in `folder`; the plain one where nothing there can be used.

    `now` is what a template's date shows. Takes a second where the vocabulary is large.
    """
    if folder is None or not folder.is_dir():
        return PLAIN_PROMPTS
    try:
        template = ChatTemplate.load(folder, now=now)
        count = token_counter(folder / "tokenizer.json")
    except ConfigError as problem:
        log.warning("%s; prompts are laid out in a common form", problem)
        return PLAIN_PROMPTS
    return PromptReader(prefix_text if template is None else template.prefix_text, count)
