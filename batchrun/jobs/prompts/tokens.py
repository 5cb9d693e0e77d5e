"""How a model reads requests: the text of a prompt, and how many tokens a text makes.

Tokens are estimated from bytes. From what rows share follows how many of them are cached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from batchrun.errors import ConfigError
from batchrun.jobs.prompts.image_tokens import ImageTokens, num_image_tokens
from batchrun.jobs.prompts.prompt_text import ChatTemplate, prefix_text
from batchrun.pool.prefix_keys import CHUNK_BYTES

IntArray = npt.NDArray[np.int64]
TokenCounter = Callable[[bytes], int]

DEFAULT_BYTES_PER_TOKEN = 4.0
"""A first guess for English text, where no tokenizer is at hand."""
SAMPLE_ROWS = 64
SAMPLE_BYTES = 32 << 10
"""So much of a row's text is tokenised for the sample."""
WARN_SHARE = 0.9
ENOUGH_ROWS = 64
"""Rows before an agreement says anything: the first ones fill an empty cache."""


def sample_rows(num_rows: int) -> IntArray:
    """The rows for the sample, at most `SAMPLE_ROWS`, spread evenly over the job."""
    num_samples = min(num_rows, SAMPLE_ROWS)
    return np.arange(num_samples, dtype=np.int64) * num_rows // max(num_samples, 1)


def token_counter(tokenizer_file: Path) -> TokenCounter | None:
    """Counts tokens with a model's `tokenizer.json`; None when there is no such file.

    Reading the file takes a second where the vocabulary is large. Raises ConfigError when it holds
    no tokenizer.
    """
    if not tokenizer_file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as failure:  # noqa: BLE001 - the library raises nothing narrower
        raise ConfigError(f"{tokenizer_file}: is not a tokenizer: {failure}") from None
    tokenizer.no_truncation()

    def count(text: bytes) -> int:
        # The bytes of images are no characters: decoding drops them.
        words = tokenizer.encode(text.decode("utf-8", "ignore"), add_special_tokens=False)
        return len(words) + num_image_tokens(text)

    return count


class TokenRatio:
    """How many bytes of prompt text make a token, in one job.

    Begins with a sample, of so many bytes and tokens, or with `DEFAULT_BYTES_PER_TOKEN`; each count
    that comes back from the engine joins the sample.
    """

    def __init__(self, num_bytes: int = 0, num_tokens: int = 0) -> None:
        self._num_bytes = num_bytes
        self._num_tokens = num_tokens
        self._sum_ape = 0.0
        self.num_corrections = 0

    @classmethod
    def sampled(cls, texts: Iterable[bytes], count: TokenCounter | None) -> Self:
        """Measured on prompt texts, or on the parts of them that rows share; without `count` the
        ratio stays the default."""
        ratio = cls()
        if count is None:
            return ratio
        for text in texts:
            head = text[:SAMPLE_BYTES]
            ratio._num_bytes += len(head)
            ratio._num_tokens += count(head)
        return ratio

    @property
    def counted(self) -> tuple[int, int]:
        """The bytes and tokens of which the ratio is."""
        return self._num_bytes, self._num_tokens

    @property
    def bytes_per_token(self) -> float:
        """The present ratio."""
        if not self._num_tokens or not self._num_bytes:
            return DEFAULT_BYTES_PER_TOKEN
        return self._num_bytes / self._num_tokens

    @property
    def mape(self) -> float:
        """Mean of |estimated - counted| / counted, each estimate made before its correction."""
        return self._sum_ape / self.num_corrections if self.num_corrections else 0.0

    def estimate_tokens(self, text_bytes: int) -> int:
        """Estimated prompt tokens of a text, at least 1."""
        return max(1, round(text_bytes / self.bytes_per_token))

    def correct(self, text_bytes: int, num_prompt_tokens: int) -> None:
        """Learn what the engine counted for a row, the template's own tokens included."""
        if text_bytes <= 0 or num_prompt_tokens <= 0:
            return
        error = abs(self.estimate_tokens(text_bytes) - num_prompt_tokens)
        self._sum_ape += error / num_prompt_tokens
        self.num_corrections += 1
        self._num_bytes += text_bytes
        self._num_tokens += num_prompt_tokens


