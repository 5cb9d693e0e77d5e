"""Long texts of a wanted length, quickly, out of sentences made once."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from random import Random

from batchrun.datasets.shapes import PROSE_BYTES_PER_TOKEN, TOOL_BYTES_PER_TOKEN
from batchrun.prose import sentence_pool, tool_pool

NUM_SENTENCES = 8_192
NUM_TOOLS = 2_048
PARAGRAPH_SENTENCES = 7


class TextSource:
    """Sentences and tools to draw from. The same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._sentences = sentence_pool(Random(f"{seed} sentences"), NUM_SENTENCES)
        self._tools = tool_pool(Random(f"{seed} tools"), NUM_TOOLS)

    def sentences(self, rng: Random, num_tokens: float) -> list[str]:
        """Sentences of `num_tokens` tokens in all, to the nearest sentence; at least one."""
        return _take(rng, self._sentences, num_tokens * PROSE_BYTES_PER_TOKEN)

    def tool_list(self, rng: Random, num_tokens: float) -> str:
        """A JSON list of tools of about `num_tokens` tokens; at least one tool."""
        tools = _take(rng, self._tools, num_tokens * TOOL_BYTES_PER_TOKEN)
        return "[" + ", ".join(tools) + "]"


def paragraphs(sentences: list[str]) -> str:
    """One text of the sentences, with a blank line after every seventh."""
    starts = range(0, len(sentences), PARAGRAPH_SENTENCES)
    return "\n\n".join(" ".join(sentences[at : at + PARAGRAPH_SENTENCES]) for at in starts)


def _take(rng: Random, pool: list[str], size_bytes: float) -> list[str]:
    """Random items of `pool` whose sizes, one separator each, add up to nearly `size_bytes`."""
    drawn: list[str] = []
    total_bytes = 0
    while not drawn or total_bytes < size_bytes:
        some = rng.choices(pool, k=max(4, int(size_bytes - total_bytes) // 64))
        drawn += some
        total_bytes += sum(map(len, some)) + len(some)
    ends = list(accumulate(len(item) + 1 for item in drawn))
    count = bisect_left(ends, size_bytes)
    before = ends[count - 1] if count else 0
    if ends[count] - size_bytes < size_bytes - before:
        count += 1
    return drawn[: max(1, count)]
