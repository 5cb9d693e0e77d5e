"""Generated text of our own: for the tiny model's tokenizer and for the sample data sets."""

from batchrun.prose.corpus import tokenizer_corpus
from batchrun.prose.text import (
    fill,
    person_name,
    place_name,
    sentence,
    sentence_pool,
    skewed,
)
from batchrun.prose.tools import tool, tool_json, tool_pool

__all__ = [
    "fill",
    "person_name",
    "place_name",
    "sentence",
    "sentence_pool",
    "skewed",
    "tokenizer_corpus",
    "tool",
    "tool_json",
    "tool_pool",
]