def predict_cached_in_row(
    shared_chunks: int, text_bytes: int, num_prompt_tokens: int, block_tokens: int
) -> int:
    """Tokens of a row that a cache which forgets nothing would hold, as vLLM counts them.

    `shared_chunks` is what the row shares with one before it (`PrefixOrder`). Where within the next
    chunk two rows part is not known: half of it is assumed. Whole blocks count, and never the last
    token of a prompt, which is computed for its logits.
    """
    if not shared_chunks or not text_bytes:
        return 0
    shared_bytes = min((shared_chunks + 0.5) * CHUNK_BYTES, text_bytes)
    tokens = min(shared_bytes * num_prompt_tokens / text_bytes, num_prompt_tokens - 1)
    return int(tokens) // block_tokens * block_tokens


@dataclass(slots=True)
class CacheAgreement:
    """Cached tokens that were predicted for a job's rows, and those that came back."""

    num_rows: int = 0
    num_predicted_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, num_predicted_tokens: int, num_cached_tokens: int) -> None:
        """Take in one finished row."""
        self.num_rows += 1
        self.num_predicted_tokens += num_predicted_tokens
        self.num_cached_tokens += num_cached_tokens

    @property
    def share(self) -> float:
        """The smaller of both sums as a share (0 to 1) of the larger; 1 where nothing is cached."""
        sums = (self.num_predicted_tokens, self.num_cached_tokens)
        return min(sums) / max(sums) if max(sums) else 1.0

    @property
    def warns(self) -> bool:
        """Whether a user should know that the engine caches less than was planned."""
        least = WARN_SHARE * self.num_predicted_tokens
        return self.num_rows >= ENOUGH_ROWS and self.num_cached_tokens < least


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """`layout` lays a request's body out as the model gets it, but for its images; `count` counts
    tokens, where the model's tokenizer is at hand. What both are made from, `source` names. Ends
    the processor of images as a context."""

    layout: Callable[[Mapping[str, object]], bytes] = prefix_text
    count: TokenCounter | None = None
    images: ImageTokens = field(default_factory=ImageTokens)
    source: str = ""

    def text(self, body: Mapping[str, object]) -> bytes:
        """The body as the model gets it: equal leading bytes mean equal leading tokens. Raises
        ImageError."""
        return self.images.text(body, self.layout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.images.close()


PLAIN_PROMPTS = PromptReader()
"""For a model of which no files are here: a common layout, four bytes to a token."""


def read_prompts(folder: Path | None, *, now: datetime, python: Path | None = None) -> PromptReader:
    """The reader for the model in `folder`; the plain one where nothing there can be used.

    `now` is what a template's date shows, `python` the engine's interpreter, for images. Takes a
    second where the vocabulary is large.
    """
    if folder is None or not folder.is_dir():
        return PLAIN_PROMPTS
    try:
        template = ChatTemplate.load(folder, now=now)
        count = token_counter(folder / "tokenizer.json")
    except ConfigError as problem:
        log.warning("%s; prompts are laid out in a common form", problem)
        return PLAIN_PROMPTS
    layout = prefix_text if template is None else template.prefix_text
    return PromptReader(layout, count, ImageTokens(folder, python), _source(folder, now, python))


def _source(folder: Path, now: datetime, python: Path | None) -> str:
    """Another text where the model's files, the date, or who reads images are others."""
    found = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*.jinja")]
    files = sorted((str(each), each.stat()) for each in found if each.is_file())
    states = [(name, state.st_size, state.st_mtime_ns) for name, state in files]
    return repr((str(folder), states, now.isoformat(), str(python)))
